"""The engine client without its transport: live streams, calls that wait for an answer, residency."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Concatenate, ParamSpec

import msgspec

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.numerics import SiteOutputs
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.core.handed import HandedBlock
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.engine.tenant_terms import DEFAULT_TERMS, TenantTerms
from loraplex.engine.types import AdapterState, EngineError, EngineRequest, ErrorCode, Namespace, TokenEvent
from loraplex.serving.demand import Demand
from loraplex.serving.engines.calls import AnswerT, Calls
from loraplex.serving.engines.measuring import measure_request, read_outputs
from loraplex.serving.engines.stream import RequestStream, error_event
from loraplex.serving.errors import (
    EngineDraining,
    EngineOverloaded,
    EngineUnavailable,
    TextTooLong,
)
from loraplex.serving.fair_share import FairShare

PINS_TIMEOUT_S = 15.0
"""Time for the pinned versions to come to the device before requests are taken."""
_PINS_LOOK_S = 0.02
TERMS_A_COMMAND = 4096
"""Tenants of one command: far below the limit of a frame."""

TakeOver = Callable[[Sequence[RequestStream], EngineError], Collection[RequestStream]]
"""Takes streams whose engine is gone or ends, and the error that they would end with; returns those that another engine
will serve."""

ArgsP = ParamSpec("ArgsP")


def _take_none(streams: Sequence[RequestStream], error: EngineError) -> Collection[RequestStream]:
    return ()


class EngineSession(ABC):
    """One engine of `Engines`, without its transport: a subclass adds one.

    It implements the abstract methods, calls `_dispatch` for each event that arrives and `_fail` when the engine is
    gone, on the event loop's thread. `on_damaged` hears of versions whose stored bytes the engine found damaged or
    lost. Calls raise EngineUnavailable while the transport is not `healthy`; notifications do nothing then.
    """

    def __init__(self, on_damaged: Callable[[tuple[str, ...]], None], demand: Demand | None = None) -> None:
        self._on_damaged = on_damaged
        self._demand = Demand() if demand is None else demand
        self._info: EngineInfo | None = None
        self._streams: dict[str, RequestStream] = {}
        self._fair_share = FairShare()
        self._calls = Calls(lambda command: self._send(command))
        self._states: dict[str, AdapterState] = {}
        self._terms: dict[str, TenantTerms] = {}  # of tenants that have others than the default
        self.warming = False
        self._pins: dict[str, AdapterRef] = {}
        self._draining = False
        self._num_background = 0
        self._num_served = 0  # requests that came to a proper end
        self.take_over: TakeOver = _take_none
        self.lives_here: Callable[[str], bool] = lambda digest: True
        """Whether an engine that starts again should load this version before it is asked for."""
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when the engine has said that it ends when it has nothing to do."""
        self.hands_over = False
        """Whether it is still being asked for its prefixes."""

    # The transport.

    @property
    @abstractmethod
    def healthy(self) -> bool: ...

    @property
    @abstractmethod
    def unhealthy_reason(self) -> str | None: ...

    @property
    @abstractmethod
    def retry_after_s(self) -> float:
        """Seconds as `EngineUnavailable` has them."""

    @property
    @abstractmethod
    def num_restarts(self) -> int: ...

    @property
    @abstractmethod
    def is_coming_back(self) -> bool:
        """Whether an engine that takes no requests is being started."""

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The engine process, while there is one."""

    @property
    @abstractmethod
    def life(self) -> str:
        """A name for the engine process that serves, or has served last; another one for each."""

    @abstractmethod
    async def start(self) -> None:
        """Returns when the engine can take requests. Raises EngineStartError with one clear line."""

    @abstractmethod
    async def close(self, *, drain_s: float = 0) -> None:
        """Take nothing new, let what runs finish within `drain_s` seconds, and end the rest."""

    @abstractmethod
    def _send(self, command: wire.Command) -> None:
        """Pass it on, without blocking. A command that no engine can take goes nowhere. Raises FrameTooLarge."""

    def _check(self) -> None:
        if not self.healthy:
            error = EngineUnavailable(self.unhealthy_reason or "the engine is not ready")
            error.retry_after_s = self.retry_after_s
            raise error

    def _check_hears(self) -> None:
        """Raise EngineUnavailable unless the engine can be told what is deleted."""
        self._check()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineUnavailable("the engine has not been started")
        return self._info

    # Requests.

    @property
    def num_live(self) -> int:
        return len(self._streams) - self._num_background

    def submit(self, *requests: EngineRequest) -> list[RequestStream]:
        """All of one tenant and adapter. Room for all of them is taken before the first is sent."""
        if self._draining:
            raise EngineDraining("the server is shutting down")
        try:
            streams = self._open(requests, wire.Add)
        except framing.FrameTooLarge as error:
            raise TextTooLong(f"the request is too large for the engine: {error}") from error
        if (ref := requests[0].adapter) is not None and not requests[0].background:
            self._demand.use(ref)
        return streams

    def _open(
        self, requests: Sequence[EngineRequest], command: Callable[[EngineRequest], wire.Command]
    ) -> list[RequestStream]:
        """Send the `command` of each request, and open its stream."""
        self._send_all(requests, command)
        streams = [RequestStream(request, self._abort) for request in requests]
        self._streams.update({stream.request.request_id: stream for stream in streams})
        return streams

    def adopt(self, streams: Sequence[RequestStream], requests: Sequence[EngineRequest]) -> None:
        """Serve what another session has lost, each stream by its request: all of one tenant and adapter. Raises as
        `Engines.submit` does; no stream has changed then."""
        self._send_all(requests, wire.Add)
        for stream, request in zip(streams, requests, strict=True):
            stream.hand_to(self._abort, request)
            self._streams[request.request_id] = stream
        if (ref := requests[0].adapter) is not None:
            self._demand.use(ref)

    def _send_all(
        self, requests: Sequence[EngineRequest], command: Callable[[EngineRequest], wire.Command]
    ) -> None:
        """Send the `command` of each request, or of none."""
        self._take_room(requests)
        sent: list[str] = []
        try:
            for request in requests:
                self._send(command(request))
                sent.append(request.request_id)
        except BaseException:
            self._give_room(requests[0], len(requests))
            if sent:
                self._send(wire.Abort(tuple(sent)))  # their events are of nobody's stream
            raise

    def _take_room(self, requests: Sequence[EngineRequest]) -> None:
        """Count the requests, all of one tenant, among those in flight. Raises as `Engines.submit` does."""
        self._check()
        # Twice what the engine takes: one tenant, who may have half, can fill it, and another still comes in. Whom to
        # refuse in a full queue is the engine's to say.
        max_inflight = 2 * (self.info.max_waiting + self.info.max_num_seqs)
        tenant_id = requests[0].tenant_id
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id} is live already")
        if requests[0].background:  # the engine bounds these by themselves
            self._num_background += len(requests)
            return
        if not self._fair_share.acquire(tenant_id, max_inflight, len(requests)):
            held = self._fair_share.held(tenant_id)
            raise EngineOverloaded(
                f"the engine has {len(self._streams)} sequences in flight, {held} of them yours, and takes no "
                f"{len(requests)} more of them now",
                is_own=self._fair_share.is_beyond_share(tenant_id, max_inflight, len(requests)),
            )

    def _give_room(self, request: EngineRequest, amount: int = 1) -> None:
        if request.background:
            self._num_background -= amount
        else:
            self._fair_share.release(request.tenant_id, amount)

    @property
    def served_tenants(self) -> set[str]:
        return self._fair_share.owners

    def terms(self, tenant_id: str) -> TenantTerms:
        return self._terms.get(tenant_id, DEFAULT_TERMS)

    def set_tenants(self, terms: Mapping[str, TenantTerms]) -> None:
        """Tell the engine those of these terms that it does not have."""
        changed = {tenant: its for tenant, its in terms.items() if its != self.terms(tenant)}
        for tenant_id, its in changed.items():
            self._terms[tenant_id] = its
            if its == DEFAULT_TERMS:
                del self._terms[tenant_id]
        self._tell_terms(changed)

    def _tell_terms(self, terms: Mapping[str, TenantTerms]) -> None:
        told = list(terms.items())
        for first in range(0, len(told), TERMS_A_COMMAND):
            self._send(wire.SetTenants(dict(told[first : first + TERMS_A_COMMAND])))

    def _abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._send(wire.Abort((request_id,)))

    async def measure_sites(self, ref: AdapterRef) -> SiteOutputs:
        asked = measure_request(ref)
        (stream,) = self._open([asked.queued()], lambda _: wire.Measure(asked))
        self._demand.know(ref)  # the check of a new version is no demand for it
        return await read_outputs(stream, self.info.dtype)

    # Adapters.

    @property
    def pins(self) -> dict[str, AdapterRef]:
        """The versions that were pinned here, by digest."""
        return self._pins

    def adapter_state(self, digest: str) -> AdapterState:
        return self._states.get(digest, "cold")

    async def pin(self, ref: AdapterRef) -> None:
        await self.call(wire.Pin, ref)
        self._pins[ref.digest] = ref
        self._demand.know(ref)

    async def unpin(self, digest: str) -> None:
        """An engine that is away comes back without the pin; EngineUnavailable is raised all the same."""
        self._pins.pop(digest, None)
        await self.call(wire.Unpin, digest)

    async def drop(self, digest: str) -> None:
        """Drop an adapter; waits and raises as `unpin` does."""
        self._pins.pop(digest, None)
        self._demand.forget(digest)
        self._check_hears()
        await self._calls.ask(lambda call: wire.Drop(call, digest))

    async def forget_tenant(self, tenant_id: str) -> None:
        """Erase a deleted tenant's prefixes; waits and raises as `unpin` does."""
        self._check_hears()
        await self._calls.ask(lambda call: wire.ForgetTenant(call, tenant_id))

    def prefetch(self, refs: Sequence[AdapterRef]) -> None:
        self._hint(wire.Prefetch(tuple(refs)))

    def warm(self, refs: Sequence[AdapterRef]) -> None:
        self._hint(wire.Warm(tuple(refs)))

    def _hint(self, command: wire.Prefetch | wire.Warm) -> None:
        if command.refs and self.healthy:
            for ref in reversed(command.refs):
                self._demand.know(ref)
            self._send(command)

    def set_elsewhere(self, digests: Collection[str]) -> None:
        """Have the engine evict these versions before others, in place of those of the last call: they live on other
        engines."""
        if self.healthy:
            self._send(wire.SetElsewhere(tuple(sorted(digests))))

    async def wait_pins(self, refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        until = asyncio.get_running_loop().time() + PINS_TIMEOUT_S
        while True:
            stats = await self._calls.ask(wire.GetStats)
            if not stats.stats.num_pins_coming or asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(_PINS_LOOK_S)
        if stats.stats.num_pins_held >= len(refs):
            return []
        cache = await self._calls.ask(wire.GetCache)
        pinned = {entry.ref.digest: entry for entry in cache.entries if entry.pinned}
        lost = "its pin is gone: its stored bytes are damaged or lost, or it was unpinned"
        asked = [pinned.get(ref.digest, CacheEntry(ref, "cold", error=lost)) for ref in refs]
        return [entry for entry in asked if entry.state != "hot"]

    @property
    def hot(self) -> frozenset[str]:
        """The versions on the device."""
        return frozenset(digest for digest, state in self._states.items() if state == "hot")

    @property
    def resident(self) -> Mapping[str, AdapterState]:
        """The versions in memory, by digest."""
        return self._states

    def _restore(self, hot: frozenset[str], *, warm: bool) -> None:
        """Ask a new engine for what the old one had: its tenants' terms, the pins, and with `warm` by demand what else
        was in memory; `hot` was on the device, used or not."""
        self._tell_terms(self._terms)
        for ref in self._pins.values():
            self._calls.tell(partial(wire.Pin, ref=ref))
        ranked = [uses.ref for uses in self._demand.ranked(hot)] if warm else []
        if refs := tuple(
            ref for ref in ranked if ref.digest not in self._pins and self.lives_here(ref.digest)
        ):
            self._send(wire.Warm(refs))

    # Calls.

    async def call(
        self,
        command: Callable[Concatenate[int, ArgsP], wire.Call[AnswerT]],
        *args: ArgsP.args,
        **kwargs: ArgsP.kwargs,
    ) -> AnswerT:
        """Have the engine run a command of the protocol's table with these arguments. Raises ServingError where the
        engine refuses, EngineUnavailable where it does not answer."""
        self._check()
        return await self._calls.ask(lambda call: command(call, *args, **kwargs))

    async def stats(self) -> EngineStats:
        self._check()
        return (await self._calls.share(wire.GetStats)).stats

    async def cache(self, digests: Collection[str] | None = None) -> list[CacheEntry]:
        if digests is not None:
            return list((await self.call(wire.GetCache, tuple(digests))).entries)
        self._check()
        return list((await self._calls.share(wire.GetCache)).entries)

    async def expert_rows(self) -> dict[int, tuple[int, ...]]:
        return (await self.call(wire.GetExpertRows)).rows

    async def prefix_owners(self, after: Namespace | None) -> set[Namespace]:
        return {*(await self.call(wire.GetPrefixOwners, after)).owners}

    async def take_prefixes(self, *, begins: bool) -> wire.PrefixPage:
        """The next page of its prefixes, also of an engine that takes no requests. Raises as `Calls.ask`."""
        return await self._calls.ask(lambda call: wire.TakePrefixes(call, begins))

    async def put_prefixes(
        self, form: str, blocks: Sequence[HandedBlock], *, begins: bool = False, ends: bool = False
    ) -> wire.PrefixesTaken:
        """Have the engine keep these prefixes of another. Raises as `call`."""
        return await self.call(wire.PutPrefixes, form, tuple(blocks), begins, ends)

    def handed_over(self) -> None:
        """Note that it is asked for its prefixes no more."""
        self.hands_over = False

    async def exchange_service(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        """Have the engine count what others served these tenants; returns what it served since the last time. In units
        of service."""
        return (await self.call(wire.ExchangeService, dict(elsewhere))).units

    # What the transport calls.

    def _dispatch(self, event: wire.Event) -> None:
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
                self._demand.loaded(digest for digest, state in states.items() if state != "cold")
            case wire.WarmingChanged(is_active):
                self.warming = is_active
            case wire.Damaged(digests):
                self._on_damaged(digests)
            case wire.CallAnswer():
                self._calls.take(event)
            case wire.Starting() | wire.Ready() | wire.Heartbeat() | wire.Fatal():
                pass  # the transport's own affair

    def _deliver(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None or event.duplicate:
            return
        if event.finish_reason is not None:
            del self._streams[event.request_id]
            self._num_served += event.finish_reason in ("stop", "length")
            self._give_room(stream.request)
            if self._was_cut(event, stream):
                code: ErrorCode = "draining" if self._draining else "engine_restarting"
                error = EngineError(code, "the engine shut down before the request ended")
                if not stream.request.is_shadow and self.take_over((stream,), error):
                    return
                event = msgspec.structs.replace(event, finish_reason="error", error=error)
        stream.put(event)

    @staticmethod
    def _was_cut(event: TokenEvent, stream: RequestStream) -> bool:
        """The engine was stopped from outside."""
        if event.finish_reason == "abort":
            return not stream.aborted
        return event.error is not None and event.error.code == "draining"

    def _fail(self, code: ErrorCode, message: str, retry_after_s: float | None = None) -> int:
        """The engine is gone: end every call with this error, and every live stream that nobody takes over; forget
        residency. Returns the number of streams that were lost."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            self._give_room(stream.request)
        others = tuple(stream for stream in streams.values() if not stream.request.is_shadow)
        taken = set(self.take_over(others, EngineError(code, message, retry_after_s)))
        for request_id, stream in streams.items():
            if stream not in taken:
                stream.put(error_event(request_id, code, message, retry_after_s))
        self._calls.fail(message)
        self._states.clear()
        self.warming = False
        return len(streams)
