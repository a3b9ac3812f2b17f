"""The result of one workload under one policy: what each tenant was served, and when, for any scheduler."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bench.fairness.device import Device
from bench.fairness.gap import Gaps
from bench.fairness.workloads import Arrival, Workload
from loraplex.engine.config import Charges
from loraplex.kernels.attention import BLOCK_SIZE

LOAD_S = 0.15
"""From disk into host memory: an adapter of about 100 MB."""
COPY_S = 0.015
"""From there to the device."""
SAMPLE_S = 1.0
"""Between two points of a curve."""
ADAPTER_RANK = 16
CHARGES = Charges()


@dataclass
class Run:
    """What came of it. `served` and `gaps` have one entry each `SAMPLE_S` at least: (time, units per tenant), (time,
    largest gap over an interval that ends there)."""

    seconds: float
    weights: dict[str, float]
    rule: str = ""
    """Of the batch; empty for our own scheduler."""
    served: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    max_gap: float | None = None
    tokens: int = 0
    steps: int = 0
    longest_step_s: float = 0.0
    """While more than one tenant has requests; told of our own scheduler alone."""
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    longest_wait_s: dict[str, float] = field(default_factory=dict)
    """Until a first token, or the end of the run."""
    steps_to_place: dict[str, list[int]] = field(default_factory=dict)
    """Of each request, the engine's steps from its arrival to the first that computed something of it, that one
    included; those that were never scheduled count to the end of the run."""
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
    """2·max(largest charged prompt, w_q·M), in units per weight: w_q is the charge for an output token, M the
    tokens that the batch's memory holds."""
    arrivals = workload.arrivals()
    prompt, output = prices(any(arrival.adapter >= 0 for arrival in arrivals))
    largest = max(arrival.prompt for arrival in arrivals)
    lightest = min([1.0, *workload.weights.values()])
    memory = on(device, workload).num_blocks * BLOCK_SIZE
    return 2 * max(prompt * largest, output * memory) / lightest


def on(device: Device, workload: Workload) -> Device:
    """The device, with the memory that the workload is for."""
    return replace(device, num_blocks=workload.num_blocks) if workload.num_blocks else device


def prices(adapter: bool) -> tuple[float, float]:
    """What a prompt token and an output token are charged, on an adapter or on the base model."""
    price = CHARGES.price(ADAPTER_RANK if adapter else 0)
    return CHARGES.prefill * price, CHARGES.decode * price


class Arrivals:
    """The requests of a workload as they come, numbered in that order: those of a stream come again when they end."""

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._due = [(arrival.at, number, arrival) for number, arrival in enumerate(arrivals)]
        self._count = len(arrivals)

    def take(self, now: float) -> Iterator[tuple[int, Arrival]]:
        while self._due and self._due[0][0] <= now:
            _, number, arrival = heapq.heappop(self._due)
            yield number, arrival

    def ended(self, arrival: Arrival, now: float) -> None:
        if arrival.again:
            heapq.heappush(self._due, (now, self._count, replace(arrival, at=now)))
            self._count += 1

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None


@dataclass(slots=True, eq=False)
class Served:
    """What a request got so far."""

    number: int
    arrival: Arrival
    prompt_price: float
    output_price: float
    came_in_step: int
    prompt_done: int = 0  # positions that were computed at least once
    outputs: int = 0
    placed: bool = False


class Account:
    """Measures what a scheduler computes."""

    def __init__(self, workload: Workload, seed: int) -> None:
        arrivals = workload.arrivals(seed)
        tenants = sorted({arrival.tenant for arrival in arrivals})
        weights = {tenant: workload.weight(tenant) for tenant in tenants}
        self.arrivals = Arrivals(arrivals)
        self.run = Run(
            workload.seconds,
            weights,
            first_token_s={tenant: [] for tenant in tenants},
            steps_to_place={tenant: [] for tenant in tenants},
        )
        self.units = dict.fromkeys(tenants, 0.0)
        self._gaps = Gaps(weights)
        self._waiting: Counter[str] = Counter()  # requests that were never scheduled
        self._silent: dict[Served, None] = {}  # without a token so far

    def came(self, number: int, arrival: Arrival) -> Served:
        served = Served(number, arrival, *prices(arrival.adapter >= 0), self.run.steps)
        self._waiting[arrival.tenant] += 1
        self._silent[served] = None
        return served

    def backlogged(self) -> set[str]:
        """Tenants with a request that was never scheduled."""
        return {tenant for tenant, waiting in self._waiting.items() if waiting}

    def computed(self, served: Served, prompt_end: int) -> None:
        """This step schedules it, and its prompt up to `prompt_end`. To be told before the step `ended`."""
        tenant = served.arrival.tenant
        if not served.placed:
            served.placed = True
            self._waiting[tenant] -= 1
            self.run.steps_to_place[tenant].append(self.run.steps + 1 - served.came_in_step)
        new = prompt_end - served.prompt_done
        if new > 0:
            served.prompt_done = prompt_end
            self.units[tenant] += served.prompt_price * new
            self.run.tokens += new

    def drew(self, served: Served, now: float) -> bool:
        """An output token at the end of the step, `now`. True if it is the answer's last."""
        tenant = served.arrival.tenant
        if served.outputs == 0:
            del self._silent[served]
            self.run.first_token_s[tenant].append(now - served.arrival.at)
        served.outputs += 1
        self.units[tenant] += served.output_price
        self.run.tokens += 1
        if served.outputs < served.arrival.output:
            return False
        self.arrivals.ended(served.arrival, now)
        return True

    def step_ended(self, backlogged: set[str], now: float) -> None:
        """A step is over, and these were backlogged from before it until after it."""
        run = self.run
        run.steps += 1
        gap = self._gaps.measure(backlogged, self.units)
        if gap is not None:
            run.max_gap = max(run.max_gap or 0.0, gap)
        if not run.served or now >= run.served[-1][0] + SAMPLE_S:
            run.served.append((now, dict(self.units)))
            run.gaps.append((now, gap or 0.0))

    def close(self, now: float) -> Run:
        run = self.run
        run.served.append((now, dict(self.units)))
        run.longest_wait_s = {tenant: max(waits, default=0.0) for tenant, waits in run.first_token_s.items()}
        for served in self._silent:
            tenant = served.arrival.tenant
            waited = run.seconds - served.arrival.at
            run.longest_wait_s[tenant] = max(run.longest_wait_s[tenant], waited)
            if not served.placed:
                run.steps_to_place[tenant].append(run.steps - served.came_in_step)
        return run
