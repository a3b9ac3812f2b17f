"""The port that engines dial: who is let in, who is not, and that nobody else is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.types import Timing, TokenEvent
from loraplex.serving.dialling import hello as handshake
from loraplex.serving.dialling import members as members_module
from loraplex.serving.dialling.hello import Challenge, Draining, Hello, Identity, Refused, Welcome
from loraplex.serving.errors import EngineOverloaded, EngineUnavailable
from loraplex.serving.supervision.watchdog import WatchdogPolicy
from support.engine.dialled import CONTENT, EXPECTED, PROBE, TOKEN, Port, dialling, listen
from support.engine.fake_core import build_fake_engine, fake_tokens
from support.engine.fake_processes import LONG, adapter, ask, until
from support.virtual_time import VirtualTimeLoop

INFO = build_fake_engine(EngineConfig("ok", "/nowhere"), lambda: None).info


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = await listen()
    yield port
    await port.members.close()


@dataclass
class Peer:
    """A connection by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def dial(cls, port: Port, address: str = "127.0.0.1") -> Peer:
        """From this address of loopback."""
        return cls(*await asyncio.open_connection("127.0.0.1", port.number, local_addr=(address, 0)))

    async def message(self, kind: Any) -> Any:
        header = await self.reader.readexactly(framing.HEADER_BYTES)
        return msgspec.msgpack.decode(await self.reader.readexactly(framing.frame_length(header)), type=kind)

    async def send(self, *messages: msgspec.Struct) -> None:
        self.writer.write(b"".join(map(framing.encode_frame, messages)))
        await self.writer.drain()

    async def refusal(self) -> str:
        """Why it is not let in; the connection is over then."""
        refused = await self.message(Refused)
        assert await self.reader.read() == b""
        return str(refused.reason)

    async def shake_hands(
        self, replica: str = "one", pid: int = 1, node: str = "n", token: bytes = TOKEN
    ) -> Hello:
        """Send a hello."""
        challenge = await self.message(Challenge)
        said = Identity(replica, node, pid, 0, "", "numerics", 1024, 64)
        mine = handshake.make_hello(challenge, token, said, CONTENT)
        await self.send(mine)
        return mine

    async def join(self, replica: str = "one", pid: int = 1, node: str = "n") -> None:
        await self.shake_hands(replica, pid, node)
        await self.message(Welcome)
        await self.send(wire.Ready(INFO))


async def test_an_engine_joins_and_leaves(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    assert (session.healthy, session.pid, session.info) == (True, 1, INFO)
    stream = session.submit(ask("r", LONG))[0]
    question = asyncio.create_task(session.stats())
    await peer.message(wire.Command)
    peer.writer.close()
    event = await anext(stream)
    assert event.error is not None
    assert event.error.code == "engine_restarting"
    with pytest.raises(EngineUnavailable):
        await question
    assert port.turns == [("join", "one"), ("leave", "one")]
    assert not session.healthy
    assert session.pid is None
    with pytest.raises(EngineUnavailable):
        session.submit(ask("next"))
    assert port.logged("engine_left")[0]["reason"] == "it hung up"


async def test_streams_are_handed_over_before_the_engine_has_left(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    stream = session.submit(ask("r", LONG))[0]
    seen: list[tuple[bool, int]] = []

    def take_over(streams: Any, error: Any) -> Any:
        seen.append((session.healthy, len(port.turns)))
        return streams

    session.take_over = take_over
    peer.writer.close()
    await until(lambda: len(port.turns) == 2)
    assert seen == [(False, 1)]
    assert not stream.finished


async def test_a_wrong_token_is_refused_in_one_line(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.shake_hands(token=b"wrong")
    assert "another token" in await peer.refusal()
    assert "another token" in await port.refusal()
    assert [event for event, _ in port.log] == ["engine_refused"]
    assert port.logged("engine_refused")[0]["peer"] == "127.0.0.1"
    assert TOKEN.decode() not in str(port.log)


async def test_a_recorded_hello_is_worth_nothing(port: Port) -> None:
    first = await Peer.dial(port)
    recorded = await first.shake_hands()
    await first.message(Welcome)
    second = await Peer.dial(port)
    await second.message(Challenge)
    await second.send(recorded)
    assert "another token" in await second.refusal()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "above the limit of 65536"),
        (framing.frame_payload(b"\xc1" * 100), "no Hello"),
        ((handshake.MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "above the limit of 65536"),
        (framing.encode_frame(wire.Ready(INFO)), "no Hello"),
        (framing.encode_frame(Refused("x")) * 2, "before it was welcome"),
    ],
)
async def test_what_is_no_hello_is_refused_at_once(port: Port, sent: bytes, reason: str) -> None:
    peer = await Peer.dial(port)
    await peer.message(Challenge)
    peer.writer.write(sent)
    assert reason in await peer.refusal()
    assert reason in await port.refusal()


async def test_a_peer_that_says_nothing_or_speaks_slowly_is_cut(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    silent, slow = await Peer.dial(port), await Peer.dial(port, "127.0.0.2")
    challenge = await slow.message(Challenge)
    said = Identity("one", "n", 1, 0, "", "", 1024, 64)
    frame = framing.encode_frame(handshake.make_hello(challenge, TOKEN, said, CONTENT))

    async def drip() -> None:
        for byte in frame:
            slow.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    await silent.message(Challenge)
    assert await silent.refusal() == "no handshake came within 0.2 s"
    dripping.cancel()
    await until(lambda: len(port.logged("engine_refused")) == 2)
    with contextlib.suppress(ConnectionError):  # what it sent too late
        await slow.reader.read()
    assert port.turns == []


async def test_a_hello_may_come_in_pieces(port: Port) -> None:
    peer = await Peer.dial(port)
    challenge = await peer.message(Challenge)
    said = Identity("one", "n", 1, 0, "", "", 1024, 64)
    for byte in framing.encode_frame(handshake.make_hello(challenge, TOKEN, said, CONTENT)):
        peer.writer.write(bytes([byte]))
        await peer.writer.drain()
    await peer.message(Welcome)
    await peer.send(wire.Ready(INFO))
    await port.session()


async def test_the_oldest_stranger_of_one_address_makes_room(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "MAX_HANDSHAKES", 8)
    strangers = [await Peer.dial(port) for _ in range(12)]
    for stranger in strangers[:5]:
        await stranger.message(Challenge)
    for stranger in strangers[:4]:
        assert "in their handshake" in await stranger.refusal()
    peer = await Peer.dial(port)
    await peer.join()
    await port.session()


async def test_an_address_that_floods_keeps_no_engine_of_another_one_out(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that are in their handshake stay there, whatever comes behind them."""
    monkeypatch.setattr(members_module, "MAX_HANDSHAKES", 8)
    strangers = [await Peer.dial(port) for _ in range(8)]
    engines = {name: await Peer.dial(port, f"127.0.0.{number}") for name, number in (("a", 2), ("b", 3))}
    strangers += [await Peer.dial(port) for _ in range(40)]
    for name, engine in engines.items():
        await engine.join(name, node=name)
    for name in engines:
        await port.session(name)
    refused = port.logged("engine_refused")
    assert {line["peer"] for line in refused} == {"127.0.0.1"}
    for stranger in strangers:
        stranger.writer.close()


class Stranger:
    """A connection that is refused, as `Members` sees it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def refuse(self, reason: str) -> None:
        raise AssertionError("it is alone")


def log_of(refusals: Iterable[tuple[float, str, str]]) -> list[tuple[str, str, int | None]]:
    """Address, reason and count of each line, of refusals at this time, of this address, for this reason."""
    log: list[tuple[str, str, int | None]] = []

    def note(event: str, **fields: Any) -> None:
        log.append((fields["peer"], fields["reason"], fields.get("tries")))

    async def run() -> None:
        members = members_module.Members(
            EXPECTED, PROBE, on_join=lambda *_: None, on_leave=lambda _: None, log=note
        )
        for at, address, reason in refusals:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            stranger = cast(Any, Stranger(address))
            members.begin(stranger)
            members.end(stranger, reason)
        await members.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    return log


def test_refusals_of_an_address_are_logged_once_and_counted() -> None:
    """By minutes: five for one reason, three for it again, none, and one more."""
    assert log_of(
        [*[(1, "a", "token")] * 5, (2, "b", "token"), *[(70, "a", "token")] * 3, (200, "a", "token")]
    ) == [
        ("a", "token", None),
        ("b", "token", None),
        ("a", "token", 4),
        ("a", "token", 3),
        ("a", "token", None),
    ]


def test_reasons_without_end_are_counted() -> None:
    most = members_module.MAX_LOGGED_REASONS
    assert log_of((1, "a", f"reason {number}") for number in range(20)) == [
        *[("a", f"reason {number}", None) for number in range(most)],
        ("a", "reason 19", 20 - most),
    ]


def test_addresses_without_end_share_the_lines_of_one() -> None:
    most = members_module.MAX_LOGGED_PEERS
    log = log_of((1, f"a{number}", "token") for number in range(1000))
    assert log == [
        *[(f"a{number}", "token", None) for number in range(most)],
        (members_module.OTHERS, "token", None),
        (members_module.OTHERS, "token", 1000 - most - 1),
    ]


async def test_a_second_engine_of_one_name_is_refused(port: Port) -> None:
    first, second = await Peer.dial(port), await Peer.dial(port)
    await first.join()
    session = await port.session()
    await second.shake_hands(pid=2, node="other")
    assert "'one' is connected already, from 'n'" in await second.refusal()
    assert session.healthy
    assert port.turns == [("join", "one")]


async def test_the_same_engine_takes_the_place_of_its_dead_connection(port: Port) -> None:
    first, second = await Peer.dial(port), await Peer.dial(port)
    await first.join()
    before = await port.session()
    stream = before.submit(ask("r", LONG))[0]
    await second.join()
    await until(lambda: len(port.turns) == 3)
    assert port.turns == [("join", "one"), ("leave", "one"), ("join", "one")]
    assert (await anext(stream)).finish_reason == "error"
    assert port.sessions["one"] is not before
    assert port.sessions["one"].healthy


async def test_another_engine_takes_the_place_of_a_silent_one(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "SILENT_S", 0.0)
    first, second = await Peer.dial(port), await Peer.dial(port)
    await first.join()
    await port.session()
    await second.join(pid=2)
    await until(lambda: len(port.turns) == 3)
    assert port.sessions["one"].pid == 2


async def test_a_half_open_connection_is_found_by_its_silence() -> None:
    port = await listen(watchdog=WatchdogPolicy(hang_timeout_s=2.0))
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    stream = session.submit(ask("r", LONG))[0]
    async with asyncio.timeout(30):
        assert (await anext(stream)).finish_reason == "error"
    assert "no sign of life" in port.logged("engine_left")[0]["reason"]
    assert port.turns == [("join", "one"), ("leave", "one")]
    await port.members.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xff\xff\xff\xff", "above the limit"),
        (framing.frame_payload(b"\xc1"), "not an event"),
        (framing.encode_frame(Refused("no event")), "not an event"),
    ],
)
async def test_an_engine_that_breaks_the_protocol_leaves_and_others_stay(
    port: Port, sent: bytes, reason: str
) -> None:
    async with dialling(port.number, "whole"):
        whole = await port.session("whole")
        request = ask("w", 200)
        stream = whole.submit(request)[0]
        peer = await Peer.dial(port)
        await peer.join("broken")
        await port.session("broken")
        peer.writer.write(sent)
        await until(lambda: bool(port.logged("engine_left")))
        left = port.logged("engine_left")
        assert [line["replica"] for line in left] == ["broken"]
        assert reason in left[0]["reason"]
        tokens = [token async for event in stream for token in event.token_ids]
        assert tuple(tokens) == fake_tokens(request)


async def test_an_engine_that_is_not_ready_in_time_never_joins(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.serving.dialling.remote.READY_TIMEOUT_S", 0.1)
    peer = await Peer.dial(port)
    await peer.shake_hands()
    await peer.message(Welcome)
    assert await peer.reader.read() == b""
    assert "not ready" in port.logged("engine_left")[0]["reason"]
    assert port.turns == []


async def test_an_engine_that_does_not_read_is_cut(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that it is full: a burst is not its fault."""
    monkeypatch.setattr("loraplex.serving.dialling.tcp.MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr("loraplex.serving.dialling.tcp.UNREAD_S", 0.5)
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    prompt = tuple(range(100, 600)) * 1000
    streams = []
    with pytest.raises(EngineOverloaded, match="on their way"):
        for number in range(200):
            streams.append(session.submit(ask(f"r{number}", prompt=prompt))[0])
    assert session.healthy
    assert session.num_live == len(streams)
    async with asyncio.timeout(60):
        for stream in streams:
            assert (await anext(stream)).finish_reason == "error"
    assert "read nothing" in port.logged("engine_left")[0]["reason"]


async def test_a_draining_engine_finishes_and_is_let_go(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    stream = session.submit(ask("r", LONG))[0]
    await peer.message(wire.Command)
    await peer.send(Draining())
    await until(lambda: not session.healthy)
    assert "leaves" in str(session.unhealthy_reason)
    with pytest.raises(EngineUnavailable):
        session.submit(ask("late"))
    deleting = asyncio.gather(session.drop("d" * 64), session.forget_tenant("acme"))
    for expected in (wire.Drop, wire.ForgetTenant):  # it may hand prefixes on
        command = await peer.message(wire.Command)
        assert isinstance(command, expected)
        await peer.send(wire.Done(command.call))
    await deleting
    stream.abort()
    assert await peer.message(wire.Command) == wire.Abort(("r",))
    event = TokenEvent("r", (1,), finish_reason="length")
    await peer.send(wire.Events((event,)))
    assert (await anext(stream)).finish_reason == "length"
    await until(lambda: len(port.turns) == 2)
    assert port.logged("engine_left")[0]["reason"] == "it has drained"


async def test_an_idle_engine_that_drains_is_let_go_at_once(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join()
    await port.session()
    await peer.send(Draining())
    await until(lambda: len(port.turns) == 2)


async def test_times_of_another_machine_are_not_taken_for_ours(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join(node="another machine")
    session = await port.session()
    stream = session.submit(ask("r"))[0]
    timing = TokenEvent("r", finish_reason="length", timing=Timing(0.5, 1.0, 2.0, arrived=123.0))
    await peer.send(wire.Events((timing,)))
    event = await anext(stream)
    assert event.timing is not None
    assert (event.timing.arrived, event.timing.total_s) == (None, 2.0)


async def test_residency_is_known_from_the_greeting(port: Port) -> None:
    peer = await Peer.dial(port)
    await peer.join()
    session = await port.session()
    await peer.send(wire.ResidencyChanged({adapter(1).digest: "hot"}))
    await until(lambda: session.adapter_state(adapter(1).digest) == "hot")
