"""What sums of usage are parted by, and what they count. For the command line too, which has no use for a database."""

from __future__ import annotations

from typing import Literal

Bucket = Literal["hour", "day", "month", "none"]
Group = Literal["tenant", "key", "adapter", "version", "status"]
GROUPS: tuple[Group, ...] = ("tenant", "key", "adapter", "version", "status")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
