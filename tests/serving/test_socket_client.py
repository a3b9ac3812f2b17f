"""The supervised engine process: death, restart, crash loops, bad starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.reports import EngineInfo
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.errors import EngineStartError, EngineUnavailable
from loraplex.serving.supervision.engine_supervisor import Supervision
from loraplex.serving.supervision.supervisor import MAX_SOCKET_PATH_BYTES, EngineProcess, RestartPolicy
from support.engine.fake_core import CRASH, fake_tokens
from support.engine.fake_processes import FAKE_ENGINE, LONG, adapter, ask, engines, until


@pytest.fixture
async def client() -> AsyncIterator[LocalEngine]:
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE, start_timeout_s=60))
    await client.start()
    yield client
    await client.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_death_in_mid_stream_is_told_at_once_and_service_comes_back(
    client: LocalEngine, number: signal.Signals
) -> None:
    await client.pin(adapter(9))
    streams = [client.submit(ask(f"r{i}", LONG, number=1 + i % 2))[0] for i in range(8)]
    for stream in streams:
        await anext(stream)
    await until(lambda: client.adapter_state(adapter(1).digest) == "hot")
    assert client.pid is not None
    question = asyncio.create_task(client.stats())
    os.kill(client.pid, number)
    for stream in streams:
        events = [event async for event in stream]
        assert [e.finish_reason for e in events if e.finish_reason] == ["error"]
        assert events[-1].error is not None
        assert events[-1].error.code == "engine_restarting"
    assert client.num_restarts == 0, "told before the next one is started"
    await asyncio.wait([question])
    await until(lambda: not client.healthy)
    assert client.adapter_state(adapter(1).digest) == "cold"
    with pytest.raises(EngineUnavailable, match="restarted"):
        client.submit(ask("too early"))
    assert client.info.vocab_size == 1000

    await until(lambda: client.healthy)
    assert client.num_restarts == 1
    request = ask("after")
    events = [event async for event in client.submit(request)[0]]
    assert sum((event.token_ids for event in events), ()) == fake_tokens(request)
    # What was on the device comes back, the pin as a pin.
    entries = {entry.ref.digest: entry for entry in await client.cache()}
    assert {n: entries[adapter(n).digest].state for n in (1, 2, 9)} == {1: "hot", 2: "hot", 9: "hot"}
    assert [n for n in (1, 2, 9) if entries[adapter(n).digest].pinned] == [9]


async def test_an_engine_that_dies_right_behind_its_pins_is_started_again(
    client: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.pin(adapter(9))
    deaths = [1]

    async def die_behind_the_answer(refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        if deaths:
            deaths.pop()
            process = client._supervisor._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.wait({process.gone})
        return []

    monkeypatch.setattr(client, "wait_pins", die_behind_the_answer)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.healthy and client.num_restarts == 2)
    await client.stats()


async def test_an_engine_that_dies_while_its_pins_come_is_missed_at_once(
    client: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.pin(adapter(9))
    waits: list[int] = []

    async def wait_for_ever(refs: Sequence[AdapterRef]) -> list[CacheEntry]:
        process = client._supervisor._process
        assert process is not None
        waits.append(process.pid)
        if len(waits) == 1:
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.Event().wait()
        return []

    monkeypatch.setattr(client, "wait_pins", wait_for_ever)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.healthy and client.num_restarts == 2)
    assert len(waits) == 2


async def test_deaths_with_service_between_them_are_no_crash_loop() -> None:
    client = LocalEngine(
        EngineConfig("ok", "/nowhere"),
        Supervision(command=FAKE_ENGINE, restart=RestartPolicy(first_delay_s=0.01, max_deaths=2)),
    )
    await client.start()
    for life in range(1, 4):
        assert [event async for event in client.submit(ask("r"))[0]][-1].finish_reason == "length"
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda life=life: client.healthy and client.num_restarts == life)  # type: ignore[misc]
    await client.close()


async def test_a_restart_that_fails_by_a_bug_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[str] = []
    client = LocalEngine(
        EngineConfig("ok", "/nowhere"),
        Supervision(
            command=FAKE_ENGINE,
            restart=RestartPolicy(first_delay_s=0.01),
            log=lambda event, **_: logs.append(event),
        ),
    )
    await client.start()
    start, failures = EngineProcess.start, [1, 1]

    async def fail_twice(process: EngineProcess, timeout_s: float) -> EngineInfo:
        if failures:
            failures.pop()
            raise RuntimeError("a bug")
        return await start(process, timeout_s)

    monkeypatch.setattr(EngineProcess, "start", fail_twice)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: client.healthy and client.num_restarts == 3)
    assert logs.count("engine_restart_failed") == 2
    await client.close()


async def test_a_restarter_that_fails_is_logged_and_the_engine_reported_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs: list[str] = []
    client = LocalEngine(
        EngineConfig("ok", "/nowhere"),
        Supervision(command=FAKE_ENGINE, log=lambda event, **_: logs.append(event)),
    )
    await client.start()
    with monkeypatch.context() as patch:

        async def fail(_: EngineProcess) -> str:
            raise RuntimeError("a bug")

        patch.setattr(EngineProcess, "kill", fail)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: logs[-1] == "engine_gave_up")
    assert not client.healthy
    assert "RuntimeError: a bug" in (client.unhealthy_reason or "")
    await client.close()


async def test_request_during_a_restart_is_told_when_to_retry() -> None:
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
    await client.start()
    stream = client.submit(ask("r", LONG))[0]
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    events = [event async for event in stream]
    assert events[-1].error is not None
    told = events[-1].error.retry_after_s
    assert told is not None
    with pytest.raises(EngineUnavailable) as refused:
        client.submit(ask("too early"))
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= told <= 20
    await until(lambda: client.healthy)
    client.submit(ask("a", LONG))
    await client.close()


async def test_no_request_is_run_a_second_time_after_a_death(client: LocalEngine) -> None:
    """A request that kills the engine whenever it runs kills it once."""
    events = [event async for event in client.submit(ask("poison", prompt=(CRASH,)))[0]]
    assert events[-1].error is not None
    assert events[-1].error.code == "engine_restarting"
    await until(lambda: client.healthy)
    assert [event async for event in client.submit(ask("other", 200))[0]][-1].finish_reason == "length"
    assert client.num_restarts == 1
    assert (await client.stats()).num_running == 0


async def test_a_crash_loop_ends_with_the_reason() -> None:
    client = LocalEngine(
        EngineConfig("ok", "/nowhere"),
        Supervision(command=FAKE_ENGINE, restart=RestartPolicy(first_delay_s=0.01, max_deaths=3)),
    )
    await client.start()
    for _ in range(3):
        await until(lambda: client.healthy)
        events = [event async for event in client.submit(ask("crash", prompt=(CRASH,)))[0]]
        assert events[-1].finish_reason == "error"
    await until(lambda: "stays down" in (client.unhealthy_reason or ""))
    assert client.unhealthy_reason is not None
    assert "the device is on fire" in client.unhealthy_reason
    assert client.num_restarts == 2
    with pytest.raises(EngineUnavailable, match="on fire"):
        client.submit(ask("r"))
    await client.close()


async def test_close_during_a_restart_leaves_no_process() -> None:
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
    await client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await until(lambda: not client.healthy)
    await client.close()
    assert engines() == []


@pytest.mark.slow
async def test_a_stopped_engine_is_not_waited_for_when_closing() -> None:
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
    await client.start()
    stream = client.submit(ask("r", LONG))[0]
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    async with asyncio.timeout(15):
        await client.close()
    events = [event async for event in stream]
    assert events[-1].finish_reason == "error"
    assert engines() == []


async def test_a_process_that_dies_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EXIT", "7")
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
    with pytest.raises(EngineStartError, match="exited with status 7"):
        await client.start()
    await client.close()


async def test_a_command_that_is_not_there() -> None:
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=("/nowhere/python",)))
    with pytest.raises(EngineStartError, match="could not be started"):
        await client.start()
    await client.close()


async def test_a_start_that_takes_too_long_is_ended_and_shows_progress_before() -> None:
    progress: list[str] = []
    for timeout_s in (1, 4, 16, 64):  # a busy machine takes long for a process and its imports
        client = LocalEngine(
            EngineConfig("slow", "/nowhere"),
            Supervision(
                command=FAKE_ENGINE,
                start_timeout_s=timeout_s,
                on_progress=lambda stage, seconds: progress.append(stage),
            ),
        )
        with pytest.raises(EngineStartError, match=f"not ready after {timeout_s} s"):
            await client.start()
        assert engines() == []
        assert "not ready" in (client.unhealthy_reason or "")
        await client.close()
        if progress:
            break
    assert progress[-1] == "something slow"


async def test_a_cancelled_start_leaves_no_process() -> None:
    client = LocalEngine(EngineConfig("slow", "/nowhere"), Supervision(command=FAKE_ENGINE))
    task = asyncio.create_task(client.start())
    await until(lambda: bool(engines()))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert engines() == []
    await client.close()


async def test_a_long_temporary_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_PATH_BYTES)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
    await client.start()
    await client.close()
    assert list(long.iterdir()) == []


async def test_a_request_above_the_frame_limit_is_refused_alone(client: LocalEngine) -> None:
    with pytest.raises(Exception, match="too large"):
        client.submit(ask("huge", prompt=(70_000,) * 8_000_000))
    assert client.num_live == 0
    assert [e async for e in client.submit(ask("r"))[0]][-1].finish_reason == "length"


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the server: the engine process notices the end of its socket, the spare that of its input."""
    script = (
        "import asyncio, sys\n"
        "from loraplex.engine.config import EngineConfig\n"
        "from loraplex.serving.engines.local import LocalEngine\n"
        "from loraplex.serving.supervision.engine_supervisor import Supervision\n"
        f"rules = Supervision(command={FAKE_ENGINE!r}, keep_spare=True)\n"
        "async def main():\n"
        f"    client = LocalEngine(EngineConfig('ok', '/'), rules)\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        family = psutil.Process(parent.pid).children()
        assert engine in family
        assert len(family) == 2
        parent.kill()
        parent.wait()
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_client_works_on_the_servers_event_loop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def life() -> None:
        client = LocalEngine(EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE))
        await client.start()
        stream = client.submit(ask("r", LONG))[0]
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        assert [event async for event in stream][-1].finish_reason == "error"
        await until(lambda: client.healthy)
        drained = client.submit(ask("after", 50))[0]
        await client.close(drain_s=10)
        assert [event async for event in drained][-1].finish_reason == "length"

    uvloop.run(life())
    assert engines() == []


def test_the_back_off_grows_to_its_cap_and_gives_up() -> None:
    policy = RestartPolicy(first_delay_s=1, factor=3, max_delay_s=10, max_deaths=5, window_s=100)
    assert [policy.delay([0.0] * n, 0.0) for n in range(1, 6)] == [1, 3, 9, 10, None]
    assert policy.delay([0.0, 1.0, 2.0, 3.0, 150.0], 150.0) == 1
