"""What both engine clients share: the live streams, the calls that wait for an answer, and residency."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from loraplex.adapters.ref import AdapterRef
from loraplex.engine import protocol as wire
from loraplex.engine.types import AdapterState, EngineError, EngineRequest, ErrorCode, TokenEvent
from loraplex.serving.client import RequestStream, error_event
from loraplex.serving.errors import EngineOverloaded, EngineUnavailable, ServingError
from loraplex.serving.shares import Shares

CALL_TIMEOUT_S = 10.0
MAX_KNOWN_REFS = 4096

Answer = wire.Stats | wire.Cache | wire.Done | wire.Pong


class EngineSession:
    """The client's half of the conversation with an engine, whatever carries it.

    `send` passes a command on and never blocks; `on_damaged` hears of versions whose stored bytes the engine found
    damaged or lost. The owner calls `dispatch` for each event that arrives and
    `fail` when the engine is gone, on the event loop's thread.
    """

    def __init__(
        self,
        send: Callable[[wire.Command], None],
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
    ) -> None:
        self._send = send
        self._on_damaged = on_damaged
        self._streams: dict[str, RequestStream] = {}
        self._shares = Shares()
        self._weights: dict[str, float] = {}
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._shared: dict[type, asyncio.Future[Answer]] = {}
        self._next_call = 0
        self._states: dict[str, AdapterState] = {}
        self._refs: OrderedDict[str, AdapterRef] = OrderedDict()
        self._pins: dict[str, AdapterRef] = {}
        self.draining = False
        self.num_served = 0
        """Requests that came to a proper end."""

    # Requests.

    @property
    def num_live(self) -> int:
        return len(self._streams)

    def submit(self, requests: Sequence[EngineRequest], *, max_inflight: int) -> list[RequestStream]:
        """All of one tenant. Room for all of them is taken before the first is sent."""
        tenant_id = requests[0].tenant_id
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id} is live already")
        if not self._shares.take(tenant_id, max_inflight, len(requests)):
            held = self._shares.held(tenant_id)
            raise EngineOverloaded(
                f"the engine has {len(self._streams)} sequences in flight, {held} of them yours, and takes no "
                f"{len(requests)} more of them now",
                is_own=self._shares.is_beyond_share(tenant_id, max_inflight, len(requests)),
            )
        streams: list[RequestStream] = []
        for request in requests:
            try:
                self._send(wire.Add(request))
            except BaseException:
                self._shares.give_back(tenant_id, len(requests) - len(streams))
                for stream in streams:
                    stream.abort()
                raise
            streams.append(RequestStream(request, self._abort))
            self._streams[request.request_id] = streams[-1]
            self._weights[tenant_id] = request.weight
            if request.adapter is not None:
                self._know(request.adapter)
        return streams

    @property
    def weights(self) -> dict[str, float]:
        return dict(self._weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        live = {tenant_id: weight for tenant_id, weight in weights.items() if tenant_id in self._weights}
        if live:
            self._weights |= live
            self._send(wire.SetWeights(live))

    def _give_back(self, tenant_id: str) -> None:
        """One of its requests has ended."""
        self._shares.give_back(tenant_id)
        if not self._shares.held(tenant_id):
            del self._weights[tenant_id]

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send(wire.Abort((request_id,)))

    # Adapters.

    def adapter_state(self, digest: str) -> AdapterState:
        return self._states.get(digest, "cold")

    async def pin(self, ref: AdapterRef) -> None:
        await self._done(lambda call: wire.Pin(call, ref))
        self._pins[ref.digest] = ref
        self._know(ref)

    def forget_pin(self, digest: str) -> None:
        """The next engine is not asked for it."""
        self._pins.pop(digest, None)

    async def unpin(self, digest: str) -> None:
        self.forget_pin(digest)
        await self._done(lambda call: wire.Unpin(call, digest))

    async def drop(self, digest: str) -> None:
        self.forget_pin(digest)
        self._refs.pop(digest, None)
        await self._done(lambda call: wire.Drop(call, digest))

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        for ref in reversed(refs):
            self._know(ref)
        self._send(wire.Prefetch(tuple(refs)))

    def hot_refs(self, also: tuple[AdapterRef, ...] = ()) -> tuple[AdapterRef, ...]:
        """The versions on the device, and those of `also` that have not been dropped, that are not pinned; the most
        recently used first."""
        wanted = {ref.digest for ref in also}
        return tuple(
            ref
            for digest, ref in reversed(self._refs.items())
            if (self._states.get(digest) == "hot" or digest in wanted) and digest not in self._pins
        )

    def restore(self, hot: tuple[AdapterRef, ...]) -> None:
        """Ask a new engine for what the old one had: the pins, then the versions that were hot."""
        for ref in self._pins.values():
            self._next_call += 1
            self._send(wire.Pin(self._next_call, ref))
        if hot:
            self._send(wire.Prefetch(hot))

    def _know(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        while len(self._refs) > MAX_KNOWN_REFS:
            self._refs.popitem(last=False)

    # Calls.

    async def stats(self) -> wire.EngineStats:
        answer = await self._shared_call(wire.GetStats)
        if not isinstance(answer, wire.Stats):
            raise ServingError(_refusal(answer))
        return answer.stats

    async def cache(self) -> list[wire.CacheEntry]:
        answer = await self._shared_call(wire.GetCache)
        if not isinstance(answer, wire.Cache):
            raise ServingError(_refusal(answer))
        return list(answer.entries)

    async def ping(self) -> None:
        """Returns when the step thread has answered between two steps."""
        await self._wait(self._begin(wire.Ping))

    async def _done(self, make: Callable[[int], wire.Command]) -> None:
        answer = await self._wait(self._begin(make))
        if isinstance(answer, wire.Done) and answer.error is not None:
            raise ServingError(answer.error)

    async def _shared_call(self, kind: type[wire.GetStats] | type[wire.GetCache]) -> Answer:
        """One question at a time of a kind: who asks while it is under way shares its answer."""
        future = self._shared.get(kind)
        if future is None:
            future = self._shared[kind] = self._begin(kind)
            future.add_done_callback(lambda _: self._shared.pop(kind, None))
        return await self._wait(future)

    def _begin(self, make: Callable[[int], wire.Command]) -> asyncio.Future[Answer]:
        self._next_call += 1
        call = self._next_call
        self._send(make(call))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        future.add_done_callback(lambda _: self._calls.pop(call, None))
        return future

    async def _wait(self, future: asyncio.Future[Answer]) -> Answer:
        await asyncio.wait([future], timeout=CALL_TIMEOUT_S)  # does not cancel it: others may share it
        if not future.done():
            future.set_exception(EngineUnavailable(f"the engine did not answer within {CALL_TIMEOUT_S:g} s"))
        return future.result()

    # The owner's side.

    def dispatch(self, event: wire.Event) -> None:
        match event:
            case wire.Events(events):
                for item in events:
                    self._deliver(item)
            case wire.ResidencyChanged(states):
                for digest, state in states.items():
                    if state == "cold":
                        self._states.pop(digest, None)
                    else:
                        self._states[digest] = state
            case wire.Damaged(digests):
                self._on_damaged(digests)
            case wire.Stats() | wire.Cache() | wire.Done() | wire.Pong():
                future = self._calls.get(event.call)
                if future is not None and not future.done():
                    future.set_result(event)
            case wire.Starting() | wire.Ready() | wire.Heartbeat() | wire.Fatal():
                pass  # the owner's own affair

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None or event.duplicate:
            return
        if event.finish_reason is not None:
            del self._streams[event.request_id]
            self.num_served += event.finish_reason in ("stop", "length")
            self._give_back(stream.request.tenant_id)
            if self._was_cut(event, stream):
                code: ErrorCode = "draining" if self.draining else "engine_restarting"
                error = EngineError(code, "the engine shut down before the request ended")
                event = replace(event, finish_reason="error", error=error)
        stream.put(event)

    @staticmethod
    def _was_cut(event: TokenEvent, stream: RequestStream) -> bool:
        """Nobody above asked for this end: somebody told the engine to stop."""
        if event.finish_reason == "abort":
            return not stream.aborted
        return event.error is not None and event.error.code == "draining"

    def fail(self, code: ErrorCode, message: str, retry_after_s: float | None = None) -> int:
        """The engine is gone: end every live stream and every call with this error, forget residency.
        Returns the number of streams that ended."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._give_back(stream.request.tenant_id)
            stream.put(error_event(request_id, code, message, retry_after_s))
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(EngineUnavailable(message))
                future.exception()  # whoever waited may have been cancelled: that is no loss to report
        self._states.clear()
        return len(streams)


def _refusal(answer: Answer) -> str:
    return (answer.error if isinstance(answer, wire.Done) else None) or "the engine gave no answer"
