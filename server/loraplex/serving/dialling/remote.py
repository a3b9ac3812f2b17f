"""The session of an engine that dialled in: one connection, from its Welcome to its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

import msgspec

from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.types import TokenEvent
from loraplex.serving.demand import Demand
from loraplex.serving.dialling import tcp
from loraplex.serving.dialling.hello import Draining, Hello
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import (
    EngineOverloaded,
    EngineStartError,
    EngineUnavailable,
)
from loraplex.serving.supervision.watchdog import TICK_S, Watchdog, WatchdogPolicy

READY_TIMEOUT_S = 10.0
"""Longest time from a Welcome to the engine's Ready: it dials when it is ready."""
LOST = "the connection to the engine was lost"
ENDED = "the server shut down before it ended"

_decoder = msgspec.msgpack.Decoder(wire.Event | Draining)


class RemoteEngine(EngineSession, asyncio.Protocol):
    """An engine of another process or machine. The session ends with its connection; the engine outlives it, keeps its
    adapters, and dials again. `on_gone(session)` is called once, when the session has handed over its streams.

    Call `take` with the transport first, then `start`. All methods belong to one event loop's thread.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        on_gone: Callable[[RemoteEngine], None],
        watchdog: WatchdogPolicy,
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
        demand: Demand | None = None,
    ) -> None:
        super().__init__(on_damaged, demand)
        self.hello = hello
        self.reason: str | None = None
        """Why the session has ended, for the operator; None while it lives."""
        self._on_gone = on_gone
        self._shares_clock = hello.node == socket.gethostname()
        self._loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(watchdog, self._loop.time())
        self._watchdog.ready()
        self._watching: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()
        self._reader = framing.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._idle: asyncio.Future[None] | None = None  # of a close that waits for the last stream
        self._leaving = False  # the engine drains
        self._written = self._sent = 0  # bytes, and those of them that the kernel has taken
        self._read_at = self._loop.time()  # when it last took some, or there were none

    def take(self, transport: asyncio.Transport) -> None:
        """Read and write this connection from here on."""
        self._transport = transport
        transport.set_protocol(self)
        self._watch()

    # The session.

    @property
    def replica(self) -> str:
        return self.hello.replica

    @property
    def healthy(self) -> bool:
        return self.unhealthy_reason is None

    @property
    def unhealthy_reason(self) -> str | None:
        if self.reason is not None:
            return LOST
        if self._draining:
            return "the server is shutting down"
        if self._leaving:
            return "the engine finishes what it has, and leaves"
        return None if self._info is not None else "the engine has not told its sizes yet"

    @property
    def num_restarts(self) -> int:
        """Restarts of the engine behind this connection, before it: those after it are another session's."""
        return self.hello.num_restarts

    @property
    def retry_after_s(self) -> float:
        """Seconds as `EngineUnavailable` has them: when the engine dials again is not known here."""
        return EngineUnavailable.retry_after_s or 0.0

    @property
    def is_coming_back(self) -> bool:
        """False: an engine that dials again has another session."""
        return False

    @property
    def life(self) -> str:
        return f"{self.hello.node} {self.hello.pid} {self.hello.num_restarts}"

    @property
    def pid(self) -> int | None:
        """The engine process on its machine, while it is connected."""
        return None if self.reason is not None else self.hello.pid

    @property
    def silent_s(self) -> float:
        """Seconds since anything came from it."""
        return self._loop.time() - self._heard_at

    async def start(self) -> None:
        """Return when the engine has told its sizes. Raises EngineStartError."""
        await asyncio.wait([self._ready], timeout=READY_TIMEOUT_S)
        if not self._ready.done():
            self.lose(f"it was not ready {READY_TIMEOUT_S:g} s after its welcome")
        if self.reason is not None:
            raise EngineStartError(self.reason)

    async def close(self, *, drain_s: float = 0) -> None:
        """Take nothing new, let what runs finish within `drain_s` seconds, end the rest, and hang up. The engine goes
        on without this server."""
        self._draining = True
        if self.reason is None and self._streams and drain_s > 0:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=drain_s)
        self._hang_up("the server shuts down", "draining")

    def _send(self, command: wire.Command) -> None:
        frame = framing.encode_frame(command)
        if self.reason is not None or self._transport is None:
            return
        unsent = self._transport.get_write_buffer_size()
        if (
            isinstance(command, wire.Add | wire.Measure)
            and unsent
            and unsent + len(frame) > tcp.MAX_UNSENT_BYTES
        ):
            # A burst of long prompts is no fault of the engine, which reads them as fast as they are sent.
            raise EngineOverloaded(f"{unsent >> 20} MiB of requests are still on their way to the engine")
        self._transport.write(frame)
        self._written += len(frame)

    def _deliver(self, event: TokenEvent) -> None:
        timing = event.timing
        if timing is not None and timing.arrived is not None and not self._shares_clock:
            event = msgspec.structs.replace(event, timing=replace(timing, arrived=None))
        super()._deliver(event)
        if event.finish_reason is not None and not self._streams:
            self._on_idle()

    def _check_hears(self) -> None:
        # One that leaves may still hand its prefixes on.
        if not self._leaving or self.reason is not None:
            super()._check_hears()

    def _on_idle(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        if self._leaving and not self.hands_over:
            self._hang_up("it has drained", "draining")

    def handed_over(self) -> None:
        super().handed_over()
        if not self._streams:
            self._on_idle()

    # Its end.

    def lose(self, reason: str) -> None:
        """End the session for this reason: its streams are handed over, or end with an error."""
        self._hang_up(reason, "engine_restarting")

    def _hang_up(self, reason: str, code: Literal["draining", "engine_restarting"]) -> None:
        if self.reason is not None:
            return
        self.reason = reason
        if self._watching is not None:
            self._watching.cancel()
        if self._transport is not None:
            self._transport.abort()
        for waited in (self._ready, self._idle):
            if waited is not None and not waited.done():
                waited.set_result(None)
        if code == "draining":
            self._fail(code, ENDED)
        else:
            self._fail(code, LOST, self.retry_after_s)
        self._on_gone(self)

    def _is_unread(self, now: float) -> bool:
        """Whether the engine has read nothing of what waits for it, for too long."""
        unsent = 0 if self._transport is None else self._transport.get_write_buffer_size()
        sent = self._written - unsent
        if not unsent or sent > self._sent:
            self._sent, self._read_at = sent, now
        return now - self._read_at > tcp.UNREAD_S

    def _watch(self) -> None:
        now = self._loop.time()
        verdict = self._watchdog.verdict(now)
        if verdict is None and self._is_unread(now):
            verdict = f"it has read nothing for {tcp.UNREAD_S:g} s"
        if verdict is not None:
            self.lose(verdict)
        elif self.reason is None:
            self._watching = self._loop.call_later(TICK_S, self._watch)

    # asyncio.Protocol.

    def data_received(self, data: bytes) -> None:
        if self.reason is not None:
            return  # its requests have ended already
        self._heard_at = self._loop.time()
        self._watchdog.heard(self._heard_at)
        try:
            for payload in self._reader.feed(data):
                self._on_message(_decode(payload))
        except framing.ProtocolError as error:
            self.lose(f"it broke the protocol: {error}")

    def eof_received(self) -> None:
        self.lose("it hung up")

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose("its connection broke" if exc is None else f"its connection broke: {exc}")

    def _on_message(self, event: wire.Event | Draining) -> None:
        match event:
            case wire.Ready(info):
                self._info = info
                if not self._ready.done():
                    self._ready.set_result(None)
            case Draining():
                self._leaving = True
                self.on_leaving()
                if not self._streams:
                    self._on_idle()
            case wire.Heartbeat():
                self._watchdog.beat(event)
            case _:
                self._dispatch(event)


def _decode(payload: bytes) -> wire.Event | Draining:
    try:
        return cast(wire.Event | Draining, _decoder.decode(payload))
    except framing.UNDECODABLE as error:
        raise framing.ProtocolError(f"not an event: {error}") from error
