"""An engine that dials in: its process is supervised here, and frames pass between it and the server.

    server ←TCP→ Link ← Relay → EngineSupervisor ←Unix socket→ engine process

A connection stands for one life of the engine. When the engine dies the relay hangs up, so that the server hands its
requests over at once, and dials again when the next one is ready. When the server goes away the relay resets the
engine, which keeps its adapters, and dials again until the server is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo, EngineStats
from loraplex.serving.dialling.hello import HANDSHAKE_S, Draining, HandshakeRefused, Identity
from loraplex.serving.dialling.link import Link
from loraplex.serving.engines.calls import Calls
from loraplex.serving.errors import EngineStartError, EngineUnavailable
from loraplex.serving.supervision.engine_supervisor import EngineSupervisor, Supervision
from loraplex.serving.supervision.supervisor import EngineProcess

LOOK_S = 1.0
"""Time between two looks whether the supervisor has given up."""
TOKENS = msgspec.msgpack.encode(wire.Events(()))[:-1]
"""The first bytes of each encoded `Events`."""


class _End(msgspec.Struct, gc=False):
    """The end of a request, as its token event tells it."""

    request_id: str
    finish_reason: str | None = None
    duplicate: bool = False


class _Ends(msgspec.Struct, tag="Events"):
    events: list[_End]


_ends_decoder = msgspec.msgpack.Decoder(_Ends)


@dataclass(frozen=True, slots=True)
class DialPolicy:
    """Seconds between two tries to reach the server: they double from `first_s` to `most_s`."""

    first_s: float = 0.1
    most_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server listens, and what opens it. `token` and `read_probe` (its content, by its name; raises as
    `loraplex.adapters.store.probe.read_probe`) are asked at each try; `read_probe` in a thread. `tls`: the engine's end
    of it; None: none."""

    host: str
    port: int
    token: Callable[[], bytes]
    read_probe: Callable[[str], bytes]
    tls: ssl.SSLContext | None = None


class Relay:
    """One engine for one server, as `replica` from `node`. All methods belong to one event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        door: Door,
        *,
        replica: str,
        node: str,
        rules: Supervision,
        dialling: DialPolicy | None = None,
    ) -> None:
        self._door = door
        self._replica = replica
        self._node = node
        self._log = rules.log
        self._dialling = dialling or DialPolicy()
        self._supervisor = EngineSupervisor(config, self, rules, self._on_payload)
        self.num_served = 0  # requests that came to a proper end, of all engines so far
        self._live: set[str] = set()  # requests that have not ended
        self._is_clean = True  # nothing but live requests is left of a server that has gone
        self._calls = Calls(self._supervisor.send, step=-1)  # of its own; sessions number theirs upwards
        self._info: EngineInfo | None = None
        self._link: Link | None = None
        self._last_reason = ""
        self._draining = False
        self._changed = asyncio.Event()
        self.joined = asyncio.Event()
        """Set when a server has welcomed the engine for the first time."""

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._supervisor.pid

    @property
    def num_live(self) -> int:
        """Requests of the server that the engine has not ended."""
        return len(self._live)

    @property
    def places(self) -> int:
        """Sequences that the engine runs at once; 0 before it has been ready."""
        return 0 if self._info is None else self._info.max_num_seqs

    async def stats(self) -> EngineStats:
        """The engine's figures of now. Raises EngineUnavailable while it takes no requests."""
        if not self._supervisor.healthy:
            raise EngineUnavailable(self._supervisor.reason or "the engine is not ready")
        return (await self._calls.share(wire.GetStats)).stats

    async def run(self) -> None:
        """Start the engine and serve with it until it is drained. Raises EngineStartError where it does not start, or
        stays down."""
        await self._supervisor.start()
        delay = self._dialling.first_s
        while not self._draining:
            await self._wait_until_ready()
            link = await self._dial()
            if link is None:
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
                delay = min(2 * delay, self._dialling.most_s)
                continue
            delay = self._dialling.first_s
            await self._serve(link)

    async def drain(self, timeout_s: float) -> None:
        """Have the server send nothing new; return when what runs has ended, or after `timeout_s` seconds."""
        self._draining = True
        self._changed.set()
        link = self._link
        if link is not None:
            link.send(Draining())
            await asyncio.wait([link.gone], timeout=timeout_s)

    async def close(self) -> None:
        """Hang up and end the engine, at once. Call when `run` has ended or is cancelled."""
        self._draining = True
        self._hang_up("the engine ends")
        await self._supervisor.close()

    async def _wait_until_ready(self) -> None:
        """Return when the engine can take requests and nothing of the last server's is left in it."""
        while not (self._supervisor.healthy and self._is_clean) or self._live:
            if self._supervisor.phase == "failed":
                raise EngineStartError(self._supervisor.reason or "the engine stays down")
            if self._supervisor.healthy and not self._is_clean:
                with contextlib.suppress(EngineUnavailable):  # it answers late, or has just gone
                    await self._calls.ask(wire.Reset)
                    self._is_clean = True
                continue
            self._changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _dial(self) -> Link | None:
        """A welcomed connection; None where there is none, which has been logged."""
        door, link = self._door, Link(self._on_command)
        info, pid = self._info, self._supervisor.pid
        assert info is not None
        assert pid is not None
        restarts = self._supervisor.num_restarts
        identity = Identity(
            self._replica,
            self._node,
            pid,
            restarts,
            info.base_fingerprint,
            info.numerics,
            info.max_model_len,
            info.max_adapter_rank,
        )
        reason = "the engine was lost meanwhile"
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: link, door.host, door.port, ssl=door.tls
                )
                await link.shake_hands(identity, door.token(), door.read_probe, self._log)
            if self._supervisor.pid == pid:
                self._last_reason = ""
                return link
        except TimeoutError:
            reason = f"no handshake within {HANDSHAKE_S:g} s"
            if door.tls is None:
                reason += "; a server with --engine-tls waits for TLS: then give --engine-tls"
        except ssl.SSLError as error:
            reason = (
                f"no TLS with the server: {error}; look at --engine-tls, and at the names in its certificate"
            )
        except (HandshakeRefused, LoraplexError, OSError) as error:
            reason = str(error)
        except asyncio.CancelledError:
            link.end("the engine ends")
            raise
        link.end(reason)
        if reason != self._last_reason:  # once for each, however often it is tried
            self._log("server_not_joined", server=self._server, reason=reason)
        self._last_reason = reason
        return None

    async def _serve(self, link: Link) -> None:
        """Pass frames until the connection ends."""
        assert self._info is not None
        self._link = link
        self._log("server_joined", server=self._server, replica=self._replica)
        link.begin(wire.Ready(self._info))
        self._calls.tell(wire.Reset)  # the engine tells this server of the adapters that are there
        self.joined.set()
        if self._draining:
            link.send(Draining())
        reason = await asyncio.shield(link.gone)
        self._link = None
        self._log("server_left", server=self._server, reason=reason)
        self._is_clean = False

    @property
    def _server(self) -> str:
        return f"{self._door.host}:{self._door.port}"

    def _hang_up(self, reason: str) -> None:
        if self._link is not None:
            self._link.end(reason)

    # Between the two.

    def _on_command(self, command: wire.Command, payload: bytes) -> None:
        if isinstance(command, wire.Add | wire.Measure):
            self._live.add(command.request.request_id)
        self._supervisor.send_payload(payload)

    def _on_payload(self, payload: bytes) -> bool:
        """Pass tokens on as they came. Only what tells the end of a request is decoded."""
        if not payload.startswith(TOKENS):
            return False
        try:
            ends = _ends_decoder.decode(payload).events
        except framing.UNDECODABLE as error:
            raise framing.ProtocolError(f"not an event: {error}") from error
        for end in ends:
            if end.finish_reason is not None and not end.duplicate:
                self._live.discard(end.request_id)
                self.num_served += end.finish_reason in ("stop", "length")
        if self._link is not None:
            self._link.send_payload(payload)
        self._look()
        return True

    def _look(self) -> None:
        if self._link is None:
            self._changed.set()

    # The supervisor's user.

    def on_event(self, event: wire.Event) -> None:
        if isinstance(event, wire.CallAnswer) and event.call < 0:
            self._calls.take(event)
        elif self._link is not None:
            self._link.send(event)
        self._look()

    async def on_ready(self, info: EngineInfo, process: EngineProcess, *, warm: bool) -> None:
        """The server has it load what it needs, when it has joined."""
        self._info = info
        self._changed.set()

    def on_lost(self, code: Literal["draining", "engine_restarting"], reason: str, *, early: bool) -> int:
        num_live = len(self._live)
        self._live.clear()
        self._is_clean = True
        self._calls.fail("the engine was lost")
        self._hang_up("the engine was lost")
        return num_live
