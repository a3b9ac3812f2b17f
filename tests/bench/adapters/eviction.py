"""Which adapters should leave the device: policies of eviction over traces, as misses and bytes that are copied.

    PYTHONPATH=tests python -m bench.adapters.eviction [--adapters 2000] [--fit 32] [--requests 40000]

Ranks are 8, 16, 32 or 64, evenly drawn, and the device holds `--fit` adapters of the mean rank. A request uses its
adapter for some time: 8 run at a time, and what is in use stays. Policies:

- `lru`: the least recently used leaves.
- `uses`: the lowest score leaves, which is the age at the last use plus up to 16 uses; the age is the highest score
  that was evicted (LFU with dynamic aging). This is what the cache does. `uses, all` counts every use.
- `gdsf`: the same with uses × cost ÷ bytes, where cost is the bytes and a load's fixed part (Greedy-Dual-Size with
  Frequency; Cherkasova, 1998).

Traces: Zipf(1.1); power laws as in S-LoRA, where an adapter's share is its place to the power of -1 ÷ α; Zipf with
scans, where every 20th request is for the next of all adapters in turn; Zipf whose order is drawn again 4 times.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loraplex.adapters.cache.entries import MAX_USES

RUNNING = 8
FIXED = 8.0
"""A load's fixed part, in ranks."""


def power_law(count: int, exponent: float, requests: int, seed: int) -> list[int]:
    weights = [(place + 1) ** -exponent for place in range(count)]
    return random.Random(seed).choices(range(count), weights, k=requests)


def with_scans(trace: list[int], count: int) -> list[int]:
    return [number // 20 % count if number % 20 == 0 else one for number, one in enumerate(trace)]


def with_shifts(trace: list[int], count: int) -> list[int]:
    order, rng, shifted = list(range(count)), random.Random(1), []
    for number, one in enumerate(trace):
        if number % (len(trace) // 5) == 0:
            rng.shuffle(order)
        shifted.append(order[one])
    return shifted


@dataclass
class Device:
    """Resident adapters by last use, the oldest first. `rate` gives a score of rank and uses, without the age; None is
    LRU."""

    size: int
    ranks: Sequence[int]
    rate: Callable[[int, int], float] | None

    def __post_init__(self) -> None:
        self.resident: OrderedDict[int, None] = OrderedDict()
        self.used = 0
        self.age = 0.0
        self.uses: dict[int, int] = {}
        self.scores: dict[int, float] = {}

    def touch(self, adapter: int) -> None:
        self.resident.move_to_end(adapter)
        self.uses[adapter] = self.uses.get(adapter, 0) + 1
        if self.rate is not None:
            self.scores[adapter] = self.age + self.rate(self.ranks[adapter], self.uses[adapter])

    def free(self, needed: int, in_use: Sequence[int]) -> None:
        order = list(self.resident)
        if self.rate is not None:
            order.sort(key=self.scores.__getitem__)
        for victim in order:
            if self.used + needed <= self.size:
                return
            if victim not in in_use:
                del self.resident[victim]
                self.used -= self.ranks[victim]
                self.age = max(self.age, self.scores.get(victim, 0.0))
                del self.uses[victim]

    def play(self, trace: Sequence[int]) -> tuple[float, float]:
        """Misses and ranks copied, for each request."""
        running: deque[int] = deque(maxlen=RUNNING)
        misses = copied = 0
        for adapter in trace:
            if adapter not in self.resident:
                misses += 1
                copied += self.ranks[adapter]
                self.free(self.ranks[adapter], running)
                self.resident[adapter] = None
                self.used += self.ranks[adapter]
            self.touch(adapter)
            running.append(adapter)
        return misses / len(trace), copied / len(trace)


POLICIES: dict[str, Callable[[int, int], float] | None] = {
    "lru": None,
    "uses": lambda rank, uses: min(uses, MAX_USES),
    "uses, all": lambda rank, uses: uses,
    "gdsf": lambda rank, uses: uses * (rank + FIXED) / rank,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("adapters", 2000), ("fit", 32), ("requests", 40_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    count, requests = options.adapters, options.requests
    ranks = random.Random(0).choices((8, 16, 32, 64), k=count)
    zipf = power_law(count, 1.1, requests, 2)
    traces = {
        "Zipf(1.1)": zipf,
        "power law, α 0.1": power_law(count, 10.0, requests, 3),
        "power law, α 0.5": power_law(count, 2.0, requests, 4),
        "power law, α 1": power_law(count, 1.0, requests, 5),
        "Zipf with scans": with_scans(zipf, count),
        "Zipf that shifts": with_shifts(zipf, count),
    }
    print("| trace | " + " | ".join(f"{name}: misses | ranks copied" for name in POLICIES) + " |")
    print("|---" * (1 + 2 * len(POLICIES)) + "|")
    for name, trace in traces.items():
        cells = []
        for rate in POLICIES.values():
            misses, copied = Device(options.fit * 30, ranks, rate).play(trace)
            cells += [f"{misses:.3f}", f"{copied:.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
