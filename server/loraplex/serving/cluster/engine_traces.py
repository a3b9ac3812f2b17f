"""Traces of a server in an engine: its live requests, pins and tenants' terms, seen in the messages that pass between
the two."""

from __future__ import annotations

import msgspec

from loraplex.engine.ipc import protocol as wire
from loraplex.engine.tenant_terms import DEFAULT_TERMS
from loraplex.engine.types import AdapterState

BARRIER = 0
"""The number of a relay's own calls. Sessions number theirs from 1."""
TOKENS = msgspec.msgpack.encode(wire.Events(()))[:-1]
"""The first bytes of each encoded `Events`."""


class _Ended(msgspec.Struct, gc=False):
    request_id: str
    finish_reason: str | None = None
    duplicate: bool = False


class _Events(msgspec.Struct, tag="Events"):
    events: list[_Ended]


_decoder = msgspec.msgpack.Decoder(_Events)


class EngineTraces:
    """The traces in one engine process, whichever servers have used it. `num_served` counts requests that came to a
    proper end."""

    def __init__(self) -> None:
        self.num_served = 0
        self._live: set[str] = set()
        self._pins: set[str] = set()
        self._tenants: set[str] = set()
        self._elsewhere = False
        self._states: dict[str, AdapterState] = {}
        self._warming = False
        self._awaits_barrier = False

    def forget(self) -> int:
        """The engine process is gone; returns how many requests it had."""
        num_live = len(self._live)
        for traces in (self._live, self._pins, self._tenants, self._states):
            traces.clear()
        self._warming = self._awaits_barrier = self._elsewhere = False
        return num_live

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def is_clean(self) -> bool:
        """Whether nothing of an earlier server's can come from the engine any more."""
        return not self._awaits_barrier and not self._live

    def note_command(self, command: wire.Command) -> None:
        """The server sends it."""
        match command:
            case wire.Add(request) | wire.Measure(request):
                self._live.add(request.request_id)
            case wire.Pin(_, ref):
                self._pins.add(ref.digest)
            case wire.Unpin(_, digest) | wire.Drop(_, digest):
                self._pins.discard(digest)
            case wire.SetElsewhere(digests):
                self._elsewhere = bool(digests)
            case wire.SetTenants(terms):
                self._tenants.update(terms)
            case _:
                pass  # it leaves nothing behind

    def note_tokens(self, payload: bytes) -> None:
        """The engine sends this `Events`. Only what tells the end of a request is decoded."""
        for event in _decoder.decode(payload).events:
            if event.finish_reason is not None and not event.duplicate:
                self._live.discard(event.request_id)
                self.num_served += event.finish_reason in ("stop", "length")

    def note_event(self, event: wire.Event) -> None:
        """The engine sends it."""
        match event:
            case wire.ResidencyChanged(states):
                self._states.update(states)
                for digest, state in states.items():
                    if state == "cold":
                        del self._states[digest]
            case wire.Warming(is_active):
                self._warming = is_active
            case wire.Pong(call) if call == BARRIER:
                self._awaits_barrier = False
            case _:
                pass

    def clean_up(self) -> list[wire.Command]:
        """Commands for an engine whose server is gone: its requests are aborted, its pins and terms end, and
        a barrier comes behind all answers that the server has not read. Adapters stay."""
        self._awaits_barrier = True
        commands: list[wire.Command] = []
        if self._live:
            commands.append(wire.Abort(tuple(self._live)))
        commands += [wire.Unpin(BARRIER, digest) for digest in self._pins]
        if self._tenants:
            commands.append(wire.SetTenants(dict.fromkeys(self._tenants, DEFAULT_TERMS)))
        if self._elsewhere:
            commands.append(wire.SetElsewhere(()))
        self._pins.clear()
        self._tenants.clear()
        self._elsewhere = False
        return [*commands, wire.Ping(BARRIER)]

    def greeting(self) -> list[wire.Event]:
        """Events that tell the next server of the adapters that are there."""
        events: list[wire.Event] = [wire.ResidencyChanged(dict(self._states))] if self._states else []
        return [*events, wire.Warming(True)] if self._warming else events
