"""One suite for all engine clients: a real engine process around a fake core, the same that dials in over TCP, the same
loop in a thread, and clusters of one and of three."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import (
    EngineDraining,
    EngineOverloaded,
    EngineStartError,
    EngineUnavailable,
    ServingError,
)
from loraplex.serving.supervision.engine_supervisor import Supervision
from support.cluster.inprocess import InProcessEngineClient
from support.engine.dialled import DialledClient
from support.engine.fake_core import CRASH, DAMAGED, SLOW, build_fake_engine, fake_tokens
from support.engine.fake_processes import FAKE_ENGINE

ALONE = ["socket", "remote", "inprocess", "cluster of 1"]
"""Clients of one engine, whose bounds are that engine's."""
LONG = 1_000_000
LENGTHS = (200, 1000, 5000)
"""Of answers that have to run on while something else is done: tried by turns, as a busy machine needs longer ones."""


def make_client(
    kind: str,
    model_path: str = "ok",
    on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
    **config: int,
) -> Engines:
    engine_config = EngineConfig(model_path, "/nowhere", **config)  # type: ignore[arg-type]
    if kind.startswith("cluster of"):
        made = [make_engine("socket", engine_config, on_damaged)]
        made += [make_engine("inprocess", engine_config, on_damaged) for _ in range(int(kind[-1]) - 1)]
        return Engines(Replica(f"replica-{number}", session) for number, session in enumerate(made))
    return make_engine(kind, engine_config, on_damaged)


def make_engine(
    kind: str, engine_config: EngineConfig, on_damaged: Callable[[tuple[str, ...]], None]
) -> EngineSession:
    if kind == "socket":
        return LocalEngine(
            engine_config, Supervision(command=FAKE_ENGINE, start_timeout_s=60), on_damaged=on_damaged
        )
    if kind == "remote":
        return DialledClient(engine_config, on_damaged)
    return InProcessEngineClient(lambda wake: build_fake_engine(engine_config, wake), on_damaged=on_damaged)


@pytest.fixture(params=[*ALONE[:3], "cluster of 3", pytest.param("cluster of 1", marks=pytest.mark.soak)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(kind: str) -> AsyncIterator[Engines]:
    client = make_client(kind)
    await client.start()
    yield client
    await client.close()


def adapter(number: int, rank: int = 8) -> AdapterRef:
    return AdapterRef("acme", f"a{number}", 1, f"{number:064x}", rank)


def ask(
    name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), adapter: AdapterRef | None = None
) -> EngineRequest:
    return EngineRequest(name, "acme", prompt, SamplingParams(max_tokens), adapter)


async def read(stream: RequestStream) -> tuple[tuple[int, ...], TokenEvent]:
    """All tokens and the terminal event."""
    tokens: list[int] = []
    last = None
    async for event in stream:
        assert last is None or last.finish_reason is None, "an event after the terminal one"
        tokens += event.token_ids
        last = event
    assert last is not None
    assert last.finish_reason is not None, "a stream ended without its terminal event"
    return tuple(tokens), last


async def first(stream: RequestStream) -> TokenEvent:
    return await anext(stream)


async def test_info_is_known_after_start(client: Engines) -> None:
    assert client.healthy
    assert client.unhealthy_reason is None
    assert client.info.vocab_size == 1000
    assert client.info.eos_ids == (0,)
    assert set(await client.expert_rows()) == {0}


async def test_tokens_arrive_in_order_and_end_once(client: Engines) -> None:
    requests = [ask(f"r{i}", 40, (i,), adapter(i % 3) if i % 4 else None) for i in range(32)]
    streams = [client.submit(request)[0] for request in requests]
    assert client.num_live == 32
    for request, (tokens, last) in zip(requests, await asyncio.gather(*map(read, streams)), strict=True):
        assert tokens == fake_tokens(request)
        assert last.finish_reason == "length"
        assert last.usage is not None
        assert last.usage.completion_tokens == 40
    assert client.num_live == 0


async def test_terms_are_sent_when_they_change(client: Engines) -> None:
    stream = client.submit(ask("r", LONG))[0]
    await first(stream)
    assert client.served_tenants == {"acme"}
    client.set_tenants({"acme": TenantTerms(3.0), "nobody": TenantTerms()})
    tenants = (await client.stats()).tenants
    assert {tenant: stats.counter for tenant, stats in tenants.items()} == {"acme": 3.0}
    client.set_tenants({"acme": TenantTerms()})
    tenants = (await client.stats()).tenants
    assert {tenant: stats.counter for tenant, stats in tenants.items()} == {"acme": 1.0}
    stream.abort()
    await read(stream)
    assert client.served_tenants == set()


async def test_the_first_event_tells_where_the_adapter_was(client: Engines) -> None:
    assert client.adapter_state(adapter(1).digest) == "cold"
    events = [event async for event in client.submit(ask("r", adapter=adapter(1)))[0]]
    assert events[0].adapter_state == "cold"
    assert [event.adapter_state for event in events[1:]] == [None] * (len(events) - 1)
    async with asyncio.timeout(60):
        while client.adapter_state(adapter(1).digest) != "hot":
            await client.stats()


async def test_sites_are_measured(client: Engines) -> None:
    stream = client.submit(ask("r", LONG))[0]
    await first(stream)
    found = await asyncio.gather(*(client.measure_sites(adapter(n)) for n in (1, 2, 1)))
    assert [outputs.sites for outputs in found] == [((0, adapter(n).name),) for n in (1, 2, 1)]
    stream.abort()
    await read(stream)


async def test_a_version_that_cannot_be_loaded_has_no_outputs(client: Engines) -> None:
    found = await client.measure_sites(replace(adapter(1), name=DAMAGED))
    assert (found.sites, found.failure) == ((), "its stored bytes are damaged")


@pytest.mark.parametrize("kind", ["inprocess"])
async def test_a_measurement_that_is_given_up_leaves_no_request(kind: str) -> None:
    client = make_client(kind)
    await client.start()
    blocking = client.submit(ask("slow", prompt=(SLOW, 3)))[0]
    measuring = asyncio.create_task(client.measure_sites(adapter(1)))
    await asyncio.sleep(0)
    assert client.num_live == 2
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    await read(blocking)
    while client.num_live:
        await client.stats()
    await client.close()
    with pytest.raises(EngineUnavailable):
        await client.measure_sites(adapter(1))


async def test_a_prefetched_adapter_is_there_before_it_is_asked_for(client: Engines) -> None:
    client.prefetch([adapter(1)])
    async with asyncio.timeout(60):
        while client.adapter_state(adapter(1).digest) != "hot":
            await client.stats()
    events = [event async for event in client.submit(ask("r", adapter=adapter(1)))[0]]
    assert events[0].adapter_state == "hot"


async def test_abort_mid_stream(client: Engines) -> None:
    stream, other = client.submit(ask("r", LONG))[0], client.submit(ask("other", 50))[0]
    await first(stream)
    stream.abort()
    stream.abort()
    _, last = await read(stream)
    assert last.finish_reason == "abort"
    assert last.usage is not None
    assert last.usage.completion_tokens > 0
    assert (await read(other))[1].finish_reason == "length"
    stream.abort()
    assert (await client.stats()).num_running == 0


async def test_leaving_the_stream_as_a_context_aborts(client: Engines) -> None:
    async with client.submit(ask("r", LONG))[0] as stream:
        await first(stream)
    _, last = await read(stream)
    assert last.finish_reason == "abort"


async def test_a_slow_reader_gets_merged_events(client: Engines) -> None:
    for number, length in enumerate(LENGTHS):
        request = ask(f"r{number}", length)
        stream = client.submit(request)[0]
        begun = await first(stream)
        async with asyncio.timeout(60):
            while not stream.finished:
                await client.stats()
        if begun.finish_reason is None:
            break
    event = await anext(stream)
    assert event.finish_reason == "length"
    assert begun.token_ids + event.token_ids == fake_tokens(request)


async def test_a_cancelled_read_loses_nothing(client: Engines) -> None:
    request = ask("r", 100)
    stream = client.submit(request)[0]
    tokens: list[int] = []
    while True:
        task = asyncio.create_task(anext(stream))
        done, _ = await asyncio.wait([task], timeout=0.001)
        if not done:
            task.cancel()
            try:
                event = await task
            except asyncio.CancelledError:
                continue
        else:
            event = task.result()
        tokens += event.token_ids
        if event.finish_reason is not None:
            break
    assert tuple(tokens) == fake_tokens(request)


@pytest.mark.parametrize("kind", ALONE)
async def test_overload_is_said_at_the_bound(kind: str) -> None:
    client = make_client(kind, max_num_seqs=2, max_waiting=2)
    await client.start()
    try:
        streams = [client.submit(ask(f"r{i}", LONG))[0] for i in range(4)]
        with pytest.raises(EngineOverloaded, match="4 of them yours"):
            client.submit(ask("r4"))
        other = client.submit(replace(ask("other"), tenant_id="other"))[0]
        other.abort()
        await read(other)
        streams[0].abort()
        await read(streams[0])
        assert (await read(client.submit(ask("r7"))[0]))[1].finish_reason == "length"
    finally:
        await client.close()


@pytest.mark.parametrize("kind", ALONE)
async def test_room_for_all_sequences_of_a_request_is_taken_before_any_is_sent(kind: str) -> None:
    client = make_client(kind, max_num_seqs=3, max_waiting=3)
    await client.start()
    try:
        streams = client.submit(*(ask(f"r{i}", LONG) for i in range(4)))
        with pytest.raises(EngineOverloaded, match="4 of them yours") as caught:
            client.submit(*(ask(f"s{i}", LONG) for i in range(3)))
        assert (client.num_live, caught.value.is_own) == (4, True)
        others = [replace(ask(f"o{i}", LONG), tenant_id="other") for i in range(6)]
        with pytest.raises(EngineOverloaded) as caught:
            client.submit(*others)
        assert (client.num_live, caught.value.is_own) == (4, True), "it asks for more than its share"
        streams += client.submit(*others[:4])
        with pytest.raises(EngineOverloaded, match="0 of them yours") as caught:
            client.submit(*(replace(ask(f"t{i}", LONG), tenant_id="third") for i in range(3)))
        assert not caught.value.is_own, "the others hold more than theirs"
        with pytest.raises(ValueError, match="live already"):
            client.submit(ask("new", LONG), ask("r0", LONG))
        assert client.num_live == 8
        for stream in streams:
            stream.abort()
        await asyncio.gather(*map(read, streams))
        assert len(client.submit(*(ask(f"u{i}") for i in range(6)))) == 6, "all of the room came back"
    finally:
        await client.close()


@pytest.mark.parametrize("kind", ALONE)
async def test_an_error_of_one_request_is_its_terminal_event(kind: str) -> None:
    client = make_client(kind, max_num_seqs=64, max_waiting=64)
    await client.start()
    try:
        for length in LENGTHS:
            # The fake core takes 64 at a time.
            streams = [client.submit(ask(f"r{i}", length))[0] for i in range(65)]
            ends = [last for _, last in await asyncio.gather(*map(read, streams))]
            errors = [last.error.code for last in ends if last.error is not None]
            if errors:
                break
        assert errors == ["server_overloaded"]
        assert [last.finish_reason for last in ends].count("length") == 64
    finally:
        await client.close()


async def test_a_live_id_is_refused(client: Engines) -> None:
    stream = client.submit(ask("r", LONG))[0]
    with pytest.raises(ValueError, match="live already"):
        client.submit(ask("r"))
    stream.abort()
    assert (await read(stream))[1].finish_reason == "abort"


async def test_pins_and_the_cache(client: Engines) -> None:
    await client.pin(adapter(1))
    assert [(e.ref, e.state, e.pinned) for e in await client.cache()] == [(adapter(1), "hot", True)]
    await client.unpin(adapter(1).digest)
    assert [e.pinned for e in await client.cache()] == [False]
    await client.drop(adapter(1).digest)
    assert await client.cache() == []
    with pytest.raises(ServingError, match="rank 128"):
        await client.pin(adapter(2, rank=128))


@pytest.mark.parametrize("kind", ALONE)
async def test_concurrent_questions_share_an_answer(client: Engines) -> None:
    answers = await asyncio.gather(*(client.stats() for _ in range(50)))
    assert all(answer is answers[0] for answer in answers)


async def test_an_idle_engine_takes_no_steps(client: Engines, kind: str) -> None:
    num_engines = 3 if kind == "cluster of 3" else 1
    await read(client.submit(ask("r"))[0])
    before = (await client.stats()).num_steps
    await asyncio.sleep(0.3)
    assert (await client.stats()).num_steps - before <= 2 * num_engines


@pytest.mark.parametrize("kind", ["socket", "inprocess"])
async def test_a_step_that_raises_ends_every_stream(kind: str) -> None:
    client = make_client(kind)
    await client.start()
    try:
        healthy = client.submit(ask("healthy", LONG))[0]
        await first(healthy)
        crash = client.submit(ask("crash", prompt=(CRASH,)))[0]
        for stream in (healthy, crash):
            _, last = await read(stream)
            assert last.finish_reason == "error"
            assert last.error is not None
            assert last.error.code == "engine_restarting"
        assert not client.healthy
        with pytest.raises(EngineUnavailable):
            client.submit(ask("next"))
        assert client.unhealthy_reason
        assert client.num_live == 0
    finally:
        await client.close()


async def test_close_with_drain_lets_requests_finish(kind: str) -> None:
    client = make_client(kind)
    await client.start()
    stream = client.submit(ask("r", 100))[0]
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.close(drain_s=20))
    await asyncio.sleep(0)
    with pytest.raises(EngineDraining):
        client.submit(ask("late"))
    await closing
    tokens, last = await reading
    assert last.finish_reason == "length"
    assert len(tokens) == 100


@pytest.mark.parametrize("drain_s", [0.0, 0.1])
async def test_close_ends_what_does_not_finish_in_time(kind: str, drain_s: float) -> None:
    client = make_client(kind)
    await client.start()
    streams = [client.submit(ask(f"r{i}", LONG))[0] for i in range(3)]
    async with asyncio.timeout(60):
        await client.close(drain_s=drain_s)
    for stream in streams:
        _, last = await read(stream)
        assert last.finish_reason == "error"
        assert last.error is not None
        assert last.error.code == "draining"
    await client.close()
    with pytest.raises(EngineDraining):
        client.submit(ask("late"))


@pytest.mark.parametrize("kind", ["socket", "inprocess"])  # one that does not start never dials
async def test_a_start_that_fails_says_why_in_one_line(kind: str) -> None:
    client = make_client(kind, "broken")
    with pytest.raises(EngineStartError) as raised:
        await client.start()
    assert raised.value.message == "there is no model in /nowhere"
    assert not client.healthy
    assert client.unhealthy_reason == raised.value.message
    with pytest.raises(EngineUnavailable):
        client.submit(ask("r"))
    await client.close()


async def test_nothing_is_left_behind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = psutil.Process()
    tasks, fds, children = asyncio.all_tasks(), process.num_fds(), process.children()
    for _ in range(3):
        client = make_client(kind)
        await client.start()
        assert list(tmp_path.iterdir()) == []  # the socket's directory is gone once it is connected
        client.submit(ask("abandoned", LONG))
        await read(client.submit(ask("r"))[0])
        await client.close()
    assert asyncio.all_tasks() == tasks
    assert set(process.children()) <= set(children)  # those of other tests may end meanwhile
    async with asyncio.timeout(60):
        while process.num_fds() > fds:
            await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) == []


async def test_bytes_that_a_load_found_damaged_are_told_once(kind: str) -> None:
    told: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    client = make_client(kind, on_damaged=told.put_nowait)
    await client.start()
    try:
        bad = replace(adapter(7), name=DAMAGED)
        _, last = await read(client.submit(ask("bad", adapter=bad))[0])
        assert last.error is not None
        assert last.error.code == "adapter_unavailable"
        assert await asyncio.wait_for(told.get(), 60) == (bad.digest,)
        await read(client.submit(ask("good", adapter=adapter(1)))[0])
        assert told.empty()
    finally:
        await client.close()
