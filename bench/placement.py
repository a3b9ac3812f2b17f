"""Placement of adapters among members, simulated, and what its functions cost.

    PYTHONPATH=tests:. python -m bench.placement [--seeds 3] [--until 600] [--load 0.65] [--heuristics | --cost]

8 members of 16 places and 16 slots, 256 adapters by Zipf's law (1.1), loads of 0.5 s, requests of 2 s in the mean.
Prints loads for 1,000 requests, the 99th percentile of the wait, in seconds, and of the imbalance, as means over the
seeds; then our loads over those of each, and the adapters that move where nothing changes and where a member comes.
`--heuristics`: ours with one constant changed at a time, instead of others.
`--cost`: the median milliseconds of processor time of `place` and `choose` for large clusters.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest import mock

from loraplex.serving.cluster import choice, placement
from loraplex.serving.cluster.choice import Load, choose
from loraplex.serving.cluster.hashing import key_of
from loraplex.serving.cluster.placement import Demand, Member, Places, place
from support.placement.peers import Dynamo, Llmd, by_activity, by_residency
from support.placement.policies import LeastLoaded, Ours, Rendezvous
from support.placement.simulator import Outcome, Policy, Simulator
from support.placement.workloads import ADAPTERS, DIGESTS, KINDS, ZIPF, arrivals

MEMBERS, PLACES, MEAN_S = 8, 16, 2.0
PROCESSES = 2
POLICIES: dict[str, Callable[[], Policy]] = {
    "rendezvous, one copy": Rendezvous,
    "least loaded": LeastLoaded,
    "llm-d, activity": lambda: Llmd(by_activity),
    "llm-d, residency": lambda: Llmd(by_residency),
    "llm-d, residency × 2": lambda: Llmd(by_residency, weight=2.0),
    "llm-d, residency × 4": lambda: Llmd(by_residency, weight=4.0),
    "llm-d, residency filter": lambda: Llmd(by_residency, filters=True),
    "Dynamo, loaded first": lambda: Dynamo(loaded_first=True),
    "Dynamo, whole set": lambda: Dynamo(loaded_first=False),
    "ours": Ours,
}
HEURISTICS: dict[str, tuple[object, str, float]] = {
    "weighs from 0.05 of the places": (placement, "WEIGHS", 0.05),
    "nothing weighs": (placement, "WEIGHS", 1e9),
    "one copy of each": (placement, "FILL", 1e9),
    "a load counts once": (choice, "LOAD_WEIGHT", 1.0),
    "a load counts three times": (choice, "LOAD_WEIGHT", 3.0),
    "the order counts at any load": (choice, "EVEN", 1e9),
}
WITHOUT: dict[str, Callable[[], Policy]] = {
    "foreign adapters stay": lambda: Ours(evicts_foreign=False),
}


def run(name: str, kind: str, seed: int, until: float, load: float) -> Outcome:
    """One row's run."""
    requests = arrivals(kind, rate=load * MEMBERS * PLACES / MEAN_S, mean_s=MEAN_S, until=until, seed=seed)
    if name in HEURISTICS:
        module, constant, value = HEURISTICS[name]
        with mock.patch.object(module, constant, value):
            return Simulator(Ours()).run(requests)
    return Simulator((POLICIES | WITHOUT)[name]()).run(requests)


def print_table(names: Sequence[str], seeds: int, until: float, load: float) -> None:
    """A line for each name, and our loads over those of each."""
    runs = [(name, kind, seed, until, load) for name in names for kind in KINDS for seed in range(seeds)]
    loads: dict[str, list[float]] = {}
    with ProcessPoolExecutor(PROCESSES) as pool:
        outcomes = pool.map(run, *zip(*runs, strict=True))
        for name in names:
            cells = []
            for _ in KINDS:
                found = [next(outcomes) for _ in range(seeds)]
                means = [statistics.mean(values) for values in zip(*found, strict=True)]
                loads.setdefault(name, []).append(means[0])
                cells.append("{:.0f} · {:.1f} · {:.1f}".format(*means))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for name, theirs in loads.items():
        ratios = (f"{own / other:.2f}" for own, other in zip(loads["ours"], theirs, strict=True))
        print(f"our loads over those of {name}: {', '.join(ratios)}")


def at_rest(count: int, asked: Mapping[str, Demand], before: Places) -> Places:
    """The places among `count` members, when each has loaded what it was given and nothing moves any more."""
    members = [Member(f"m{number}", PLACES, PLACES * 100, frozenset(asked)) for number in range(count)]
    while (placed := place(members, asked, before)).places != before:
        before = placed.places
    assert not placed.moved
    return before


def print_moves(load: float) -> None:
    weights = [1 / (rank + 1) ** ZIPF for rank in range(ADAPTERS)]
    total = load * MEMBERS * PLACES / sum(weights)
    asked = {digest: Demand(total * weight, 1) for digest, weight in zip(DIGESTS, weights, strict=True)}
    before = at_rest(MEMBERS, asked, {})
    for count in (MEMBERS, MEMBERS + 1):
        after = at_rest(count, asked, before)
        moved = sum(
            {each.member for each in before[digest]} != {each.member for each in after[digest]}
            for digest in asked
        )
        print(f"{MEMBERS} members become {count}: {100 * moved / ADAPTERS:.1f} % of the adapters move")
    print(f"and back: {'as before' if at_rest(MEMBERS, asked, after) == before else 'not as before'}")


def print_cost() -> None:
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(10_000)]
    for count in (8, 64):
        members = [Member(f"m{number}", 64, 10_000, frozenset(digests)) for number in range(count)]
        total = 0.6 * 64 * count
        weights = [1 / (rank + 1) ** 1.1 for rank in range(len(digests))]
        asked = {
            digest: Demand(total * weight / sum(weights), 1)
            for digest, weight in zip(digests, weights, strict=True)
        }
        before = place(members, asked, {}).places
        taken = []
        for turn in range(9):
            changed = {
                key: replace(each, concurrency=each.concurrency * (1 + turn / 100))
                for key, each in asked.items()
            }
            start = time.process_time()
            before = place(members, changed, before).places
            taken.append(time.process_time() - start)
        print(f"place, 10,000 adapters, {count} members: {1e3 * statistics.median(taken):.1f} ms")
        loads = {member.id: Load(key_of(member.id.encode()), 30, 64, MEAN_S) for member in members}
        start = time.process_time()
        for number in range(1000):
            choose(loads, prefix=number.to_bytes(4, "big"))
        print(f"choose among {count} members: {time.process_time() - start:.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", type=float, default=600.0)
    parser.add_argument("--load", type=float, default=0.65)
    parser.add_argument("--heuristics", action="store_true")
    parser.add_argument("--cost", action="store_true")
    options = parser.parse_args()
    if options.cost:
        print_cost()
    elif options.heuristics:
        print_table(["ours", *HEURISTICS, *WITHOUT], options.seeds, options.until, options.load)
    else:
        print_table(list(POLICIES), options.seeds, options.until, options.load)
        print_moves(options.load)


if __name__ == "__main__":
    main()
