"""The end of a server's life: fail readiness, keep serving for a while, refuse what is new, finish what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from loraplex.api.errors import ApiError

RETRY_ELSEWHERE_S = 5.0


class DrainPhase(Enum):
    SERVING = "serving"
    GRACE = "grace"
    """Not ready any more, so that balancers turn away; requests are still served, with `Connection: close`."""
    REFUSING = "refusing"
    """New requests get 503 `draining`; running ones go on."""


class Drain:
    """Counts the requests that are being answered and says whether new ones are taken. Of one event loop.

    `max_in_flight` bounds them. On SIGTERM the owner calls `run(grace_s, timeout_s)`, or the steps of it by name.
    """

    def __init__(self, *, max_in_flight: int = 4096) -> None:
        self.phase = DrainPhase.SERVING
        self.in_flight = 0
        self.max_in_flight = max_in_flight
        self._idle = asyncio.Event()
        self._idle.set()
        self._at_refusal: list[Callable[[], None]] = []

    @property
    def draining(self) -> bool:
        return self.phase is not DrainPhase.SERVING

    def begin(self) -> None:
        if self.phase is DrainPhase.SERVING:
            self.phase = DrainPhase.GRACE

    def at_refusal(self, act: Callable[[], None]) -> None:
        """Have `act` called when new requests begin to be refused."""
        self._at_refusal.append(act)

    def refuse(self) -> None:
        self.phase = DrainPhase.REFUSING
        for act in self._at_refusal:
            act()

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once nothing is being answered; False where something still is after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def run(self, grace_s: float, timeout_s: float) -> bool:
        """The whole way. True if everything that ran could finish."""
        self.begin()
        await asyncio.sleep(grace_s)
        self.refuse()
        return await self.wait_idle(timeout_s)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around the answering of one request. Raises ApiError (503) where it is not taken."""
        if self.phase is DrainPhase.REFUSING:
            message = "The server is shutting down. Please try again; another one will answer."
            raise ApiError("draining", message, retry_after_s=RETRY_ELSEWHERE_S)
        if self.in_flight >= self.max_in_flight:
            raise ApiError("server_overloaded", "The server has too many requests at once. Please try again.")
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()
