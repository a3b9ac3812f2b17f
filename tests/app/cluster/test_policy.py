"""How many engines there should be: enough, soon, and no oftener changed than the delays allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.app.cluster.policy import (
    ADAPTERS,
    EMPTY,
    FULL,
    KV,
    PRESSURES,
    QUEUE,
    STARTING_S,
    ScaleBounds,
    Scaling,
    engine_pressure,
    wanted_replicas,
)
from loraplex.engine.reports import EngineStats

BOUNDS = ScaleBounds(minimum=1, maximum=8, up_delay_s=10.0, down_delay_s=300.0)
Loads = Sequence[dict[str, float]]


def even(load: float, engines: int, name: str = QUEUE) -> Loads:
    """What `engines` engines report that have `load` engines' full load among them."""
    return [dict.fromkeys(PRESSURES, 0.0) | {name: load / engines} for _ in range(engines)]


@dataclass
class Run:
    """Decisions once a second, from a number of engines that all serve."""

    bounds: ScaleBounds = BOUNDS
    state: Scaling = field(default_factory=lambda: Scaling(2))
    now: float = 1000.0
    counts: list[int] = field(default_factory=list)

    def go(self, seconds: int, load: float, serving: int | None = None, name: str = QUEUE) -> int:
        for _ in range(seconds):
            engines = self.state.number if serving is None else serving
            self.state = wanted_replicas(even(load, engines, name), self.bounds, self.state, self.now)
            self.counts.append(self.state.number)
            self.now += 1
        return self.state.number


@pytest.mark.parametrize("name", PRESSURES)
def test_more_engines_come_when_those_there_are_have_been_too_full_for_the_delay(name: str) -> None:
    run = Run()
    assert run.go(10, 1.7, name=name) == 2
    assert run.go(1, 1.7, name=name) == 3
    assert run.go(600, 1.7, name=name) == 3


@pytest.mark.parametrize("name", PRESSURES)
def test_an_engine_goes_when_one_fewer_has_been_enough_for_the_delay(name: str) -> None:
    run = Run(state=Scaling(4))
    assert run.go(300, 1.4, name=name) == 4
    assert run.go(1, 1.4, name=name) == 3
    assert run.go(600, 1.4, name=name) == 3


def test_a_pause_in_the_need_begins_the_delay_afresh() -> None:
    run = Run()
    assert run.go(9, 1.7) == 2
    run.go(1, 1.5)
    assert run.go(10, 1.7) == 2
    assert run.go(1, 1.7) == 3


def test_the_count_becomes_what_was_enough_all_the_time() -> None:
    up = Run()
    up.go(5, 1.7)
    assert up.go(6, 3.1) == 3
    down = Run(state=Scaling(6))
    down.go(150, 1.9)
    assert down.go(151, 0.2) == 4


def test_the_count_doubles_at_most_and_waits_for_engines_that_start() -> None:
    run = Run()
    assert run.go(11, 30.0) == 4
    assert run.go(int(STARTING_S) - 1, 30.0, serving=2) == 4
    assert run.go(11, 30.0, serving=2) == 8
    started = Run()
    started.go(11, 30.0)
    assert started.go(11, 30.0, serving=4) == 8


def test_no_engine_is_given_up_while_one_is_silent() -> None:
    run = Run(state=Scaling(3))
    assert run.go(1000, 0.1, serving=2) == 3
    assert run.go(300, 0.1) == 3
    assert run.go(1, 0.1) == 1


def test_nothing_changes_while_no_engine_reports() -> None:
    run = Run(state=Scaling(3))
    assert run.go(1000, 0.0, serving=0) == 3


def test_new_bounds_are_obeyed_at_once() -> None:
    run = Run(bounds=replace(BOUNDS, minimum=4))
    assert run.go(1, 0.0) == 4
    run.bounds = replace(BOUNDS, maximum=3)
    assert run.go(1, 30.0) == 3


def test_a_clock_that_is_set_back_delays_a_decision_by_no_more_than_its_delay() -> None:
    run = Run(state=Scaling(4, rose_at=900.0))
    run.go(100, 1.4)
    run.now = 0.0
    assert run.go(301, 1.4) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -5.0])
def test_a_pressure_that_is_no_number_counts_as_none(value: float) -> None:
    stats = [dict.fromkeys(PRESSURES, value) for _ in range(2)]
    eager = replace(BOUNDS, up_delay_s=0.0)
    assert wanted_replicas(stats, eager, Scaling(2), 0.0).number == 2


@pytest.mark.parametrize(
    "wrong", [{"minimum": 0}, {"minimum": 9}, {"up_delay_s": -1.0}, {"down_delay_s": math.inf}]
)
def test_bounds_that_do_not_fit_together_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least|delays"):
        ScaleBounds(**({"minimum": 1, "maximum": 8, "up_delay_s": 1.0, "down_delay_s": 1.0} | wrong))  # type: ignore[arg-type]


loads = st.lists(st.tuples(st.integers(1, 400), st.floats(0, 12), st.integers(0, 3)), min_size=1, max_size=12)
delays = st.tuples(st.sampled_from([0.0, 5.0, 10.0, 60.0]), st.sampled_from([0.0, 30.0, 300.0]))


@given(loads, delays, st.integers(1, 4), st.integers(0, 6))
def test_decisions_stay_in_bounds_and_never_follow_each_other_sooner_than_the_delays(
    pieces: list[tuple[int, float, int]], pair: tuple[float, float], least: int, more: int
) -> None:
    bounds = ScaleBounds(least, least + more, *pair)
    run = Run(bounds=bounds, state=Scaling(least))
    for seconds, load, dead in pieces:
        run.go(seconds, load, serving=max(0, run.state.number - dead))
    assert all(least <= count <= bounds.maximum for count in run.counts)
    changed = 0  # the second of the change before
    for second, (one, other) in enumerate(itertools.pairwise(run.counts), 1):
        if one == other:
            continue
        assert other <= 2 * one
        assert second - changed >= (bounds.up_delay_s if other > one else bounds.down_delay_s)
        changed = second


@given(st.floats(0, 10), st.integers(1, 8), st.sampled_from(PRESSURES))
def test_a_steady_load_moves_the_count_in_one_direction_and_then_never_again(
    load: float, start: int, name: str
) -> None:
    run = Run(state=Scaling(start), bounds=replace(BOUNDS, up_delay_s=0.0, down_delay_s=3.0))
    run.go(60, load, name=name)
    steps = [other - one for one, other in itertools.pairwise([start, *run.counts]) if one != other]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)
    settled = run.state.number
    assert run.counts[30:] == [settled] * 30
    assert load / settled <= FULL + 1e-6 or settled == BOUNDS.maximum
    assert settled == 1 or load / (settled - 1) > EMPTY - 1e-6


@given(st.floats(0, 10), st.floats(0.8, 1.25), st.integers(1, 8))
def test_a_load_that_swings_by_a_quarter_does_not_flap(load: float, swing: float, start: int) -> None:
    run = Run(state=Scaling(start), bounds=replace(BOUNDS, up_delay_s=0.0, down_delay_s=0.0))
    for _ in range(100):
        run.go(1, load)
        run.go(1, load * swing)
    assert len(set(run.counts[-100:])) == 1


@given(st.permutations([0.1, 0.9, 0.4, 1.7]))
def test_the_order_of_the_engines_does_not_matter(pressures: list[float]) -> None:
    eager = replace(BOUNDS, up_delay_s=0.0)
    stats = [dict.fromkeys(PRESSURES, 0.0) | {KV: each} for each in pressures]
    assert wanted_replicas(stats, eager, Scaling(4), 0.0).number == 4


# What an engine says of itself.


def test_pressures_are_what_is_wanted_over_what_is_there() -> None:
    stats = EngineStats(
        num_running=8,
        num_waiting=4,
        num_kv_blocks=100,
        num_kv_blocks_used=40,
        num_adapter_slots=16,
        num_adapter_slots_used=10,
        num_arena_pages=200,
        num_arena_pages_used=100,
        running_adapters=("a", "b", "c"),
        waiting_adapters=("c", "d"),
    )
    found = engine_pressure(stats, places=16)
    assert found == {QUEUE: 12 / 16, KV: pytest.approx(0.4 * 12 / 8), ADAPTERS: pytest.approx(4 / 16)}
    # Larger adapters fill the pages before the slots; pins are wanted whether or not a sequence runs.
    large = replace(stats, num_arena_pages=50)
    assert engine_pressure(large, 16)[ADAPTERS] == pytest.approx(4 * 10 / 50)
    assert engine_pressure(replace(stats, num_pins=20), 16)[ADAPTERS] == pytest.approx(20 / 16)


def test_an_engine_at_rest_has_no_pressure() -> None:
    assert engine_pressure(EngineStats(), places=0) == dict.fromkeys(PRESSURES, 0.0)
    assert engine_pressure(EngineStats(num_waiting=3), places=4)[QUEUE] == 0.75


# A cluster in virtual time: engines of 16 places, requests of 2 s on average, 30 s until a new engine serves.

PLACES, SERVICE_S, START_S = 16, 2.0, 30


@dataclass
class Outcome:
    counts: list[int]
    worst_queue_s: float

    @property
    def changes(self) -> int:
        return sum(one != other for one, other in itertools.pairwise(self.counts))


def simulate(arrivals: Callable[[int], float], seconds: int, bounds: ScaleBounds = BOUNDS) -> Outcome:
    """A fluid queue at `arrivals(second)` requests a second, decided once a second over the mean of five."""
    state, queue = Scaling(bounds.minimum), 0.0
    starting: list[int] = []  # the second in which each begins to serve
    serving, counts, worst = bounds.minimum, [], 0.0
    recent: list[float] = []
    for now in range(seconds):
        serving += sum(at == now for at in starting)
        starting = [at for at in starting if at > now]
        queue += arrivals(now)
        rate = serving * PLACES / SERVICE_S
        # By Little's law: what arrived stays for its service at least.
        alive = arrivals(now) * SERVICE_S + max(0.0, queue - rate)
        queue = max(0.0, queue - rate)
        recent = [*recent[-4:], alive / PLACES]
        worst = max(worst, queue / rate)
        state = wanted_replicas(even(sum(recent) / len(recent), serving), bounds, state, float(now))
        starting += [now + START_S] * (state.number - serving - len(starting))
        serving = min(serving, state.number)
        counts.append(state.number)
    return Outcome(counts, worst)


def test_a_day_is_followed_up_and_down_with_few_changes_and_no_queue() -> None:
    def day(second: int) -> float:
        return 20.0 - 15.0 * math.cos(2 * math.pi * second / 7200)

    run = simulate(day, 14_400)
    assert run.worst_queue_s == 0
    assert max(run.counts) - min(run.counts[3600:]) >= 4
    assert run.changes <= 30
    assert sum(run.counts) / len(run.counts) < 0.8 * BOUNDS.maximum


def test_a_crowd_gets_its_engines_within_two_starts() -> None:
    def crowd(second: int) -> float:
        return 40.0 if 600 <= second < 1200 else 5.0

    run = simulate(crowd, 3000)
    assert run.counts[599] == 1
    assert run.counts[600 + 2 * START_S + 3 * 11] >= 7
    assert run.counts[-1] == 2
    assert _turns(run.counts) == (1, 1)


def test_bursts_shorter_than_the_delay_do_not_shake_the_cluster() -> None:
    def bursts(second: int) -> float:
        return 30.0 if second % 120 < 40 else 2.0

    run = simulate(bursts, 7200)
    assert _turns(run.counts) == (1, 0)


def _turns(counts: list[int]) -> tuple[int, int]:
    """How often a rise begins, and a fall, counting steps of one direction in a row once."""
    directions = list(_directions(counts))
    begun = [way for before, way in itertools.pairwise([0, *directions]) if way != before]
    return begun.count(1), begun.count(-1)


def _directions(counts: list[int]) -> Iterator[int]:
    for one, other in itertools.pairwise(counts):
        if one != other:
            yield 1 if other > one else -1
