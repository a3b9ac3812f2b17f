"""`x-ratelimit-*` headers, as OpenAI writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from loraplex.control.types import Windows


def limit_headers(windows: Windows) -> Iterator[tuple[str, str]]:
    for name, window in windows.items():
        yield f"x-ratelimit-limit-{name}", str(window.limit)
        yield f"x-ratelimit-remaining-{name}", str(max(0, window.remaining))
        yield f"x-ratelimit-reset-{name}", duration(window.reset_s)


def whole_seconds(seconds: float) -> int:
    """Rounded up. Less than a microsecond is what sums of floats are off, and is not worth another second."""
    return math.ceil(round(seconds, 6))


def duration(seconds: float) -> str:
    """Go's way to write a time, rounded up to whole seconds: `1s`, `6m0s`, `1h0m0s`."""
    whole = max(0, whole_seconds(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
