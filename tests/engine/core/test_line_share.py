"""Lines of batches beside other requests, where it is known what steps take: they lengthen these requests' steps by a
bounded part, never stop for good, and have whole steps, of bounded time, when nobody else is here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import pytest

from loraplex.engine.scheduling.batch_lines import QUIET_S
from loraplex.engine.scheduling.line_share import (
    LINES_ALONE,
    LONGER,
    MOST_SAVED,
    REST_S,
    SAME_TILE,
    SHARE,
    STEP_SHARE,
)
from loraplex.engine.scheduling.timing.step_bound import LINES_S, StepBound
from loraplex.engine.scheduling.timing.step_costs import MOST_ROWS, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepLoad, StepTimes
from loraplex.engine.types import StepPlan
from tests.engine.core.test_background import Watched

PER_TILE = 0.12


def tiles_of(size: int) -> StepCosts:
    """A step grows by `PER_TILE` with each tile of that many rows."""
    return StepCosts(tuple(1 + PER_TILE * (rows // size) for rows in range(MOST_ROWS)))


def measured(tile: int = 4, pair: float = 1e-6) -> MeasuredTimes:
    """Of the small model on a CPU, about."""
    rows = {1: 0.010, 16: 0.017, 64: 0.050, 256: 0.170}
    return MeasuredTimes(rows, pair=pair, sample=1e-4, score=1e-4, costs=tiles_of(tile))


class Timed(Watched):
    """A core whose steps take what is predicted. `parts`: by which lines lengthened each step of other requests, and
    whether one of these had a prompt in it."""

    def __init__(self, times: MeasuredTimes) -> None:
        self.times = StepTimes(times)
        super().__init__(
            bound=StepBound(self.times, None),
            num_blocks=400,
            max_num_seqs=48,
            max_num_batched_tokens=512,
            max_model_len=2048,
        )
        self.names = count()
        self.parts: list[tuple[float, bool, StepLoad]] = []

    def send(self, prompt: int, most: int, *, line: bool, tenant: str = "acme") -> str:
        name = f"{'line' if line else 'real'}-{next(self.names)}"
        ids = (len(name), next(self.names), *range(prompt - 2))
        self.add(
            name,
            prompt_ids=ids[:prompt],
            max_tokens=most,
            tenant_id=tenant,
            ignore_eos=True,
            background=line,
            batch=line,
        )
        return name

    def go(self) -> StepPlan | None:
        """A step, and the time that it takes; where there is none, the time until something can be done."""
        before = len(self.plans)
        self.step()
        if len(self.plans) == before:
            self.now += self.core.idle_s() or 0.001
            return None
        plan = self.plans[-1]
        self.now += self.times.seconds(StepLoad.of(plan.scheduled))
        others = [part for part in plan.scheduled if not part.request.batch]
        if others:
            load = StepLoad.of(others)
            part = self.times.lengthened(load, StepLoad.of(plan.scheduled))
            prompts = any(each.start < len(each.request.prompt_ids) for each in others)
            self.parts.append((part, prompts, load))
        return plan

    def has_ended(self, name: str) -> bool:
        return any(event.request_id == name and event.finish_reason is not None for event in self.events)

    def most_part(self, load: StepLoad) -> float:
        """What lines may add to a step of this load."""
        cost = self.times.measured.costs.cost
        return max(STEP_SHARE, SAME_TILE * cost(load.rows + 1) / cost(load.rows) - 1)


def streams(engine: Timed, number: int, rng: random.Random) -> Iterator[None]:
    """That many answers at a time, a new one for each that has ended."""
    live: list[str] = []
    while True:
        live = [name for name in live if not engine.has_ended(name)]
        while len(live) < number:
            live.append(engine.send(rng.choice((2, 20, 60)), rng.choice((4, 16, 60)), line=False))
        yield


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 100))]
)
def test_lines_lengthen_the_steps_of_others_by_a_bounded_part(seed: int) -> None:
    rng = random.Random(seed)
    tile, pair = rng.choice((1, 4, 8)), rng.choice((0.0, 1e-7, 1e-6))
    engine = Timed(measured(tile, pair))
    others = streams(engine, rng.randint(1, 12), rng)
    lines = [engine.send(rng.choice((4, 60, 300)), rng.choice((1, 30)), line=True) for _ in range(40)]
    for _ in range(150):
        next(others)
        engine.go()
    added = [part for part, _, _ in engine.parts]
    assert sum(added) <= SHARE * len(added) + MOST_SAVED + max(added)
    row = 400 * pair / engine.times.one_row  # the first line's, however long its context
    assert sum(part > SHARE for part in added) <= len(added) / 4 + MOST_SAVED / LONGER + 1
    assert all(part <= engine.most_part(load) + row + 1e-9 for part, _, load in engine.parts)
    assert sum(added) > 0 or any(engine.has_ended(name) for name in lines)


def test_a_begun_tile_is_filled() -> None:
    engine = Timed(measured(tile=4))
    for _ in range(3):
        engine.send(2, 400, line=False)
    engine.go()
    for _ in range(20):
        engine.send(2, 300, line=True)
    engine.go()  # prompts of two positions
    engine.parts.clear()
    for _ in range(50):
        plan = engine.go()
        assert plan is not None
        assert sum(part.num_tokens for part in plan.scheduled) == 4
    engine.send(2, 400, line=False)
    for _ in range(2):
        engine.go()
    plans = [engine.go() for _ in range(100)]
    rows = [sum(part.num_tokens for part in plan.scheduled) for plan in plans if plan is not None]
    assert set(rows) == {4, 8}
    assert rows.count(8) == pytest.approx(100 * SHARE / LONGER, abs=3)


@pytest.mark.parametrize("tile", [4, MOST_ROWS])
def test_a_step_with_a_prompt_has_none_where_others_have(tile: int) -> None:
    """Also where the rows of lines are free in all others."""
    engine = Timed(measured(tile, pair=0.0))
    for _ in range(4):
        engine.send(4, 400, line=False)
    for _ in range(20):
        engine.send(20, 40, line=True)
    for number in range(160):
        if number % 8 == 7:
            engine.send(20, 1, line=False)
        engine.go()
    assert sum(prompts for _, prompts, _ in engine.parts) > 20
    assert not any(part for part, prompts, _ in engine.parts if prompts)
    if tile == 4:
        assert sum(part > 0 for part, _, _ in engine.parts) == pytest.approx(160 * SHARE / LONGER, rel=0.15)


def test_lines_behind_long_contexts_are_fewer_and_shorter() -> None:
    """On a device whose rows take nothing, but what they attend to does."""
    engine = Timed(measured(tile=MOST_ROWS))
    for _ in range(20):
        engine.send(1900, 100, line=True)
    engine.now += QUIET_S
    for _ in range(100):
        engine.go()
    for _ in range(4):
        engine.send(4, 500, line=False)
    for _ in range(100):
        engine.go()
    rows = [sum(row.request.batch for row in plan.scheduled) for plan in engine.plans[-60:]]
    assert 0 < max(rows) < 4
    assert max(part for part, _, _ in engine.parts) < 3 * STEP_SHARE


def test_lines_go_on_beside_prompts_in_every_step() -> None:
    engine = Timed(measured())
    line = engine.send(20, 2, line=True)
    engine.send(4, 400, line=False)
    for _ in range(200):
        engine.send(4, 1, line=False, tenant="other")
        engine.go()
    assert all(prompts for _, prompts, _ in engine.parts)
    assert engine.has_ended(line)


def test_a_client_that_answers_at_once_meets_no_step_of_lines() -> None:
    engine = Timed(measured())
    for _ in range(20):
        engine.send(30, 30, line=True)
    for _ in range(6):
        name = engine.send(20, 4, line=False)
        while not engine.has_ended(name):
            engine.go()
        end = engine.now + 0.9 * REST_S
        while engine.now < end:
            plan = engine.go()
            assert plan is None or any(not part.request.batch for part in plan.scheduled)
            engine.now = min(engine.now, end)
    plans = len(engine.plans)
    engine.now += REST_S
    engine.go()
    (plan,) = engine.plans[plans:]
    assert sum(part.num_tokens for part in plan.scheduled) == LINES_ALONE


def test_a_step_of_lines_alone_takes_a_bounded_time() -> None:
    engine = Timed(measured())
    for _ in range(30):
        engine.send(400, 60, line=True)
    engine.now += QUIET_S
    longest = 0.0
    for _ in range(60):
        plan = engine.go()
        assert plan is not None
        rows = StepLoad.of(part for part in plan.scheduled if part.samples and part.num_tokens == 1)
        took = engine.times.seconds(StepLoad.of(plan.scheduled))
        longest = max(longest, took - engine.times.seconds(rows))
    assert 0.8 * LINES_S <= longest <= LINES_S + 0.011


@pytest.mark.parametrize("prompt", [48, 400])
def test_lines_alone_take_the_time_of_other_requests(prompt: int) -> None:
    took = []
    for line in (False, True):
        engine = Timed(measured())
        engine.now += QUIET_S
        begun = engine.now
        for number in range(96):
            engine.send(prompt, 20 + number % 17, line=line, tenant="abc"[number % 3] if line else "acme")
        while engine.core.has_work:
            engine.go()
        took.append(engine.now - begun)
    assert took[0] / took[1] >= 0.95
