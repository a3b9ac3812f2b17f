"""Waiting for something that another thread or process does, without a fixed sleep."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable


def eventually(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Return as soon as `condition` holds; fail if it does not within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout} seconds: {condition}")
        time.sleep(0.005)


class LoopTime:
    """Seconds in which this event loop ran: a stall of the process, however long, counts as two ticks at most. For
    bounds on how long something waits, which say nothing about the machine."""

    TICK_S = 0.005

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LoopTime]:
        task = asyncio.create_task(self._tick())
        try:
            yield self
        finally:
            task.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(self.TICK_S)
            last, passed = loop.time(), loop.time() - last
            self.seconds += min(passed, 2 * self.TICK_S)
