"""Waiting for something that another thread or process does, without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Return as soon as `condition` holds; fail if it does not within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} seconds: {condition}")
        time.sleep(0.005)
