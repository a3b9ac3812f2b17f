"""The real scheduler on a simulated device: one workload.

Time is the device's alone: the host costs nothing here, so that policies are compared by what they choose.
"""

from __future__ import annotations

import hashlib

from bench.fairness.account import (
    ADAPTER_RANK,
    CHARGES,
    COPY_S,
    LOAD_S,
    Account,
    Run,
    Served,
    on,
)
from bench.fairness.device import Clock, Device
from bench.fairness.workloads import Arrival, Workload
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import SchedulerConfig
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.scheduling.timing.step_times import StepTimes
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence, StepPlan
from support.engine.fake_transport import FakeTransport, Fate, make_cache
from support.simulator.core_integrity import check_scheduler

MOST_TOKENS = 512
"""Positions of a step."""
TOKEN = 7
"""What every row draws. Whose tokens are right is the business of other tests."""


class _Simulation:
    def __init__(
        self, workload: Workload, device: Device, seed: int, check_every: int, bound: float | None
    ) -> None:
        self._seconds = workload.seconds
        self._device = on(device, workload)
        self._check_every = check_every
        self._clock = Clock()
        self._account = Account(workload, seed)
        self._live: dict[Sequence, Served] = {}
        self._transport = FakeTransport(
            self._clock,
            num_pages=workload.adapter_room,
            load_fate=lambda digest: Fate(LOAD_S),
            copy_fate=lambda digest: Fate(COPY_S),
        )
        self._cache = make_cache(
            self._transport, num_slots=workload.adapter_room, host_pages=1000, load_timeout_s=60.0
        )
        config = SchedulerConfig(
            num_blocks=self._device.num_blocks,
            max_model_len=4096,
            max_num_seqs=workload.max_running,
            max_num_batched_tokens=MOST_TOKENS,
            max_waiting=10**6,
            charges=CHARGES,
        )
        times = StepTimes(self._device.measured(MOST_TOKENS))
        self._scheduler = Scheduler(
            config, self._cache, bound=None if bound is None else StepBound(times, bound)
        )

    def play(self) -> Run:
        clock, account, scheduler = self._clock, self._account, self._scheduler
        while clock.now < self._seconds:
            for number, arrival in account.arrivals.take(clock.now):
                self._send(number, arrival)
            self._transport.settle()
            self._cache.poll()
            before = self._backlogged()
            plan = scheduler.plan(clock.now)
            assert not scheduler.failed, scheduler.failed
            if plan.scheduled:
                self._compute(plan)
                account.step_ended(before & self._backlogged(), clock.now)
                if self._check_every and plan.step_id % self._check_every == 0:
                    check_scheduler(scheduler, self._live)
            else:
                times = (self._seconds, self._transport.next_due, account.arrivals.next_at)
                clock.now = max(clock.now, min(time for time in times if time is not None))
        run = account.close(clock.now)
        run.preemptions = scheduler.num_preemptions
        run.loads, run.copies = self._transport.num_loads, self._transport.num_copies
        return run

    def _send(self, number: int, arrival: Arrival) -> None:
        ref = None
        if arrival.adapter >= 0:
            name = f"{arrival.tenant}/{arrival.adapter}"
            digest = hashlib.sha256(name.encode()).hexdigest()
            ref = AdapterRef(arrival.tenant, name, 1, digest, ADAPTER_RANK)
        request = EngineRequest(
            f"r{number}",
            arrival.tenant,
            (number, *(0,) * (arrival.prompt - 1)),  # no two begin alike
            SamplingParams(max_tokens=arrival.most),
            ref,
        )
        seq = Sequence(request, self._clock.now, number, list(request.prompt_ids))
        self._live[seq] = self._account.came(number, arrival)
        self._scheduler.queue.set_weight(arrival.tenant, self._account.run.weights[arrival.tenant])
        self._scheduler.add_sequence(seq)

    def _compute(self, plan: StepPlan) -> None:
        """The step's time passes, and every row that draws gets its token."""
        clock, account, scheduler, live = self._clock, self._account, self._scheduler, self._live
        prompt = rows = context = 0
        attended = 0.0
        for row in plan.scheduled:
            if row.num_tokens > 1:
                prompt += row.num_tokens
                attended += row.num_tokens * (row.start + (row.num_tokens + 1) / 2)
            else:
                rows += 1
                context += row.start
        took = self._device.seconds(prompt, rows, context, attended)
        clock.now += took
        if len(scheduler.queue.tenants()) > 1:
            account.run.longest_step_s = max(account.run.longest_step_s, took)
        scheduler.took(plan, took)
        sequences = {seq.order: seq for seq in scheduler.running}
        for row in plan.scheduled:
            seq = sequences[row.order]
            served = live[seq]
            if served.prompt_done < served.arrival.prompt:
                account.computed(served, min(row.start + row.num_tokens, served.arrival.prompt))
            scheduler.computed(seq, row)
            if row.samples:
                seq.token_ids.append(TOKEN)
                seq.num_pending -= 1
                scheduler.delivered(seq, 1)
                if account.drew(served, clock.now):
                    scheduler.finish(seq)
                    del live[seq]

    def _backlogged(self) -> set[str]:
        """Tenants with a request that could run if there were room. While one waits for its adapter nobody is: who it
        is that could run can't be told from outside."""
        return set() if self._scheduler.num_waiting_for_adapter else self._account.backlogged()


def simulate(
    workload: Workload,
    *,
    device: Device | None = None,
    seed: int = 0,
    check_every: int = 0,
    bound: float | None = None,
) -> Run:
    """The workload from its start to its end under the product's own scheduler. Every `check_every` steps its integrity
    is checked. `bound`: seconds that a step may take while more than one tenant is served; None: of positions alone."""
    return _Simulation(workload, device or Device(), seed, check_every, bound).play()
