"""Samples that run while their clients ask for the result.

Tinker's clients submit a sample and then ask for its result until it is there. A sample is answered as any request is,
by an application that sees a client: one that hangs up when nobody asks any more."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from loraplex.api.drain import Drain
from loraplex.api.errors import ApiError
from loraplex.control.types import Principal

_K = TypeVar("_K")

MAX_SAMPLES_A_KEY = 128
"""Requests of one key that run, or whose result waits. A tenant has half of its share of the requests in flight."""
UNASKED_S = 60.0
"""A request for which nobody has asked for so long is ended."""
KEPT_S = 20.0
"""How long a result waits for its client."""


class Sample:
    """One request, and the client's side of its exchange."""

    def __init__(self, key_id: str | None, body: bytes) -> None:
        self.id = secrets.token_urlsafe(24)
        self.key_id = key_id
        self.accepted = asyncio.Event()
        """The request was admitted, and its body is valid."""
        self.done = asyncio.Event()
        """There is an answer, or there will be none."""
        self.status: int | None = None
        self.headers = Headers()
        self.body = bytearray()
        self._request: bytes | None = body
        self._left = asyncio.Event()
        self._taken = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._asking = 0
        self._is_closing = False

    async def receive(self) -> Message:
        if self._request is not None:
            body, self._request = self._request, None
            return {"type": "http.request", "body": body, "more_body": False}
        self.accepted.set()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The end of a body is held until the result is taken, so that its room counts until then."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], Headers(raw=message["headers"])
            return
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.done.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEPT_S):
                    await self._taken.wait()

    async def take(self) -> None:
        """The client has the result."""
        self._taken.set()

    def leave(self) -> None:
        """The client wants no result."""
        self._left.set()
        self._taken.set()

    def close(self) -> None:
        """From now on its client can ask no more: end it, once nobody does."""
        self._is_closing = True
        if not self._asking:
            self.leave()

    def watch(self) -> None:
        """From now on its client has to ask."""
        self.unwatch()
        self._timer = asyncio.get_running_loop().call_later(UNASKED_S, self.leave)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is done, within this time."""
        self._asking += 1
        self.unwatch()
        try:
            async with asyncio.timeout(timeout_s):
                await self.done.wait()
        except TimeoutError:
            return False
        finally:
            self._asking -= 1
            if not self._asking and self._is_closing:
                self.leave()
            elif not self._asking and not self.done.is_set():
                self.watch()
        return True


class Samples:
    """Samples of all keys, each by its id, of one event loop. Once the server refuses requests, and so those for
    results too, those that nobody asks for are ended. `share`: the requests that a tenant may have in flight."""

    def __init__(self, app: ASGIApp, drain: Drain, share: Callable[[str], int]) -> None:
        self._app = app
        self._share = share
        self._samples: dict[str, Sample] = {}
        self._by_key: Counter[str | None] = Counter()
        self._by_tenant: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        drain.at_refusal(self._close)

    async def submit(self, scope: Scope, caller: Principal, body: bytes) -> Sample:
        """A sample that was admitted, or that is done, where it was refused. Raises ApiError (429)."""
        tenant = caller.tenant_id or ""
        if self._by_key[caller.key_id] >= MAX_SAMPLES_A_KEY:
            message = f"This API key has {MAX_SAMPLES_A_KEY} samples at once, as many as it may have."
            raise ApiError("rate_limit_exceeded", message)
        # The other half is for the requests that ask for the results.
        if self._by_tenant[tenant] >= self._share(tenant) // 2:
            message = (
                f"Your keys have {self._by_tenant[tenant]} samples at once, as many as they may have now."
            )
            raise ApiError("rate_limit_exceeded", message)
        sample = Sample(caller.key_id, body)
        self._samples[sample.id] = sample
        self._by_key[caller.key_id] += 1
        self._by_tenant[tenant] += 1
        sample.watch()
        task = asyncio.create_task(self._run(scope, sample, tenant))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        waits = [asyncio.ensure_future(event.wait()) for event in (sample.accepted, sample.done)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            sample.leave()
            raise
        finally:
            for wait in waits:
                wait.cancel()
        return sample

    def of(self, key_id: str | None, request_id: str) -> Sample | None:
        """The sample with this id, of this key."""
        sample = self._samples.get(request_id)
        return sample if sample is not None and sample.key_id == key_id else None

    def _close(self) -> None:
        for sample in self._samples.values():
            sample.close()

    async def _run(self, scope: Scope, sample: Sample, tenant: str) -> None:
        try:
            await self._app(scope, sample.receive, sample.send)
        finally:
            sample.done.set()
            sample.unwatch()
            del self._samples[sample.id]
            _count_down(self._by_key, sample.key_id)
            _count_down(self._by_tenant, tenant)


def _count_down(counts: Counter[_K], key: _K) -> None:
    """One less; a key without any is left out."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
