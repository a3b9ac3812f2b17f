"""The supervised group: what fails is told and started again, what is cancelled ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from loraplex.control.background import FIRST_PAUSE_S, LONGEST_PAUSE_S, WELL_S, BackgroundTasks, TaskState
from loraplex.control.errors import DatabaseBusy
from support.control.plane import FakeClock


class Bench:
    """A group whose pauses are noted, and not waited for. `chance` 1: pauses of full length."""

    def __init__(self, chance: float = 1.0) -> None:
        self.clock = FakeClock()
        self.pauses: list[float] = []
        self.tasks = BackgroundTasks(clock=self.clock, sleep=self._sleep, chance=lambda: chance)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def state(self, name: str = "it") -> TaskState:
        return next(state for state in self.tasks.states if state.name == name)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.tasks.close()


class Failing:
    """Fails `failures` times, each time after `seconds`, then runs without end."""

    def __init__(self, bench: Bench, failures: list[Exception | None], seconds: float = 0.0) -> None:
        self._bench, self._failures, self._seconds = bench, failures, seconds
        self.runs_well = asyncio.Event()

    async def __call__(self) -> None:
        if self._failures:
            self._bench.clock.advance(self._seconds)
            failure = self._failures.pop(0)
            if failure is not None:
                raise failure
            return
        self.runs_well.set()
        await asyncio.Event().wait()


async def started(bench: Bench, failing: Failing) -> list[dict[str, object]]:
    """The log up to where it runs well."""
    with structlog.testing.capture_logs() as logs:
        bench.tasks.start("it", failing)
        await failing.runs_well.wait()
    return [dict(entry) for entry in logs]


async def test_a_failure_is_told_and_the_task_is_started_again(bench: Bench) -> None:
    logs = await started(bench, Failing(bench, [RuntimeError("a bug"), DatabaseBusy()]))
    assert [(entry["event"], entry["task"], entry["log_level"]) for entry in logs] == [
        ("background_task_failed", "it", "error")
    ] * 2
    assert (logs[0]["reason"], type(logs[0]["exc_info"])) == ("a bug", RuntimeError)
    assert logs[1]["exc_info"] is None  # a sentence of ours says enough
    assert bench.state() == TaskState("it", up=True, restarts=2)


async def test_to_return_is_a_failure(bench: Bench) -> None:
    (entry,) = await started(bench, Failing(bench, [None]))
    assert (entry["reason"], entry["exc_info"]) == ("it ended by itself", None)
    assert bench.state().restarts == 1


async def test_pauses_grow_to_an_end_and_begin_again_after_it_ran_well(bench: Bench) -> None:
    await started(bench, Failing(bench, [ValueError()] * 12))
    assert bench.pauses == [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(12)]
    other = Bench()
    await started(other, Failing(other, [ValueError()] * 3, seconds=WELL_S))
    assert other.pauses == [FIRST_PAUSE_S] * 3
    await other.tasks.close()


async def test_pauses_of_servers_differ() -> None:
    for chance in (0.0, 0.5):
        bench = Bench(chance)
        await started(bench, Failing(bench, [ValueError()]))
        assert bench.pauses == [FIRST_PAUSE_S * (0.5 + chance / 2)]
        await bench.tasks.close()


async def test_something_else_that_was_cancelled_is_a_failure(bench: Bench) -> None:
    runs = 0
    well = asyncio.Event()

    async def wait_for_a_cancelled_one() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        well.set()
        await asyncio.Event().wait()

    bench.tasks.start("it", wait_for_a_cancelled_one)
    await well.wait()
    assert bench.state().restarts == 1


async def test_task_counts_as_down_while_it_pauses() -> None:
    paused = asyncio.Event()

    async def sleep(_: float) -> None:
        paused.set()
        await asyncio.Event().wait()

    tasks = BackgroundTasks(sleep=sleep)

    async def fail() -> None:
        raise ValueError

    tasks.start("it", fail)
    await paused.wait()
    assert tasks.states == (TaskState("it", up=False, restarts=0),)
    await tasks.close()  # also in the middle of a pause


async def test_the_end_waits_for_what_each_has_to_finish(bench: Bench) -> None:
    ended: list[str] = []

    async def run(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)
            if name == "bad":
                raise RuntimeError("on its way out")

    for name in ("a", "bad", "c"):
        bench.tasks.start(name, lambda name=name: run(name))
    await asyncio.sleep(0)
    with structlog.testing.capture_logs() as logs:
        await bench.tasks.close()
    assert sorted(ended) == ["a", "bad", "c"]
    assert [(entry["task"], entry["restart_s"]) for entry in logs] == [("bad", None)]
    assert not any(state.up for state in bench.tasks.states)


async def test_one_may_be_ended_by_itself_and_begun_again(bench: Bench) -> None:
    first = bench.tasks.start("it", asyncio.Event().wait)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="runs already"):
        bench.tasks.start("it", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    bench.tasks.start("it", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert bench.state().up
