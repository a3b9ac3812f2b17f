"""Turns in the engine: versions are measured side by side, and one alone where the engine has died beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

ALONE_S = 30.0
"""How long a version that the engine may have died of is measured at most: others wait meanwhile."""


class EngineTurns:
    """Turns of one event loop. Each ends after `longest_s`, with a TimeoutError."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._entrance = asyncio.Lock()
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        async with self._entrance:
            self._num_inside += 1
            self._is_empty.clear()
        try:
            async with asyncio.timeout(self._longest_s):
                yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """While nobody else has a turn: if the engine dies in it, nobody else is the reason."""
        async with self._entrance:
            await self._is_empty.wait()
            async with asyncio.timeout(min(ALONE_S, self._longest_s)):
                yield
