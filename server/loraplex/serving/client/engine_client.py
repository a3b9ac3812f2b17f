"""The engine as the API sees it: submit a request, read its events, abort it.

Two implementations pass one conformance suite: `SocketEngineClient` (one engine process, supervised) and
`ClusterEngineClient` (several engines). All methods belong to one event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, Self

import msgspec

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.event_buffer import EventBuffer
from loraplex.engine.logprobs import Logprobs, Scores
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import AdapterState, EngineError, EngineRequest, ErrorCode, TokenEvent


class RequestStream:
    """The events of one request, for one reader: `async for event in stream`.

    Ends after the terminal event (the one with `finish_reason`). There is exactly one, whatever happens
    to the engine. While the reader is slow, token events are merged into one, so that the buffer holds
    at most the request's `max_tokens` ids, and the log probabilities that it asked for. A cancelled read loses
    nothing. As a context manager it aborts the request on the way out if it has not ended.
    """

    def __init__(self, request: EngineRequest, on_abort: Callable[[str], None]) -> None:
        self.request = request
        self._on_abort = on_abort
        self._unread = EventBuffer()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the reader, while there is nothing to read
        self._closed = False  # the terminal event has been put
        self._ended = False  # the terminal event has been read
        self._aborted = False
        self.on_end: Callable[[RequestStream, TokenEvent], None] | None = None
        """Called when the terminal event has been put."""
        self._received: list[int] = []
        self._num_prompt_scores = 0
        self._num_repeated = 0  # prompt scores to come that an earlier engine has sent already

    # The reader's side.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._ended:
            raise StopAsyncIteration
        while not self._unread:
            if self._loop is None:
                self._loop = (
                    asyncio.get_running_loop()
                )  # not for each token: it asks the system for the process' id
            self._waiter = self._loop.create_future()
            await self._waiter
        event = self._unread.take()
        self._ended = event.finish_reason is not None
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Ask the engine to end this request; it then ends with its terminal event like any other. Does
        nothing when it has ended or was aborted before."""
        if self._closed or self._aborted:
            return
        self._aborted = True
        self._on_abort(self.request.request_id)

    @property
    def finished(self) -> bool:
        """The terminal event has arrived, though perhaps it has not been read."""
        return self._closed

    @property
    def aborted(self) -> bool:
        """The reader's side has asked for the end."""
        return self._aborted

    @property
    def num_received(self) -> int:
        """Tokens that the engine has sent, read or not."""
        return len(self._received)

    # The client's side.

    @property
    def received(self) -> Sequence[int]:
        """The tokens that the engine has sent, read or not."""
        return self._received

    def hand_to(self, on_abort: Callable[[str], None], request: EngineRequest | None = None) -> None:
        """Have another engine serve it from here on, by `request` where that is another. What the next one tells of the
        prompt for the second time is left out."""
        self._on_abort = on_abort
        self.request = self.request if request is None else request
        self._num_repeated = 0 if self._received else self._num_prompt_scores

    def put(self, event: TokenEvent) -> None:
        """Called by the client on the event loop's thread. What follows a terminal event is ignored."""
        if self._closed:
            return
        self._received += event.token_ids
        if event.scores is not None and event.scores.prompt is not None:
            event = self._without_repeated(event, event.scores.prompt)
        self._closed = event.finish_reason is not None
        self._unread.add(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._closed and self.on_end is not None:
            self.on_end(self, event)

    def _without_repeated(self, event: TokenEvent, prompt: Logprobs) -> TokenEvent:
        repeated = min(self._num_repeated, len(prompt))
        self._num_repeated -= repeated
        self._num_prompt_scores += len(prompt) - repeated
        if not repeated:
            return event
        assert event.scores is not None
        rest = prompt.part(repeated, len(prompt)) if repeated < len(prompt) else None
        scores = Scores(event.scores.output, rest)
        return msgspec.structs.replace(event, scores=scores if scores.num_values else None)


class EngineClient(Protocol):
    """The interface of an engine for the API. `info` is known once `start` has returned, and stays readable while the
    engine is being replaced; `healthy` says whether requests are taken now; `unhealthy_reason` why not."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def unhealthy_reason(self) -> str | None: ...
    @property
    def num_restarts(self) -> int: ...
    @property
    def num_live(self) -> int:
        """Requests that have not ended, without those in the background."""
        ...

    async def start(self) -> None:
        """Returns when the engine can take requests. Raises EngineStartError with one clear line."""
        ...

    async def close(self, *, drain_s: float = 0) -> None:
        """Take nothing new, let what runs finish within `drain_s` seconds, end the rest, stop the engine."""
        ...

    def submit(self, *requests: EngineRequest) -> list[RequestStream]:
        """All of these requests of one tenant, or none. Raises EngineOverloaded at the bound on requests in flight,
        EngineUnavailable (EngineDraining) where no engine takes requests, ValueError for an id that is live already."""
        ...

    def adapter_state(self, digest: str) -> AdapterState:
        """Where the version was a moment ago; a hint. The truth is in a request's first event."""
        ...

    @property
    def resident(self) -> Mapping[str, AdapterState]:
        """The versions in memory a moment ago, by digest."""
        ...

    @property
    def pins(self) -> Mapping[str, AdapterRef]:
        """The versions that were pinned, by digest; also while no engine is up."""
        ...

    async def stats(self) -> EngineStats: ...
    async def cache(self, digests: Collection[str] | None = None) -> list[CacheEntry]:
        """The versions of `digests` that the engine knows; None: all of them, which holds up a step where there are
        thousands."""
        ...

    async def pin(self, ref: AdapterRef) -> None:
        """Keep this version on the device; it comes back after a restart. Raises ServingError where the
        engine refuses. Returns when the engine has noted it, which may be before it is loaded."""
        ...

    async def unpin(self, digest: str) -> None: ...
    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        """A hint that these versions will be asked for, the first of them first: bring them nearer as far as there is
        room without evicting any. Says nothing of what came of it; nothing does where no engine is up."""
        ...

    def warm(self, refs: Sequence[AdapterRef]) -> None:
        """Load these versions in their order, behind every load that a request waits for, as far as there is free
        memory. They replace those of the last call. A hint, as `prefetch` is."""
        ...

    @property
    def warming(self) -> bool:
        """Whether loads of `warm`, or of a restart, go on."""
        ...

    async def wait_pins(self, refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        """Return when no pinned version is on its way to the device, or after some seconds. Those of `refs`, which were
        pinned, that are not there: another one waits for them, they failed, or their pin was taken away meanwhile.
        Raises EngineUnavailable."""
        ...

    @property
    def served_tenants(self) -> set[str]:
        """The tenants with a request that has not ended."""
        ...

    def set_tenants(self, terms: Mapping[str, TenantTerms]) -> None:
        """From now on the engine serves these tenants by these terms, also what it has of them already; so does one
        that comes in its place. Costs nothing where they are as before."""
        ...

    async def drop(self, digest: str) -> None:
        """Forget a version that was deleted; what runs on it finishes."""
        ...

    async def measure_sites(self, ref: AdapterRef) -> SiteOutputs:
        """Measure the outputs of this version's sites for the fixed probes, computed before all other requests of the
        tenant that wait. It is loaded as for any request, within the tenant's limits of memory that the engine knows;
        where that fails, the outputs say so. Raises ServingError: EngineUnavailable and EngineOverloaded where it makes
        sense to try again, EngineLost where the engine died meanwhile, MeasureFailed with the engine's code else."""
        ...


def error_event(
    request_id: str, code: ErrorCode, message: str, retry_after_s: float | None = None
) -> TokenEvent:
    """The terminal event of a request that failed."""
    return TokenEvent(request_id, finish_reason="error", error=EngineError(code, message, retry_after_s))
