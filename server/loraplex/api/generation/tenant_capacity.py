"""How much of the API process one tenant may take at a time, so that its requests do not delay others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from loraplex.api.errors import ApiError
from loraplex.serving.fair_share import FairShare
from loraplex.serving.tenant_threads import TenantThreads

T = TypeVar("T")

_TOO_MANY_REQUESTS = "The server has too many requests at once, {held} of them yours. Please try again."
_TOO_MANY_BYTES = (
    "The bodies of all requests at once are too large, {held} bytes of them are yours. Please try again, with fewer or "
    "smaller requests at a time."
)
_TOO_MANY_LOGPROBS = (
    "The server has too many numbers to keep for answers at once, {held} of them yours. Please try again, ask for "
    'fewer tokens, likely tokens or inputs, or say "stream": true where text is generated.'
)


class TenantCapacity:
    """Requests in flight, bytes of their bodies, and log probabilities of answers that are kept until they are whole,
    shared as `FairShare` does, and threads, shared as `TenantThreads` does."""

    def __init__(
        self, *, max_in_flight: int, max_body_bytes: int, max_kept_logprobs: int, threads: int
    ) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = FairShare()
        self._max_body_bytes = max_body_bytes
        self._body_bytes = FairShare()
        self._max_kept_logprobs = max_kept_logprobs
        self._kept_logprobs = FairShare()
        self._threads = TenantThreads(threads)

    @contextmanager
    def request(self, tenant_id: str) -> Iterator[None]:
        """Around the whole of a request. Raises ApiError (503)."""
        _take(self._in_flight, tenant_id, self._max_in_flight, 1, _TOO_MANY_REQUESTS)
        try:
            yield
        finally:
            self._in_flight.release(tenant_id)

    def share(self, tenant_id: str) -> int:
        """Requests that the tenant may have in flight if all tenants take as many as they can."""
        return self._in_flight.share(tenant_id, self._max_in_flight)

    @contextmanager
    def body(self, tenant_id: str) -> Iterator[Callable[[int], None]]:
        """Around reading a body and what is made of it. Call the function with the number of bytes that have come; it
        raises ApiError (503)."""
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            _take(self._body_bytes, tenant_id, self._max_body_bytes, num_bytes, _TOO_MANY_BYTES)
            taken += num_bytes

        try:
            yield take
        finally:
            if taken:
                self._body_bytes.release(tenant_id, taken)

    @contextmanager
    def kept_logprobs(self, tenant_id: str, number: int) -> Iterator[None]:
        """Around making and reading an answer that is not streamed and may have `number` log probabilities. Raises
        ApiError (503)."""
        if number:
            _take(self._kept_logprobs, tenant_id, self._max_kept_logprobs, number, _TOO_MANY_LOGPROBS)
        try:
            yield
        finally:
            if number:
                self._kept_logprobs.release(tenant_id, number)

    async def in_thread(self, tenant_id: str, function: Callable[..., T], *args: object) -> T:
        """`function(*args)` in a worker thread, in its tenant's turn. A cancelled caller does not wait for its end."""
        scope = anyio.CancelScope()

        async def run() -> T:
            with scope:
                return await self._threads.run(tenant_id, function, *args)
            raise asyncio.CancelledError

        running = asyncio.create_task(run())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # What has begun in a thread cannot be ended: nobody waits for it any more, and the thread stays counted.
            scope.cancel()
            running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise


def _take(share: FairShare, tenant_id: str, capacity: int, amount: int, message: str) -> None:
    """Raises ApiError (503)."""
    if not share.acquire(tenant_id, capacity, amount):
        is_own = share.is_beyond_share(tenant_id, capacity, amount)
        message = message.format(held=share.held(tenant_id))
        raise ApiError("server_overloaded", message, is_own=is_own)
