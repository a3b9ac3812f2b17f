"""How much work something is, counted: the same on every machine, and under any load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def lines_run(act: Callable[[], object]) -> int:
    """Lines of Python that run, and calls that are made, while `act` does. Without the garbage collector, which others
    have functions called by."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
