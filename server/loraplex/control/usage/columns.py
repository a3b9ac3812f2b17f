"""The groups and the counts of usage sums. Without a database, for the command line too."""

from __future__ import annotations

from typing import Literal

Bucket = Literal["hour", "day", "month", "none"]
Group = Literal["tenant", "key", "adapter", "version", "status"]
GROUPS: tuple[Group, ...] = ("tenant", "key", "adapter", "version", "status")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
