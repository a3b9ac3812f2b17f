"""Engine processes that hang, that cannot end, and that stand by to become the next engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.errors import EngineUnavailable
from loraplex.serving.supervision import supervisor
from loraplex.serving.supervision.engine_supervisor import Supervision
from loraplex.serving.supervision.watchdog import WatchdogPolicy
from support.engine.fake_core import CRASH, HANG, SLOW, SPIN
from support.engine.fake_processes import FAKE_ENGINE, LONG, adapter, ask, engines, until

HANG_TIMEOUT_S = 3.0
LATE_S = 5.0
"""A time-out for an engine that does not hang: a busy machine may hold it up for some of it."""


def make_client(**options: Any) -> LocalEngine:
    return LocalEngine(
        EngineConfig("ok", "/nowhere"), Supervision(command=FAKE_ENGINE, start_timeout_s=60, **options)
    )


@pytest.fixture
async def watched() -> AsyncIterator[LocalEngine]:
    client = make_client(watchdog=WatchdogPolicy(hang_timeout_s=120))
    await client.start()
    yield client
    await client.close()
    assert engines() == []


@pytest.fixture
async def spared() -> AsyncIterator[LocalEngine]:
    client = make_client(keep_spare=True)
    await client.start()
    yield client
    await client.close()
    assert engines() == []


def watch_closely(client: LocalEngine) -> None:
    """This engine from now on, and not its successor: a busy machine may hold up one that does not hang."""
    assert client._supervisor._process is not None
    client._supervisor._process._watchdog._policy = WatchdogPolicy(hang_timeout_s=HANG_TIMEOUT_S)


def pids() -> set[int]:
    return {process.pid for process in engines()}


def kill(client: LocalEngine, number: signal.Signals) -> None:
    assert client.pid is not None
    os.kill(client.pid, number)


async def serves(client: LocalEngine) -> bool:
    return [event async for event in client.submit(ask("one"))[0]][-1].finish_reason == "length"


def stop_process(client: LocalEngine) -> None:
    kill(client, signal.SIGSTOP)


def spin_main_thread(client: LocalEngine) -> None:
    kill(client, signal.SIGUSR1)


def hang_step(client: LocalEngine) -> None:
    client.submit(ask("hang", prompt=(HANG,)))


def spin_step(client: LocalEngine) -> None:
    client.submit(ask("spin", prompt=(SPIN,)))


@pytest.mark.parametrize(
    "hang", [stop_process, spin_main_thread, hang_step, pytest.param(spin_step, marks=pytest.mark.soak)]
)
async def test_a_hung_engine_is_noticed_killed_and_replaced(
    watched: LocalEngine, hang: Callable[[LocalEngine], None]
) -> None:
    """Stopped as a whole, deaf, or stuck in a step while its main thread still answers."""
    stream = watched.submit(ask("r", LONG, number=1))[0]
    await anext(stream)
    await until(lambda: watched.adapter_state(adapter(1).digest) == "hot")
    hung = pids()
    watch_closely(watched)
    hang(watched)
    started = time.monotonic()
    events = [event async for event in stream]
    # How soon is tested in test_watchdog.py, by a clock of its own: here a busy machine adds to it.
    assert time.monotonic() - started <= HANG_TIMEOUT_S + 20
    assert [e.error.code for e in events if e.error] == ["engine_restarting"]
    assert watched.num_live == 0
    with pytest.raises(EngineUnavailable) as refused:
        watched.submit(ask("too early"))
    assert refused.value.code == "engine_restarting"
    assert refused.value.retry_after_s is not None
    await until(lambda: watched.healthy)
    assert watched.num_restarts == 1
    assert len(pids()) == 1
    assert not pids() & hung
    await until(lambda: watched.adapter_state(adapter(1).digest) == "hot")
    assert (await watched.stats()).num_running == 0, "nothing was run a second time"
    assert await serves(watched)


@pytest.mark.slow
async def test_a_step_larger_than_any_before_may_take_long() -> None:
    """Longer than a hang takes to be noticed; and so may the next of its size."""
    client = make_client(watchdog=WatchdogPolicy(hang_timeout_s=LATE_S))
    await client.start()
    before = pids()
    for name in ("first", "second"):
        slow = ask(name, 1, prompt=(SLOW, int(10 * LATE_S), *range(50)))
        assert [event async for event in client.submit(slow)[0]][-1].finish_reason == "length"
    assert client.num_restarts == 0
    assert pids() == before
    await client.close()
    assert engines() == []


async def test_an_engine_that_fails_and_cannot_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said why it ends, and then waits without end for a thread of its own."""
    logged: list[dict[str, object]] = []
    monkeypatch.setenv("FAKE_CLOSE", "hang")
    client = make_client(log=lambda event, **fields: logged.append({"event": event, **fields}))
    await client.start()
    stuck = pids()
    other = client.submit(ask("other", LONG))[0]
    await anext(other)
    async with asyncio.timeout(60):
        for stream in (client.submit(ask("crash", prompt=(CRASH,)))[0], other):
            assert [event async for event in stream][-1].finish_reason == "error"
    await until(lambda: client.healthy)
    assert not pids() & stuck
    assert "on fire" in next(str(entry["cause"]) for entry in logged if entry["event"] == "engine_restart")
    assert await serves(client)
    await client.close()
    assert engines() == []


async def test_a_spare_becomes_the_next_engine_and_has_a_successor(spared: LocalEngine) -> None:
    for life in range(1, 4):
        (spare,) = pids() - {spared.pid}
        kill(spared, signal.SIGKILL)
        await until(lambda life=life: spared.healthy and spared.num_restarts == life)  # type: ignore[misc]
        assert spared.pid == spare
        assert await serves(spared)
        assert len(pids()) == 2


async def test_a_spare_that_dies_costs_nothing(spared: LocalEngine) -> None:
    (spare,) = pids() - {spared.pid}
    os.kill(spare, signal.SIGKILL)
    await until(lambda: len(engines()) == 1)
    assert await serves(spared)
    kill(spared, signal.SIGKILL)
    await until(lambda: spared.healthy and spared.num_restarts == 1)
    assert await serves(spared)


@pytest.mark.parametrize("fault", ["exit", "stop"])
async def test_a_spare_that_does_not_come_is_given_up_for_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("FAKE_SPARE", fault)
    monkeypatch.setattr(supervisor, "SPARE_CONNECT_TIMEOUT_S", 1.0)
    stages: list[str] = []
    client = make_client(keep_spare=True, on_progress=lambda stage, _: stages.append(stage))
    await client.start()
    before = pids()
    kill(client, signal.SIGKILL)
    await until(lambda: client.healthy and client.num_restarts == 1)
    assert client.pid not in before
    assert len(pids() & before) == 0
    assert "the spare never connected: a new process" in stages
    assert await serves(client)
    await client.close()
    assert engines() == []
