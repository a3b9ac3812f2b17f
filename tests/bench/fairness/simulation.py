"""The real engine core and scheduler on a simulated device: one workload under one policy.

Time is the device's alone: the host costs nothing here, so that policies are compared by what they choose.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.fairness.device import Clock, Device, TimedRunner
from bench.fairness.gap import Gaps
from bench.fairness.workloads import Arrival, Workload
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import BLOCK_SIZE, Charges, SchedulerConfig
from loraplex.engine.core import EngineCore
from loraplex.engine.fairness import WaitingQueue
from loraplex.engine.types import EngineRequest, SamplingParams, StepPlan
from support.fake_transport import FakeTransport, Fate, make_cache

LOAD_S = 0.15
"""From disk into host memory: an adapter of about 100 MB."""
COPY_S = 0.015
"""From there to the device."""
SAMPLE_S = 1.0
"""Between two points of a curve."""
ADAPTER_RANK = 16
CHARGES = Charges()
RESIDENCY_QUANTUM = 2048.0


@dataclass
class Run:
    """What came of it. `served` and `gaps` have one entry each `SAMPLE_S` at least: (time, units per tenant), (time,
    largest gap over an interval that ends there)."""

    seconds: float
    weights: dict[str, float]
    served: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    max_gap: float | None = None
    tokens: int = 0
    steps: int = 0
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    longest_wait_s: dict[str, float] = field(default_factory=dict)
    """Until a first token, or the end of the run."""
    preemptions: int = 0
    loads: int = 0
    copies: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that were computed for the first time, and output tokens."""
        return self.tokens / self.seconds

    def share(self, tenant: str, window: tuple[float, float] | None = None) -> float:
        """Of all service within the window, the part of this tenant."""
        start, end = window or (0.0, self.seconds)
        first, last = self._at(start), self._at(end)
        return (last[tenant] - first[tenant]) / (sum(last.values()) - sum(first.values()))

    def _at(self, time: float) -> dict[str, float]:
        return min(self.served, key=lambda sample: abs(sample[0] - time))[1]


def bound(device: Device, workload: Workload) -> float:
    """2·max(largest charged prompt, w_q·M) + quantum, in units per weight: w_q is the charge for an output token, M the
    tokens that the batch's memory holds. The quantum counts where adapters have to share the device."""
    arrivals = workload.arrivals()
    prompt, output = _prices(any(arrival.adapter >= 0 for arrival in arrivals))
    largest = max(arrival.prompt for arrival in arrivals)
    adapters = {(arrival.tenant, arrival.adapter) for arrival in arrivals if arrival.adapter >= 0}
    quantum = RESIDENCY_QUANTUM if len(adapters) > workload.adapter_room else 0.0
    lightest = min([1.0, *workload.weights.values()])
    return 2 * max(prompt * largest, output * device.num_blocks * BLOCK_SIZE) / lightest + quantum


def _prices(adapter: bool) -> tuple[float, float]:
    """What a prompt and an output token are charged, on an adapter or on the base model."""
    price = CHARGES.price(ADAPTER_RANK if adapter else 0)
    return CHARGES.prefill * price, CHARGES.decode * price


class _Simulation:
    def __init__(
        self, workload: Workload, policy: WaitingQueue | None, device: Device, seed: int, check_every: int
    ) -> None:
        self._workload = workload
        self._arrivals = workload.arrivals(seed)
        self._check_every = check_every
        self._clock = Clock()
        self._tenants = sorted({arrival.tenant for arrival in self._arrivals})
        weights = {tenant: workload.weight(tenant) for tenant in self._tenants}
        self.run = Run(workload.seconds, weights, first_token_s={tenant: [] for tenant in self._tenants})
        self._units = dict.fromkeys(self._tenants, 0.0)
        self._gaps = Gaps(weights)
        self._waiting: Counter[str] = Counter()  # requests that were never scheduled
        self._prompt_done: dict[str, int] = {}  # positions that were computed at least once, by request
        self._sent: dict[str, Arrival] = {}
        self._silent: dict[str, None] = {}  # without a token so far
        self._transport = FakeTransport(
            self._clock,
            num_pages=workload.adapter_room,
            load_fate=lambda digest: Fate(LOAD_S),
            copy_fate=lambda digest: Fate(COPY_S),
        )
        cache = make_cache(
            self._transport, num_slots=workload.adapter_room, host_pages=1000, load_timeout_s=60.0
        )
        config = SchedulerConfig(
            num_blocks=device.num_blocks,
            max_model_len=4096,
            max_num_seqs=workload.max_running,
            max_num_batched_tokens=512,
            max_waiting=len(self._arrivals) + 1,
            charges=CHARGES,
            residency_quantum=RESIDENCY_QUANTUM,
        )
        runner = TimedRunner(device, self._clock, self._computed)
        self._core = EngineCore(config, runner, cache, eos_ids=frozenset(), clock=self._clock, queue=policy)

    def play(self) -> Run:
        turn, clock, core = 0, self._clock, self._core
        while clock.now < self._workload.seconds:
            while turn < len(self._arrivals) and self._arrivals[turn].at <= clock.now:
                self._send(turn, self._arrivals[turn])
                turn += 1
            self._transport.settle()
            before = self._backlogged()
            self._deliver(core.step())
            self._measure(before)
            if self._check_every and self.run.steps % self._check_every == 0:
                core.check_integrity()
            if core.idle_s() != 0.0:
                times = [self._workload.seconds, self._transport.next_due]
                times += [arrival.at for arrival in self._arrivals[turn : turn + 1]]
                clock.now = max(clock.now, min(time for time in times if time is not None))
        return self._end()

    def _send(self, number: int, arrival: Arrival) -> None:
        request_id = f"r{number}"
        ref = None
        if arrival.adapter >= 0:
            name = f"{arrival.tenant}/{arrival.adapter}"
            digest = hashlib.sha256(name.encode()).hexdigest()
            ref = AdapterRef(arrival.tenant, name, 1, digest, ADAPTER_RANK)
        request = EngineRequest(
            request_id,
            arrival.tenant,
            (number, *(0,) * (arrival.prompt - 1)),  # no two begin alike
            SamplingParams(max_tokens=arrival.output),
            ref,
            weight=self.run.weights[arrival.tenant],
        )
        self._sent[request_id] = arrival
        self._silent[request_id] = None
        self._waiting[arrival.tenant] += 1
        self._core.add(request)

    def _computed(self, plan: StepPlan) -> None:
        self.run.steps += 1
        for row in plan.scheduled:
            seq = row.seq
            done = self._prompt_done.get(seq.request_id)
            if done is None:
                self._waiting[seq.request.tenant_id] -= 1
                done = 0
            end = min(row.start + row.num_tokens, seq.num_prompt)
            new = max(0, end - done)
            self._prompt_done[seq.request_id] = done + new
            if new == 0:
                continue
            self._units[seq.request.tenant_id] += _prices(seq.request.adapter is not None)[0] * new
            self.run.tokens += new

    def _deliver(self, events: Any) -> None:
        for event in events:
            assert event.error is None, event
            arrival = self._sent[event.request_id]
            tenant = arrival.tenant
            self._units[tenant] += _prices(arrival.adapter >= 0)[1] * len(event.token_ids)
            self.run.tokens += len(event.token_ids)
            if event.token_ids and event.request_id in self._silent:
                del self._silent[event.request_id]
                waited = self._clock.now - arrival.at
                self.run.first_token_s[tenant].append(waited)

    def _backlogged(self) -> set[str]:
        """Tenants with a request that could run if there were room. While one waits for its adapter nobody is: who it
        is that could run can't be told from outside."""
        if self._core.num_waiting_for_adapter:
            return set()
        return {tenant for tenant, waiting in self._waiting.items() if waiting}

    def _measure(self, before: set[str]) -> None:
        now, run = self._clock.now, self.run
        gap = self._gaps.measure(before & self._backlogged(), self._units)
        if gap is not None:
            run.max_gap = max(run.max_gap or 0.0, gap)
        if not run.served or now >= run.served[-1][0] + SAMPLE_S:
            run.served.append((now, dict(self._units)))
            run.gaps.append((now, gap or 0.0))

    def _end(self) -> Run:
        run = self.run
        run.served.append((self._clock.now, dict(self._units)))
        run.longest_wait_s = {tenant: max(waits, default=0.0) for tenant, waits in run.first_token_s.items()}
        for request_id in self._silent:
            arrival = self._sent[request_id]
            waited = run.seconds - arrival.at
            run.longest_wait_s[arrival.tenant] = max(run.longest_wait_s[arrival.tenant], waited)
        run.preemptions = self._core.stats().num_preemptions
        run.loads, run.copies = self._transport.num_loads, self._transport.num_copies
        return run


def simulate(
    workload: Workload,
    make_policy: Callable[[], WaitingQueue] | None,
    *,
    device: Device | None = None,
    seed: int = 0,
    check_every: int = 0,
) -> Run:
    """The workload from its start to its end. None is the product's own queue. Every `check_every` steps the engine's
    own integrity is checked."""
    policy = None if make_policy is None else make_policy()
    return _Simulation(workload, policy, device or Device(), seed, check_every).play()
