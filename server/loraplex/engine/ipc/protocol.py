"""The protocol between an engine process and its client: msgpack frames over a Unix stream socket.

A frame is a 4-byte big-endian length and as many bytes of msgpack: one tagged struct of `Command` (client to
engine) or `Event` (engine to client). Both sides refuse a frame above `MAX_FRAME_BYTES` before they hold it
in memory. Values are plain data, decoded against the types below; nothing that is read can execute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.core.handed import HandedBlock
from loraplex.engine.ipc.framing import UNDECODABLE, ProtocolError
from loraplex.engine.kv.prefix_keys import next_owners
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import AdapterState, EngineRequest, MeasureRequest, Namespace, TokenEvent

if TYPE_CHECKING:  # a client needs no core
    from loraplex.engine.core.engine_core import EngineCore

HEARTBEAT_INTERVAL_S = 1.0

# Answers: engine to client, one for each `Call`.


class CallAnswer(msgspec.Struct, frozen=True, tag=True):
    """`call` is the number of the `Call` that it answers."""

    call: int


class Stats(CallAnswer, frozen=True, tag=True):
    stats: EngineStats


class Cache(CallAnswer, frozen=True, tag=True):
    entries: tuple[CacheEntry, ...]


class ExpertRows(CallAnswer, frozen=True, tag=True):
    """The rows that went to each expert since the engine began, by layer."""

    rows: dict[int, tuple[int, ...]]


class PrefixOwners(CallAnswer, frozen=True, tag=True):
    """A part of those whose prefixes are kept behind the KV cache, by `next_owners`: tenants and digests (None: the
    base)."""

    owners: tuple[Namespace, ...]


class PrefixPage(CallAnswer, frozen=True, tag=True):
    """Prefixes that are handed on, each block behind the one before it. `is_last`: all that may be handed on now has
    been."""

    blocks: tuple[HandedBlock, ...]
    is_last: bool


class PrefixesTaken(CallAnswer, frozen=True, tag=True):
    """The first `num_seen` blocks of a page were looked at, and the others are to be sent again; `num_here` of them are
    here now."""

    num_seen: int
    num_here: int


class Served(CallAnswer, frozen=True, tag=True):
    """Units of service by tenant since the last exchange."""

    units: dict[str, float]


class Done(CallAnswer, frozen=True, tag=True):
    """The answer of a call that returns nothing, and of every call that fails: `error` says why."""

    error: str | None = None


# Commands: client to engine. One class a command: its name is the command's, its fields are the arguments, the type
# argument of `Call` is the answer, and `run` calls the handler in `EngineCore`. A new command needs its class, a place
# in `Command` and its handler; what it leaves behind ends in `EngineCore.reset`. `EngineSession.call`, the socket, the
# relay and the loop know no command by name, except `Add`, `Measure`, `Reset` and `Shutdown`.

AnswerT = TypeVar("AnswerT", bound=CallAnswer)


class Notification(msgspec.Struct, frozen=True, tag=True):
    """A command without an answer."""

    def run(self, core: EngineCore) -> None:
        raise NotImplementedError


class Call(msgspec.Struct, Generic[AnswerT], frozen=True, tag=True):
    """A command with an answer. The client numbers its calls."""

    call: int

    def run(self, core: EngineCore) -> AnswerT:
        """A LoraplexError becomes the answer `Done` with its message."""
        raise NotImplementedError


class Add(msgspec.Struct, frozen=True, tag=True):
    """Serve this request. Run by `EngineLoop`, which refuses it during a shutdown."""

    request: EngineRequest


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the sites of an adapter. Run by `EngineLoop` as `Add` is."""

    request: MeasureRequest


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what runs within `drain_s` seconds, abort the rest, and exit with 0. Run by
    `EngineLoop`."""

    drain_s: float = 0.0


class Reset(Call[Done], frozen=True, tag=True):
    """End all that a client has here: its requests, pins and tenants' terms. Adapters stay in memory, and `EngineLoop`
    tells all their states again."""

    def run(self, core: EngineCore) -> Done:
        core.reset()
        return Done(self.call)


class Abort(Notification, frozen=True, tag=True):
    request_ids: tuple[str, ...]

    def run(self, core: EngineCore) -> None:
        for request_id in self.request_ids:
            core.abort(request_id)


class Prefetch(Notification, frozen=True, tag=True):
    """Begin to load these versions to the device, as room allows."""

    refs: tuple[AdapterRef, ...]

    def run(self, core: EngineCore) -> None:
        for ref in self.refs:
            core.prefetch(ref)


class Warm(Notification, frozen=True, tag=True):
    """Load these versions in their order, behind every load that a request waits for: to the device as far as there is
    room, then to host memory. They replace those of an earlier command."""

    refs: tuple[AdapterRef, ...]

    def run(self, core: EngineCore) -> None:
        core.warm(self.refs)


class SetElsewhere(Notification, frozen=True, tag=True):
    """Evict these versions from the device before others: they live on other engines. They replace those of the last
    command."""

    digests: tuple[str, ...]

    def run(self, core: EngineCore) -> None:
        core.set_elsewhere(self.digests)


class SetTenants(Notification, frozen=True, tag=True):
    """Serve these tenants by other terms, also their requests that wait or run."""

    terms: dict[str, TenantTerms]

    def run(self, core: EngineCore) -> None:
        for tenant_id, terms in self.terms.items():
            core.set_terms(tenant_id, terms)


class Pin(Call[Done], frozen=True, tag=True):
    """Keep this version on the device from now on; load it if it is not there."""

    ref: AdapterRef

    def run(self, core: EngineCore) -> Done:
        core.pin(self.ref)
        return Done(self.call)


class Unpin(Call[Done], frozen=True, tag=True):
    digest: str

    def run(self, core: EngineCore) -> Done:
        core.unpin(self.digest)
        return Done(self.call)


class Drop(Call[Done], frozen=True, tag=True):
    """Forget this version as soon as nothing that runs uses it."""

    digest: str

    def run(self, core: EngineCore) -> Done:
        core.drop(self.digest)
        return Done(self.call)


class ForgetTenant(Call[Done], frozen=True, tag=True):
    """Erase the prefixes of a deleted tenant, also those on the base."""

    tenant_id: str

    def run(self, core: EngineCore) -> Done:
        core.forget_tenant(self.tenant_id)
        return Done(self.call)


class ExchangeService(Call[Served], frozen=True, tag=True):
    """Count what other engines served these tenants since the last exchange, in units of service. Sent every second or
    so to each of several engines; one that never gets it shares its time as if it were alone."""

    elsewhere: dict[str, float]

    def run(self, core: EngineCore) -> Served:
        return Served(self.call, core.exchange_service(self.elsewhere))


class GetStats(Call[Stats], frozen=True, tag=True):
    def run(self, core: EngineCore) -> Stats:
        return Stats(self.call, core.stats())


class GetCache(Call[Cache], frozen=True, tag=True):
    """The versions of `digests` that the engine knows; None: all of them."""

    digests: tuple[str, ...] | None = None

    def run(self, core: EngineCore) -> Cache:
        return Cache(self.call, tuple(core.cache_entries(self.digests)))


class GetPrefixOwners(Call[PrefixOwners], frozen=True, tag=True):
    """Sent every minute or so, since an engine that was away has missed what was erased meanwhile. `after`: the last
    owner of the part before."""

    after: Namespace | None = None

    def run(self, core: EngineCore) -> PrefixOwners:
        return PrefixOwners(self.call, tuple(next_owners(core.prefix_owners(), self.after)))


class TakePrefixes(Call[PrefixPage], frozen=True, tag=True):
    """The next page of the prefixes that the engine has, for another one; `begins`: the first one."""

    begins: bool = False

    def run(self, core: EngineCore) -> PrefixPage:
        return PrefixPage(self.call, *core.handover.next_page(begins=self.begins))


class PutPrefixes(Call[PrefixesTaken], frozen=True, tag=True):
    """Keep these prefixes of another engine, whose blocks have this form. `begins`: its first page; `ends`: its
    last."""

    form: str
    blocks: tuple[HandedBlock, ...]
    begins: bool = False
    ends: bool = False

    def run(self, core: EngineCore) -> PrefixesTaken:
        seen, here = core.handover.take_in(self.form, self.blocks, begins=self.begins, ends=self.ends)
        return PrefixesTaken(self.call, seen, here)


class GetExpertRows(Call[ExpertRows], frozen=True, tag=True):
    def run(self, core: EngineCore) -> ExpertRows:
        return ExpertRows(self.call, core.expert_rows())


Command = (
    Add
    | Measure
    | Shutdown
    | Reset
    | Abort
    | Prefetch
    | Warm
    | SetElsewhere
    | SetTenants
    | Pin
    | Unpin
    | Drop
    | ForgetTenant
    | ExchangeService
    | GetStats
    | GetCache
    | GetExpertRows
    | GetPrefixOwners
    | TakePrefixes
    | PutPrefixes
)


# Events: engine to client.


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Sent every second or so until `Ready` or `Fatal`."""

    stage: str
    elapsed_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Events(msgspec.Struct, frozen=True, tag=True):
    """The events of one step, or of several, merged by request, where the client was slow to read."""

    events: tuple[TokenEvent, ...]


class ResidencyChanged(msgspec.Struct, frozen=True, tag=True):
    """New states by digest; "cold" means neither on the device nor in host memory."""

    states: dict[str, AdapterState]


class WarmingChanged(msgspec.Struct, frozen=True, tag=True):
    """The loads of `Warm` have begun, or have ended."""

    is_active: bool


class Damaged(msgspec.Struct, frozen=True, tag=True):
    """Loads found the stored bytes of these versions damaged or lost; requests that waited for them have ended."""

    digests: tuple[str, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the main thread every `HEARTBEAT_INTERVAL_S` from `Ready` on, unless earlier events still wait to be
    read. The heartbeat of the compute threads: see `heartbeat.Vitals`."""

    stalled_s: float
    longest_s: float
    unusual: bool


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on and exits. One line, for the operator."""

    message: str


Event = (
    Starting
    | Ready
    | Events
    | ResidencyChanged
    | WarmingChanged
    | Damaged
    | Stats
    | Cache
    | ExpertRows
    | PrefixOwners
    | PrefixPage
    | PrefixesTaken
    | Served
    | Done
    | Heartbeat
    | Fatal
)

_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def decode_command(payload: bytes | bytearray | memoryview) -> Command:
    """Raises ProtocolError where the payload is no command."""
    try:
        return _command_decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a command: {error}") from error


def decode_event(payload: bytes | bytearray | memoryview) -> Event:
    """Raises ProtocolError where the payload is no event."""
    try:
        return _event_decoder.decode(payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"not an event: {error}") from error
