"""Placement of adapters among members, simulated, and what its functions cost.

    PYTHONPATH=tests python -m bench.placement [--seeds 3] [--until 600] [--load 0.65] [--cost]

8 members of 16 places and 16 slots, 256 adapters by Zipf's law (1.1), loads of 0.5 s, requests of 2 s in the mean.
Prints loads for 1,000 requests, the 99th percentile of the wait, in seconds, and of the imbalance, as means over the
seeds.
`--cost`: the median milliseconds of `place` and `choose` for large clusters.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from loraplex.serving.cluster.choice import Load, choose
from loraplex.serving.cluster.hashing import key_of
from loraplex.serving.cluster.placement import Demand, Member, place
from support.placement.policies import AffinityAndLoad, Dynamo, LeastLoaded, Ours, Rendezvous
from support.placement.simulator import Policy, Simulator
from support.placement.workloads import KINDS, arrivals

MEMBERS, PLACES, MEAN_S = 8, 16, 2.0
POLICIES: dict[str, Callable[[], Policy]] = {
    "rendezvous, one copy": Rendezvous,
    "least loaded": LeastLoaded,
    "affinity and load": AffinityAndLoad,
    "Dynamo, loaded first": lambda: Dynamo(loaded_first=True),
    "Dynamo, whole set": lambda: Dynamo(loaded_first=False),
    "ours": Ours,
}


def print_table(seeds: int, until: float, load: float) -> None:
    rate = load * MEMBERS * PLACES / MEAN_S
    for name, make in POLICIES.items():
        cells = []
        for kind in KINDS:
            found = [
                Simulator(make()).run(arrivals(kind, rate=rate, mean_s=MEAN_S, until=until, seed=seed))
                for seed in range(seeds)
            ]
            loads, waits, imbalances = (
                statistics.mean(getattr(each, field) for each in found)
                for field in ("loads", "wait_s", "imbalance")
            )
            cells.append(f"{loads:.0f} · {waits:.1f} · {imbalances:.1f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def print_cost() -> None:
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(10_000)]
    for count in (8, 64):
        members = [Member(f"m{number}", 64, 10_000, frozenset(digests)) for number in range(count)]
        total = 0.6 * 64 * count
        weights = [1 / (rank + 1) ** 1.1 for rank in range(len(digests))]
        demand = {
            digest: Demand(total * weight / sum(weights), 1)
            for digest, weight in zip(digests, weights, strict=True)
        }
        before = place(members, demand, {}).places
        taken = []
        for turn in range(9):
            changed = {
                key: replace(each, concurrency=each.concurrency * (1 + turn / 100))
                for key, each in demand.items()
            }
            start = time.perf_counter()
            before = place(members, changed, before).places
            taken.append(time.perf_counter() - start)
        print(f"place, 10,000 adapters, {count} members: {1e3 * statistics.median(taken):.1f} ms")
        loads = {member.id: Load(key_of(member.id.encode()), 30, 64, MEAN_S) for member in members}
        start = time.perf_counter()
        for number in range(1000):
            choose(loads, prefix=number.to_bytes(4, "big"))
        print(f"choose among {count} members: {time.perf_counter() - start:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", type=float, default=600.0)
    parser.add_argument("--load", type=float, default=0.65)
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    if options.cost:
        print_cost()
    else:
        print_table(options.seeds, options.until, options.load)


if __name__ == "__main__":
    main()
