"""An event loop for tests of time-outs, in which no time passes but what is waited for."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something runs, and a wait for a time ends at once, with the clock set forward. Not
    for what waits for threads or sockets beside a time-out."""

    def __init__(self) -> None:
        self._waits = _Waits()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.seconds


class _Waits(selectors.DefaultSelector):
    """What the loop waits in."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds += timeout or 0.0
        return super().select(None if timeout is None else 0)
