"""A relay around an engine process: what it passes on, and what each side's end does to the other."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from loraplex.adapters.errors import ArtifactMissing
from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.serving.dialling.hello import Expected, check_hello, make_welcome, new_challenge
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import EngineStartError, EngineUnavailable
from loraplex.serving.supervision.supervisor import RestartPolicy
from support.engine.dialled import CONTENT, EXPECTED, TOKEN, Dialling, Port, dial, dialling, listen, listening
from support.engine.fake_core import CRASH, fake_tokens
from support.engine.fake_processes import LONG, adapter, ask, until


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    async with listening() as port:
        yield port


@pytest.fixture
async def dialled(port: Port) -> AsyncIterator[Dialling]:
    async with dialling(port.number) as dialled:
        yield dialled


async def read(session: EngineSession, name: str, number: int = 0) -> None:
    """A whole answer."""
    request = ask(name, 20, number=number)
    tokens = [token async for event in session.submit(request)[0] for token in event.token_ids]
    assert tuple(tokens) == fake_tokens(request)


async def test_an_engine_that_is_killed_leaves_at_once_and_dials_again(port: Port, dialled: Dialling) -> None:
    session = await port.session()
    await read(session, "before", 1)
    streams = [session.submit(ask(f"r{i}", LONG, number=1 + i % 2))[0] for i in range(8)]
    for stream in streams:
        await anext(stream)
    lost: list[object] = []
    session.take_over = lambda handed, error: lost.extend(handed) or handed  # type: ignore[func-returns-value]
    killed = session.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await until(lambda: len(port.turns) == 2)
    assert lost == streams, "each of them is handed over, once"
    assert not any(stream.finished for stream in streams)
    await until(lambda: len(port.turns) == 3)
    assert port.turns == [("join", "one"), ("leave", "one"), ("join", "one")]
    again = port.sessions["one"]
    assert (again.pid == killed, again.num_restarts) == (False, 1)
    assert again.adapter_state(adapter(1).digest) == "cold"
    await read(again, "after", 1)


async def test_an_engine_goes_on_when_the_server_restarts(port: Port, dialled: Dialling) -> None:
    session = await port.session()
    pid = session.pid
    await read(session, "before", 1)
    await session.pin(adapter(2))
    session.set_tenants({"acme": TenantTerms(3.0)})
    stream = session.submit(ask("cut", LONG, number=1))[0]
    await anext(stream)
    await port.members.close()
    assert [event async for event in stream][-1].finish_reason == "error"
    second = await listen(port.number)
    try:
        again = await second.session()
        assert (again.pid, again.num_restarts) == (pid, 0), "nothing was started"
        assert len(dialled.logged("engine_started")) == 1
        await until(lambda: again.adapter_state(adapter(1).digest) == "hot")
        stats = await again.stats()
        assert stats.num_running == 0, "what the other server had is aborted"
        assert [(entry.state, entry.pinned) for entry in await again.cache()] == [("hot", False)] * 2
        assert {tenant: its.counter for tenant, its in stats.tenants.items()} == {"acme": 1.0}
        await read(again, "cut", 1)
    finally:
        await second.members.close()


async def test_a_server_that_closes_in_order_lets_answers_finish_and_the_engine_go_on(
    port: Port, dialled: Dialling
) -> None:
    session = await port.session()
    request = ask("r", 100)
    stream = session.submit(request)[0]
    await port.members.close(drain_s=60)
    tokens = [token async for event in stream for token in event.token_ids]
    assert tuple(tokens) == fake_tokens(request)
    assert not dialled.running.done()
    assert dialled.relay.pid == session.hello.pid


async def test_answers_to_an_earlier_server_never_reach_the_next(port: Port, dialled: Dialling) -> None:
    """Both number their calls from 1."""
    session = await port.session()
    asked = [asyncio.create_task(session.cache((str(i),))) for i in range(50)]
    await asyncio.sleep(0)
    session.lose("its server is gone")
    await until(lambda: len(port.turns) == 3)
    again = port.sessions["one"]
    assert all([(await again.stats()).num_steps >= 0 for _ in range(20)])
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_drained_relay_finishes_what_runs_and_takes_nothing_new(
    port: Port, dialled: Dialling
) -> None:
    session = await port.session()
    request = ask("r", 200)
    stream = session.submit(request)[0]
    await anext(stream)
    draining = asyncio.create_task(dialled.relay.drain(60))
    await until(lambda: not session.healthy)
    assert not stream.finished
    await draining
    await dialled.running
    tokens = [token async for event in stream for token in event.token_ids]
    assert fake_tokens(request)[-len(tokens) :] == tuple(tokens)
    assert stream.finished
    assert port.turns == [("join", "one"), ("leave", "one")]
    assert port.logged("engine_left")[0]["reason"] == "it has drained"


async def test_a_drain_ends_when_its_time_is_up(port: Port, dialled: Dialling) -> None:
    session = await port.session()
    stream = session.submit(ask("r", LONG))[0]
    await anext(stream)
    await dialled.relay.drain(0.1)
    assert dialled.relay.num_live == 1
    await dialled.end()
    async with asyncio.timeout(60):
        assert [event async for event in stream][-1].finish_reason == "error"


async def test_a_server_may_come_later_than_its_engine(port: Port) -> None:
    number = port.number
    await port.members.close()
    async with dialling(number) as dialled:
        await until(lambda: bool(dialled.logged("server_not_joined")))
        async with listening(number=number) as later:
            await read(await later.session(), "r")
        lines = [line["reason"] for line in dialled.logged("server_not_joined")]
        assert len(lines) == len(set(lines)), "one line a reason, however often it is tried"


async def test_a_refusal_is_told_once_and_the_engine_stays(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.serving.dialling.members.COUNT_S", 0.1)
    async with dialling(port.number, token=b"wrong") as dialled:
        await until(lambda: len(port.logged("engine_refused")) >= 3)  # the first, and two that count others
        (line,) = dialled.logged("server_not_joined")
        assert "another token" in line["reason"]
        assert not dialled.running.done()
    assert port.turns == []


async def test_a_server_without_the_token_gets_no_engine() -> None:
    async with listening(expected=Expected(b"another", "", CONTENT)) as port, dialling(port.number):
        assert "another token" in await port.refusal()


async def test_a_store_that_cannot_be_read_is_refused_with_a_sentence(port: Port) -> None:
    def read_probe(digest: str) -> bytes:
        raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'")

    async with dialling(port.number, read_probe=read_probe) as dialled:
        assert "cannot read the server's artifact store" in await port.refusal()
        assert dialled.logged("probe_not_read")[0]["reason"] == "the store holds no artifact '000000000000'"


@pytest.mark.parametrize("sent", [framing.frame_payload(b"\xa1\xff"), framing.encode_frame(wire.Shutdown())])
async def test_a_server_that_breaks_the_protocol_does_not_end_the_engine(sent: bytes) -> None:
    welcomed: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = new_challenge("0" * 64)
        writer.write(framing.encode_frame(challenge))
        header = await reader.readexactly(framing.HEADER_BYTES)
        payload = await reader.readexactly(framing.frame_length(header))
        hello = check_hello(payload, challenge, EXPECTED)
        welcomed.append(hello.pid)
        writer.write(framing.encode_frame(make_welcome(hello, TOKEN)))
        await reader.readexactly(framing.HEADER_BYTES)  # of its Ready
        writer.write(sent)

    strange = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with strange, dialling(strange.sockets[0].getsockname()[1]) as dialled:
        await until(lambda: len(welcomed) >= 3)
        assert len(set(welcomed)) == 1, "one engine process all the time"
        assert "broke the protocol" in dialled.logged("server_left")[0]["reason"]


async def test_a_strange_server_on_the_port_is_no_harm() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")

    strange = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with strange, dialling(strange.sockets[0].getsockname()[1]) as dialled:
        await until(lambda: bool(dialled.logged("server_not_joined")))
        assert "above the limit of 65536" in dialled.logged("server_not_joined")[0]["reason"]
        assert not dialled.running.done()


async def test_an_engine_that_does_not_start_says_why(port: Port) -> None:
    dialled = dial(port.number, config=EngineConfig("broken", "/nowhere"))
    with pytest.raises(EngineStartError, match="there is no model in /nowhere"):
        await dialled.running
    await dialled.end()
    assert port.turns == []


async def test_an_engine_that_stays_down_ends_its_relay(port: Port) -> None:
    async with dialling(port.number, restart=RestartPolicy(0.0, max_deaths=1)) as dialled:
        session = await port.session()
        session.submit(ask("crash", prompt=(CRASH,)))
        with pytest.raises(EngineStartError, match="stays down"):
            await dialled.running
    assert port.turns == [("join", "one"), ("leave", "one")]


async def test_several_engines_serve_side_by_side(port: Port) -> None:
    async with dialling(port.number, "one"), dialling(port.number, "two"), dialling(port.number, "three"):
        sessions = [await port.session(name) for name in ("one", "two", "three")]
        await asyncio.gather(*(read(session, f"r{i}") for session in sessions for i in range(8)))
        victim = sessions[1].pid
        assert victim is not None
        streams = [session.submit(ask("long", 2000))[0] for session in sessions]
        os.kill(victim, signal.SIGKILL)
        ends = [[event async for event in stream][-1].finish_reason for stream in streams]
        assert ends == ["length", "error", "length"], "nobody else is disturbed"


async def test_nothing_is_left_behind(port: Port) -> None:
    process = psutil.Process()
    tasks, fds = asyncio.all_tasks(), process.num_fds()
    for _ in range(3):
        async with dialling(port.number):
            await read(await port.session(), "r")
        await until(lambda: not port.sessions)
    assert asyncio.all_tasks() == tasks
    await until(lambda: process.num_fds() <= fds)


async def test_the_token_never_travels() -> None:
    """Bytes that a relay sends to a peer that only pretends to be a server."""
    received = bytearray()
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framing.encode_frame(new_challenge("0" * 64)))
        received.extend(await reader.read(1 << 16))
        done.set()

    strange = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with strange, dialling(strange.sockets[0].getsockname()[1]):
        await asyncio.wait_for(done.wait(), 60)
    assert b"Hello" in received
    assert TOKEN not in received


async def test_a_relay_tells_its_engines_figures_and_the_server_hears_nothing_of_it(
    port: Port, dialled: Dialling
) -> None:
    session = await port.session()
    assert dialled.relay.joined.is_set()
    (stream,) = session.submit(ask("long", LONG))
    await anext(stream)
    both = await asyncio.gather(dialled.relay.stats(), dialled.relay.stats())
    assert [stats.num_running for stats in both] == [1, 1]
    assert (await session.stats()).num_running == 1
    assert dialled.relay.places == session.info.max_num_seqs
    assert session.pid is not None
    os.kill(session.pid, signal.SIGSTOP)
    asked = asyncio.create_task(dialled.relay.stats())
    await asyncio.sleep(0)
    os.kill(session.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await asked
