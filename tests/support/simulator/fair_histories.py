"""Seeded histories of the scheduler that are about fairness alone, with an oracle that keeps accounts of its own.

    play(seed) -> Outcome         raises Unfair, with the seed

A history has two to five tenants with weights that may change. Most tenants always have more waiting than can be
served, others come and go; short and long prompts, answers whose lengths nobody can predict or that change their
distribution halfway; adapters of several ranks with never enough room for all of them; few seats and few blocks, so
that sequences are preempted; requests that are aborted wherever they are. The scheduler, the queue and the adapter
cache are the real ones; tokens and time are made up.

The oracle charges what was computed for the first time, by what the plans say. While two tenants both have a request
waiting that could run, what they were served per weight must not drift apart by more than the bound:
2·max(largest charged prompt, dearest output token · tokens in the batch) over the lesser weight. A third of the
histories bounds the time of steps. There tenants that are ahead have a share of a step: the bound is LEAD larger.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import combinations, count

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import Charges, SchedulerConfig
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.timing.step_bound import LEAD
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, Sequence
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.fake_transport import FakeTransport, Fate, make_cache
from support.simulator.bounds import drawn_bound
from support.simulator.core_integrity import check_scheduler

STEPS = 600
STEP_S = 0.02
STEPS_TO_A_PLACE = 3


class Unfair(AssertionError):
    """Two tenants drifted apart by more than the bound."""


@dataclass(frozen=True)
class Outcome:
    """`drift`: the furthest that two backlogged tenants drifted apart, over the bound. `tested`: what such a pair was
    served in its longest common backlog, over the bound: below 1 nothing could have broken it."""

    drift: float
    tested: float
    preemptions: int
    loads: int
    aborts: int


@dataclass
class _Pair:
    low: float
    high: float
    begun: float  # served to both together when their common backlog began


class _Tenant:
    def __init__(self, name: str, rng: random.Random, adapters: list[AdapterRef | None]) -> None:
        self.name = name
        self.weight = float(rng.choice((1, 1, 2, 4)))
        self.adapters = adapters
        self.longest_prompt = rng.choice((3, 20, 60))
        self.longest_answer = rng.choice((3, 10, 40))
        self.wants = rng.choice((2, 5, 12))
        """Requests that it keeps waiting while it is on."""
        self.begins = rng.choice((0, 0, 0, 0, STEPS // 2))
        self.is_on = self.begins == 0
        self.comes_and_goes = rng.random() < 0.15


class FairHistory:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.num_aborts = 0
        self._order = count()
        self.charges = Charges(per_rank=rng.choice((0.0, 0.02)), load_per_rank=0.0)  # no load is in the plans
        num_adapters = rng.choice((0, 0, 1, 3, 6))
        self.tenants = [
            _Tenant(f"t{index}", rng, self._draw_adapters(f"t{index}", num_adapters))
            for index in range(rng.randint(2, 5))
        ]
        self.p_abort = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.p_weight = rng.choice((0.0, 0.0, 0.01))
        self.changes_lengths = rng.random() < 0.3
        seats = rng.randint(1, 6)
        self.config = SchedulerConfig(
            num_blocks=rng.choice((8, 12, 20, 60)),
            max_model_len=128,
            max_num_seqs=seats,
            max_num_batched_tokens=rng.choice((12, 24, 48, 96)),
            max_waiting=10**6,
            adapter_wait_aging_s=rng.choice((0.2, 1.0, 5.0)),
            charges=self.charges,
        )
        slow = rng.choice((0.02, 0.2, 6.0))
        self.transport = FakeTransport(
            lambda: self.now,
            rng.randint(2, 4),
            load_fate=lambda digest: Fate(slow * self.rng.random()),
            copy_fate=lambda digest: Fate(STEP_S * self.rng.random()),
        )
        self.cache = make_cache(self.transport, num_slots=4)
        self.is_bounded = seed % 3 == 1
        bound = drawn_bound(random.Random(seed)) if self.is_bounded else None
        self.scheduler = Scheduler(self.config, self.cache, bound=bound)
        self.live: dict[Sequence, int] = {}  # with the tokens that it will draw
        self.done: Counter[Sequence] = Counter()  # prompt positions that were charged
        self.served = {tenant.name: 0.0 for tenant in self.tenants}  # units per weight
        self.units = 0.0
        self.pairs: dict[tuple[str, str], _Pair] = {}
        self.drift = self.tested = 0.0
        self.fullest = 0  # tokens in the batch
        self.settles_at = 0.0
        self.kept_out: Counter[str] = Counter()  # steps for which a tenant, whose turn it was, got no place
        self.least_weight = {tenant.name: tenant.weight for tenant in self.tenants}

    def _draw_adapters(self, tenant: str, count: int) -> list[AdapterRef | None]:
        refs: list[AdapterRef | None] = [
            AdapterRef(tenant, f"a{number}", 1, self.rng.randbytes(32).hex(), self.rng.choice((8, 16, 64)))
            for number in range(count)
        ]
        return [*refs, None] if not refs or self.rng.random() < 0.7 else refs

    # The play.

    def play(self) -> Outcome:
        for step in range(STEPS):
            if step == STEPS // 2 and self.changes_lengths:
                for tenant in self.tenants:
                    tenant.longest_answer = self.rng.choice((3, 10, 40))
            self._arrive(step)
            self._leave()
            self._change_weights()
            self._step(step)
        return Outcome(
            self.drift, self.tested, self.scheduler.num_preemptions, self.transport.num_loads, self.num_aborts
        )

    def _arrive(self, step: int) -> None:
        waiting = Counter(seq.request.tenant_id for seq in self.live if seq not in self.scheduler.running)
        for tenant in self.tenants:
            if (step == tenant.begins > 0) or (tenant.comes_and_goes and self.rng.random() < 0.02):
                tenant.is_on = not tenant.is_on
            if tenant.is_on:
                for _ in range(tenant.wants - waiting[tenant.name]):
                    self._add(tenant)

    def _add(self, tenant: _Tenant) -> None:
        rng, order = self.rng, next(self._order)
        prompt = tuple(range(order * 100, order * 100 + rng.randint(1, tenant.longest_prompt)))
        length = rng.randint(1, tenant.longest_answer)
        request = EngineRequest(
            f"r{order}",
            tenant.name,
            prompt,
            SamplingParams(max_tokens=rng.choice((length, 40))),
            rng.choice(tenant.adapters),
            priority=rng.choice((0, 0, 1)),
        )
        seq = Sequence(request, self.now, order, list(prompt))
        self.live[seq] = length
        self.scheduler.queue.set_weight(tenant.name, tenant.weight)
        self.scheduler.add_sequence(seq)

    def _leave(self) -> None:
        for seq in [seq for seq in self.live if self.p_abort and self.rng.random() < self.p_abort / 10]:
            self.num_aborts += 1
            self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        del self.live[seq]
        self.done.pop(seq, None)

    def _change_weights(self) -> None:
        for tenant in self.tenants:
            if self.rng.random() < self.p_weight:
                tenant.weight = float(self.rng.choice((1, 2, 4)))
                self.scheduler.queue.set_weight(tenant.name, tenant.weight)
                self.kept_out.clear()
                self.settles_at = (
                    self.now + BLOCK_SIZE * STEP_S
                )  # a claim that has failed is tried again by then
                self.least_weight[tenant.name] = min(self.least_weight[tenant.name], tenant.weight)

    def _step(self, step: int) -> None:
        self.now += STEP_S
        self.transport.settle()
        self.cache.poll()
        before = self._backlogged()
        plan = self.scheduler.plan(self.now)
        if {row.request_id for row in plan.scheduled} & {*plan.preempted}:
            raise Unfair(f"seed {self.seed}: a request was preempted for one that did not start")
        self.fullest = max(self.fullest, sum(seq.num_tokens for seq in self.scheduler.running))
        sequences = {seq.request_id: seq for seq in self.scheduler.running}
        for row in plan.scheduled:
            self._take(sequences[row.request_id], row)
        if step % 25 == 0:
            check_scheduler(self.scheduler, self.live)
        self._check(before & self._backlogged())
        self._check_places()

    def _take(self, seq: Sequence, row: ScheduledSequence) -> None:
        self.scheduler.computed(seq, row)
        end = min(row.start + row.num_tokens, seq.num_prompt)
        if end > self.done[seq]:
            self._serve(seq, (end - self.done[seq]) * self.charges.prefill)
            self.done[seq] = end
        if row.samples:
            seq.token_ids.append(1)
            seq.num_pending -= 1
            self.scheduler.delivered(seq, 1)
            self._serve(seq, self.charges.decode)
            if seq.num_outputs >= self.live[seq]:
                self._finish(seq)

    # The oracle.

    def _serve(self, seq: Sequence, units: float) -> None:
        adapter = seq.request.adapter
        units *= self.charges.price(0 if adapter is None else adapter.rank)
        (tenant,) = (tenant for tenant in self.tenants if tenant.name == seq.request.tenant_id)
        self.served[tenant.name] += units / tenant.weight

    def _backlogged(self) -> set[str]:
        """Tenants with a request that waits, and not for its adapter."""
        scheduler = self.scheduler
        return {
            seq.request.tenant_id
            for seq in self.live
            if seq in scheduler.queue and scheduler.queue.is_ready(seq)
        }

    def _bound(self, one: str, other: str) -> float:
        """For these two, by what the batch has held at most so far and the least weights that they had."""
        refs = [ref for tenant in self.tenants for ref in tenant.adapters if ref is not None]
        dearest = self.charges.price(max((ref.rank for ref in refs), default=0))
        prompt = self.charges.prefill * max(tenant.longest_prompt for tenant in self.tenants)
        batch = self.charges.decode * self.fullest
        least = min(self.least_weight[one], self.least_weight[other])
        return 2 * dearest * max(prompt, batch) / least + (LEAD if self.is_bounded else 0.0)

    def _check(self, waiting: set[str]) -> None:
        pairs: dict[tuple[str, str], _Pair] = {}
        for one, other in combinations(sorted(waiting), 2):
            bound = self._bound(one, other)
            drift = self.served[one] - self.served[other]
            both = self.served[one] + self.served[other]
            pair = self.pairs.get((one, other)) or _Pair(drift, drift, both)
            pair.low, pair.high = min(pair.low, drift), max(pair.high, drift)
            pairs[one, other] = pair
            self.drift = max(self.drift, (pair.high - pair.low) / bound)
            self.tested = max(self.tested, (both - pair.begun) / bound)
            if pair.high - pair.low > bound:
                raise Unfair(
                    f"seed {self.seed}: {one} and {other} drifted apart by {pair.high - pair.low:.0f} units of "
                    f"service per weight, over {bound:.0f}, while both could have run more"
                )
        self.pairs = pairs

    def _check_places(self) -> None:
        """No tenant whose turn it is has nothing for long while another has places to spare."""
        queue, running, config = self.scheduler.queue, self.scheduler.running, self.config
        head = queue.head()
        name = None if head is None else head.request.tenant_id
        held = Counter(seq.request.tenant_id for seq in running)
        seats = min(config.max_num_seqs, config.max_num_batched_tokens)
        if head is None or name is None or held[name] or len(running) < seats:
            self.kept_out.clear()
            return
        needed = -(-head.num_tokens // BLOCK_SIZE)
        due = max(1 / seats, needed / config.num_blocks) / queue.weight(name)
        can_spare = any(
            (number - 1) / seats / queue.weight(other) >= (1 + (head.epoch > 0)) * due
            and (queue.counter(other) >= queue.counter(name) or not queue.is_backlogged(other))
            for other, number in held.items()
        )
        has_blocks = self.scheduler.blocks.num_free >= needed + 2 * seats
        prompts_first = any(
            seq.num_tokens - seq.num_computed > 1
            and queue.counter(seq.request.tenant_id) <= queue.counter(name)
            for seq in running
        )
        may_start = can_spare and has_blocks and not prompts_first and self.now > self.settles_at
        self.kept_out = Counter({name: self.kept_out[name] + 1} if may_start else {})
        if self.kept_out[name] > STEPS_TO_A_PLACE:
            raise Unfair(
                f"seed {self.seed}: it is the turn of {name}, which gets no place while others have several"
            )


def play(seed: int) -> Outcome:
    return FairHistory(seed).play()


def play_all(seeds: range) -> list[Outcome]:
    return [play(seed) for seed in seeds]
