"""The bound of docs/fairness.md, "Time of a step", on random mixes and a device whose steps take what is predicted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from math import ceil

import pytest

from loraplex.engine.config import SchedulerConfig
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.timing.step_bound import (
    LEAD,
    LEAST_CHUNK,
    MOST_SHARING,
    OTHERS_SHARE,
    PROMPTS_SHARE,
    RECENT_S,
    ROWS_SHARE,
    StepBound,
)
from loraplex.engine.scheduling.timing.step_costs import StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepLoad, StepTimes
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence, StepPlan
from support.engine.fake_transport import FakeTransport, make_cache

MIXES, SOAK_MIXES = 16, 3000
ONE_ROW, PER_ROW = 0.01, 0.001
TENANTS = MOST_SHARING
"""Of more, some are behind the first one without a share."""
ROUNDING = 1e-9


@dataclass
class Live:
    """A request in the engine, and what is left of it."""

    seq: Sequence
    answer: int  # output tokens
    patience: float  # when its client hangs up
    forced: int = 0  # tokens that a grammar dictates behind each sampled one
    in_order: bool = False  # its prompt can't get its tenant too far ahead of the first one in order
    waited: int = 0  # steps that it waited for its first token
    others: int = 0  # the most other tenants that were here meanwhile
    halved: bool = False  # forced tokens were computed meanwhile


@dataclass
class Mix:
    """Tenants of random weights with requests of all kinds, from a seed."""

    seed: int
    now: float = 0.0
    live: dict[int, Live] = field(default_factory=dict)
    checked: int = 0  # first tokens whose bound was checked
    tight: float = 0.0  # the most of its bound that one waited
    fullest: float = 0.0  # the most of its bound that a step took
    gone: dict[str, float] = field(default_factory=dict)  # when a tenant's last request ended

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        pair = self.rng.choice([0.0, 1e-7, 1e-6]) * self.rng.random()
        rows = {1: ONE_ROW, 64: ONE_ROW + 63 * PER_ROW, 512: ONE_ROW + 511 * PER_ROW}
        measured = MeasuredTimes(rows, pair, 2e-4, 1e-3, StepCosts.from_seconds({1: ONE_ROW, 64: 0.07}))
        self.times = StepTimes(measured)
        self.max_s = self.rng.choice([None, 0.05, 0.1, 0.3])
        self.bound = StepBound(self.times, self.max_s)
        self.tokens = self.rng.choice([256, 512])
        self.scheduler = self.new_scheduler()
        self.extra = self.rng.choice(["long", "forced"])
        self.tenants = [f"t{number}" for number in range(self.rng.randint(1, TENANTS - 1))]
        self.weights = {
            tenant: self.rng.choice([1.0, 1.0, 1.0, 0.5, 2.0, 4.0]) for tenant in [*self.tenants, "light"]
        }
        for tenant, weight in self.weights.items():
            self.scheduler.queue.set_weight(tenant, weight)

    def new_scheduler(self) -> Scheduler:
        cache = make_cache(FakeTransport(lambda: self.now, num_pages=1), num_slots=1)
        config = SchedulerConfig(
            num_blocks=20_000,
            max_model_len=9000,
            max_num_seqs=128,
            max_num_batched_tokens=self.tokens,
            max_waiting=1000,
        )
        return Scheduler(config, cache, bound=self.bound)

    def play(self, steps: int) -> None:
        for step in range(steps):
            self._arrive(step)
            for one in [one for one in self.live.values() if one.patience <= self.now]:
                self._end(one)
            self._step()

    def _arrive(self, number: int) -> None:
        rng = self.rng
        tenant = rng.choice(self.tenants)
        kind = rng.choice(["long", "long", "long", "stream", "scored", "hang-up", self.extra])
        if number % 3 == 0 and not any(one.seq.request.tenant_id == "light" for one in self.live.values()):
            tenant, kind = "light", "chat"
        elif rng.random() > 0.2 or len(self.live) > 40:
            return
        prompt = {
            "long": rng.randint(100, 8000),
            "chat": rng.randint(2, 400),
            "stream": 16,
            "scored": rng.randint(100, 2000),
            "hang-up": rng.randint(500, 8000),
            "forced": 16,
        }[kind]
        answer = rng.randint(20, 200) if kind in ("stream", "forced") else rng.randint(1, 4)
        scores = 0 if kind == "scored" else None
        asked = SamplingParams(max_tokens=10**6, prompt_logprobs=scores)
        ids = (number + 1, *(0,) * (prompt - 1))  # no two begin alike
        seq = Sequence(EngineRequest(f"r{number}", tenant, ids, asked), self.now, number, list(ids))
        self.scheduler.add_sequence(seq)
        one = Live(seq, answer, self.now + (rng.uniform(0.05, 2.0) if kind == "hang-up" else 10**6))
        one.forced = 31 if kind == "forced" else 0
        self.live[number] = one
        counter = self.scheduler.queue.counter
        least = min(counter(one.seq.request.tenant_id) for one in self.live.values())
        one.in_order = kind == "chat" and counter(tenant) + prompt / self.weights[tenant] <= least + LEAD

    def _promised(self, one: Live) -> int | None:
        """The most steps until the first token of a chat, by docs/fairness.md; None where it promises none."""
        prompt = one.seq.num_prompt
        share = (0.5 if one.halved else 1.0) * min(1 - OTHERS_SHARE, OTHERS_SHARE / max(1, one.others))
        alone = StepLoad(1, 1.0)
        seconds = self.times.seconds(alone) + share * PROMPTS_SHARE * self.bound.max_s
        per_step = self.times.most(alone, prompt, prompt, seconds)
        per_step = min(per_step, int(share * (self.tokens - len(self.live))))
        return ceil(prompt / per_step) + 2 if per_step >= min(prompt, LEAST_CHUNK) else None

    def _step(self) -> None:
        here = {one.seq.request.tenant_id for one in self.live.values()}
        here |= {tenant for tenant, at in self.gone.items() if at >= self.now - RECENT_S}
        running = set(self.scheduler.running)
        plan = self.scheduler.plan(self.now)
        if not plan.scheduled:
            self.now += 0.01
            return
        took = self.times.seconds(StepLoad.of(plan.scheduled))
        if len(here) > 1:
            most = self._most(plan, running)
            self.fullest = max(self.fullest, took / most)
            assert took <= most + ROUNDING, f"seed {self.seed}, step {plan.step_id}: {took} s, over {most}"
            decoding = StepLoad.of(
                replace(row, num_tokens=1) for row in plan.scheduled if self.live[row.order].seq.num_outputs
            )
            assert self.times.seconds(decoding) <= self._most_of_rows(plan) + ROUNDING
        self.now += took
        self.scheduler.took(plan, took)
        forces = any(row.num_tokens > 1 and self.live[row.order].forced for row in plan.scheduled)
        for one in self.live.values():
            if one.in_order and not one.seq.num_outputs:
                one.waited += 1
                one.others = max(one.others, len(here) - 1)
                one.halved |= forces
        for row in plan.scheduled:
            one = self.live[row.order]
            self.scheduler.computed(one.seq, row)
            if row.samples:
                self._drew(one)

    def _most(self, plan: StepPlan, running: set[Sequence]) -> float:
        """The most that a step may take, with a chunk of each prompt that starts in it, and of one of those that were
        `running` before."""
        decoding, started, largest = StepLoad(), 0.0, 0.0
        for row in plan.scheduled:
            one = self.live[row.order]
            if row.start >= one.seq.num_prompt or row.num_tokens == 1:
                decoding.add(row.start, 1, sampled=1, scored=len(row.targets[:1]))
            else:
                count = min(LEAST_CHUNK, row.num_tokens)
                part = StepLoad(count, count * (row.start + count), scored=count if row.targets else 0)
                chunk = self.times.seconds(part) - ONE_ROW + PER_ROW
                started, largest = (started, max(largest, chunk)) if row.start else (started + chunk, largest)
        of_rows = max(self.times.seconds(decoding), self.times.seconds(StepLoad(1)))
        least = max(of_rows, PROMPTS_SHARE * self.bound.max_s)
        return max(self.bound.max_s, of_rows + min(least, self.bound.max_s)) + started + largest

    def _most_of_rows(self, plan: StepPlan) -> float:
        """The most that the decoding rows of a step may take: a share of the bound, or one row of each tenant."""
        load, seen = StepLoad(), set()
        for row in plan.scheduled:
            one = self.live[row.order]
            if one.seq.num_outputs and row.request.tenant_id not in seen:
                seen.add(row.request.tenant_id)
                load.add(row.start, 1, sampled=1)
        return max(ROWS_SHARE * self.bound.max_s, self.times.seconds(load)) + 2 * PER_ROW

    def _drew(self, one: Live) -> None:
        promised = self._promised(one) if one.in_order and not one.seq.num_outputs else None
        if promised is not None:
            self.checked += 1
            self.tight = max(self.tight, one.waited / promised)
            assert one.waited <= promised, (
                f"seed {self.seed}: {one.seq.request.request_id} of {one.seq.num_prompt} waited {one.waited} steps, "
                f"over {promised}"
            )
        one.seq.num_pending -= 1
        one.seq.token_ids += [7] * (1 + one.forced)
        self.scheduler.delivered(one.seq, 1 + one.forced)
        if one.seq.num_outputs >= one.answer:
            self._end(one)

    def _end(self, one: Live) -> None:
        self.scheduler.finish(one.seq)
        del self.live[one.seq.order]
        self.gone[one.seq.request.tenant_id] = self.now


def run(seeds: range, steps: int) -> tuple[int, float, float]:
    mixes = [Mix(seed) for seed in seeds]
    for mix in mixes:
        mix.play(steps)
    return (
        sum(mix.checked for mix in mixes),
        max(mix.tight for mix in mixes),
        max(mix.fullest for mix in mixes),
    )


def test_no_mix_breaks_the_bound() -> None:
    checked, tight, fullest = run(range(MIXES), 300)
    assert checked > 100
    assert tight > 0.4, "the bound is far from what is seen"
    assert fullest > 0.95


def test_the_first_one_in_order_keeps_a_quarter_beside_seven_others() -> None:
    mix = Mix(0)
    mix.max_s, mix.bound = 0.3, StepBound(mix.times, 0.3)
    mix.scheduler = mix.new_scheduler()
    for number in range(TENANTS):
        ids = (number + 1, *(0,) * 5000)
        mix.scheduler.add_sequence(
            Sequence(
                EngineRequest(f"r{number}", f"t{number}", ids, SamplingParams(max_tokens=1)),
                0.0,
                number,
                list(ids),
            )
        )
    *others, first = sorted(row.num_tokens for row in mix.scheduler.plan(0.0).scheduled)
    assert len(others) == MOST_SHARING - 1
    assert first >= 0.24 * (first + sum(others))
    assert others[-1] - others[0] <= LEAST_CHUNK + 1, (
        "theirs are equal but for the time of the step's first row"
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_mix_of_many_breaks_the_bound() -> None:
    run(range(MIXES, MIXES + SOAK_MIXES), 400)
