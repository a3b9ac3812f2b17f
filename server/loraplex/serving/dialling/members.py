"""The port that engines dial: connections, their handshakes, and the sessions of those that were welcome.

A replica's name is connected once. A second connection of the same name replaces the first where both are of one engine
process, which has noticed before the server that its connection is dead, or where the first has been silent; else it is
refused, as two engines would replace each other without end.

Strangers keep no engine out and fill no log: connections are ended where one address has most of them, and what each
address is refused for is logged once, then counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import Log
from loraplex.serving.demand import Demand
from loraplex.serving.dialling import hello as handshake
from loraplex.serving.dialling.hello import Challenge, Expected, HandshakeRefused, Hello
from loraplex.serving.dialling.remote import RemoteEngine
from loraplex.serving.dialling.tcp import watch_peer
from loraplex.serving.errors import EngineStartError
from loraplex.serving.supervision.watchdog import WatchdogPolicy

MAX_HANDSHAKES = 128
"""Connections that may be in their handshake: more than a server has engines, which all dial when it restarts. One more
ends the oldest connection of the address that has most of them."""
MAX_LOGGED_REASONS = 4
"""Refusals of one address that are logged at once, each of another reason."""
MAX_LOGGED_PEERS = 64
"""Addresses whose refusals are logged one by one; those of others are logged as if one had them."""
COUNT_S = 60.0
"""Time between two lines with the number of an address's other refusals."""
OTHERS = "other addresses"
CLOSE_S = 2.0
"""Time for a refused peer to read why."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a connection that could not be taken."""
SILENT_S = 3 * wire.HEARTBEAT_INTERVAL_S
"""Silence after which another engine of the same name takes a connection's place."""

OnJoin = Callable[[str, str, RemoteEngine], None]
"""on_join(replica, node, session): an engine is ready."""
OnLeave = Callable[[str], None]
"""on_leave(replica): it is gone, and its streams are handed over."""


class Members:
    """Listens for engines, and keeps the sessions of those that are connected, by replica. `probe_digest` names the
    probe whose content is `expected.probe`. `taken` are names of engines that do not dial. `on_join` and `on_leave`
    come in turns for each replica. `tls`: the server's end of it; None: none. All methods belong to one event loop's
    thread."""

    def __init__(
        self,
        expected: Expected,
        probe_digest: str,
        *,
        on_join: OnJoin,
        on_leave: OnLeave,
        log: Log,
        taken: Collection[str] = (),
        watchdog: WatchdogPolicy | None = None,
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
        demand: Demand | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._expected = expected
        self._probes = {probe_digest: expected.probe}  # the newest last
        self._on_join = on_join
        self._on_leave = on_leave
        self._log = log
        self._taken = frozenset(taken)
        self._watchdog = watchdog or WatchdogPolicy()
        self._on_damaged = on_damaged
        self._demand = demand
        self._servers: list[asyncio.Server] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[_Handshake, None] = {}  # the oldest first
        self._refusals = _RefusalLog(log)
        self._sessions: dict[str, RemoteEngine] = {}
        self._joined: set[RemoteEngine] = set()
        self._joins: set[asyncio.Task[None]] = set()

    @property
    def sessions(self) -> dict[str, RemoteEngine]:
        """Sessions by replica, those that are on their way to join included."""
        return dict(self._sessions)

    def expect(self, probe_digest: str, content: bytes) -> None:
        """Ask engines for another probe from here on; those that were asked already may answer with the one before."""
        *_, last = self._probes
        self._probes = {last: self._probes[last], probe_digest: content}

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Take connections on these bound sockets, which it owns from here on: one at least."""
        loop = asyncio.get_running_loop()
        for bound in sockets:
            bound.listen(128)
        if self._tls is None:
            self._servers = [
                await loop.create_server(lambda: _Handshake(self), sock=bound) for bound in sockets
            ]
        else:
            self._accepting = [loop.create_task(self._accept(bound, self._tls)) for bound in sockets]

    async def _accept(self, bound: socket.socket, context: ssl.SSLContext) -> None:
        """Take connections to speak TLS with. They count from here on: a server of the loop has them agree on TLS
        first, as many as come."""
        bound.setblocking(False)
        with bound:
            while True:
                try:
                    sock, address = await asyncio.get_running_loop().sock_accept(bound)
                except OSError:  # no descriptor is left, or the peer has gone already
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                _Handshake(self).secure(sock, str(address[0]), context)

    async def close(self, *, drain_s: float = 0) -> None:
        """Take no engine any more, let answers finish within `drain_s` seconds, and hang up on all of them."""
        for server in self._servers:
            server.close()
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for connection in list(self._handshakes):
            connection.end()
        await asyncio.gather(*(session.close(drain_s=drain_s) for session in self._sessions.values()))
        await asyncio.gather(*self._joins, return_exceptions=True)
        self._refusals.close()

    # What a handshake calls.

    def begin(self, connection: _Handshake) -> Challenge:
        """Take it in; returns the challenge to send."""
        self._handshakes[connection] = None
        if len(self._handshakes) > MAX_HANDSHAKES:
            by_peer = Counter(each.peer for each in self._handshakes)  # among equals, the one that came first
            ((most, _),) = by_peer.most_common(1)
            next(each for each in self._handshakes if each.peer == most).refuse(
                f"more than {MAX_HANDSHAKES} connections are in their handshake, most of them from this address"
            )
        *_, newest = self._probes
        return handshake.new_challenge(newest)

    def end(self, connection: _Handshake, reason: str | None) -> None:
        """Forget a handshake that is over; without a reason, it was welcome."""
        if connection not in self._handshakes:
            return
        del self._handshakes[connection]
        if reason is not None:
            self._refusals.note(connection.peer, reason)

    def admit(self, payload: bytes, challenge: Challenge) -> Hello:
        """The hello of an engine that may join now, in the place of an older connection. Raises HandshakeRefused."""
        expected = replace(self._expected, probe=self._probes.get(challenge.probe, b""))
        hello = handshake.check_hello(payload, challenge, expected)
        if hello.replica in self._taken:
            raise HandshakeRefused(
                f"the server has an engine of its own named '{hello.replica}'; give this one another --replica"
            )
        other = self._sessions.get(hello.replica)
        if other is not None:
            is_same = (other.hello.node, other.hello.pid) == (hello.node, hello.pid)
            if not is_same and other.silent_s < SILENT_S:
                raise HandshakeRefused(
                    f"a replica '{hello.replica}' is connected already, from '{other.hello.node}'; give this one "
                    "another --replica"
                )
            other.lose("another connection of the same replica takes its place")
        return hello

    def welcome(self, hello: Hello, transport: asyncio.Transport) -> None:
        transport.write(framing.encode_frame(handshake.make_welcome(hello, self._expected.token)))
        session = RemoteEngine(
            hello,
            on_gone=self._on_gone,
            watchdog=self._watchdog,
            on_damaged=self._on_damaged,
            demand=self._demand,
        )
        self._sessions[hello.replica] = session
        session.take(transport)
        joining = asyncio.get_running_loop().create_task(self._join(session))
        self._joins.add(joining)
        joining.add_done_callback(self._joins.discard)

    async def _join(self, session: RemoteEngine) -> None:
        try:
            await session.start()
        except EngineStartError:
            return  # its end is logged
        self._joined.add(session)
        hello = session.hello
        self._log("engine_joined", replica=hello.replica, node=hello.node, pid=hello.pid)
        try:
            self._on_join(hello.replica, hello.node, session)
        except Exception as error:
            session.lose(f"it cannot be used: {type(error).__name__}: {error}")

    def _on_gone(self, session: RemoteEngine) -> None:
        hello = session.hello
        if self._sessions.get(hello.replica) is session:
            del self._sessions[hello.replica]
        self._log("engine_left", replica=hello.replica, node=hello.node, pid=hello.pid, reason=session.reason)
        if session in self._joined:
            self._joined.discard(session)
            self._on_leave(hello.replica)


@dataclass(slots=True)
class _Peer:
    """Refusals of one address: the reasons that were logged, those since the last line, and the newest reason."""

    reasons: set[str] = field(default_factory=set)
    count: int = 0
    last: str = ""


class _RefusalLog:
    """Log lines of refused connections, few of each address: one for each of its first reasons, and one for each
    `COUNT_S` with the number of the others."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._peers: dict[str, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, address: str, reason: str) -> None:
        if address not in self._peers and len(self._peers) >= MAX_LOGGED_PEERS:
            address = OTHERS
        peer = self._peers.setdefault(address, _Peer())
        if reason in peer.reasons or len(peer.reasons) >= MAX_LOGGED_REASONS:
            peer.count += 1
            peer.last = reason
        else:
            peer.reasons.add(reason)
            self._log("engine_refused", peer=address, reason=reason)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COUNT_S, self._tell_counts)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._tell_counts(is_last=True)

    def _tell_counts(self, *, is_last: bool = False) -> None:
        """Log the counts; an address that had none since the last time is forgotten, and logged as new."""
        self._peers = {address: peer for address, peer in self._peers.items() if peer.count}
        for address, peer in self._peers.items():
            self._log("engine_refused", peer=address, reason=peer.last, tries=peer.count)
            peer.count = 0
        is_over = is_last or not self._peers
        self._timer = None if is_over else asyncio.get_running_loop().call_later(COUNT_S, self._tell_counts)


class _Handshake(asyncio.Protocol):
    """A connection whose other end is not known yet."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reader = framing.FrameReader(handshake.MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._challenge: Challenge | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sock: socket.socket | None = None
        self._securing: asyncio.Task[None] | None = None
        self.peer = ""

    def refuse(self, reason: str) -> None:
        """Say why, and end it."""
        if self._transport is not None:
            self._transport.write(framing.encode_frame(handshake.Refused(reason)))
        self.end(reason)

    def end(self, reason: str | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close()
            # It waits for a peer that does not read.
            self._timer = asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)
        elif self._securing is not None:
            self._securing.cancel()
        if self._sock is not None:
            self._sock.close()
        self._challenge = None
        self._members.end(self, reason)

    def secure(self, sock: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        """Agree on TLS over this connection, within the time of the handshake."""
        self._sock = sock
        self._begin(peer)
        if self._challenge is not None:
            self._securing = asyncio.get_running_loop().create_task(self._secure(context))

    async def _secure(self, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        sock, self._sock = self._sock, None  # the loop closes it from here on
        assert sock is not None
        try:
            await loop.connect_accepted_socket(lambda: self, sock, ssl=context)
        except OSError as error:  # ssl.SSLError is one
            self._securing = None
            self.end(f"it does not speak TLS as the server does: {handshake.one_line(str(error))}")

    def _begin(self, peer: str) -> None:
        self.peer = peer
        self._challenge = self._members.begin(self)
        late = f"no handshake came within {handshake.HANDSHAKE_S:g} s"
        self._timer = asyncio.get_running_loop().call_later(handshake.HANDSHAKE_S, self.refuse, late)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport)
        if self._securing is None:
            self._begin(str((transport.get_extra_info("peername") or ("unknown",))[0]))
        if self._challenge is None:
            self._transport.abort()  # it was ended while TLS was agreed on
        else:
            self._transport.write(framing.encode_frame(self._challenge))

    def data_received(self, data: bytes) -> None:
        if self._challenge is None:
            return
        try:
            payloads = self._reader.feed(data)
            if not payloads:
                return
            if len(payloads) > 1 or self._reader.num_left:
                raise HandshakeRefused("it went on before it was welcome")
            hello = self._members.admit(payloads[0], self._challenge)
        except (HandshakeRefused, framing.ProtocolError) as error:
            self.refuse(str(error))
            return
        transport, self._transport = self._transport, None
        assert transport is not None
        self.end()
        self._members.welcome(hello, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.end("it hung up before its hello")
