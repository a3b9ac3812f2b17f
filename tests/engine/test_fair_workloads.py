"""VTC's workloads and ours on the real core and scheduler (`bench.fairness`), in a short form; in full under soak."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from bench.fairness.comparison import POLICIES
from bench.fairness.device import Device
from bench.fairness.gap import Gaps
from bench.fairness.policies import FirstCome, LeastCounter, PlainVtc, RoundRobin
from bench.fairness.report import OURS, figures, tables
from bench.fairness.simulation import bound, simulate
from bench.fairness.workloads import WORKLOADS, Arrival, Workload

BY_NAME = {workload.name: workload for workload in WORKLOADS}
SMALL = Device(num_blocks=40)
HISTORIES = 20
SOAK_HISTORIES, CHUNK = 10_000, 250


def short(name: str, seconds: float, window: tuple[float, float] | None = None) -> Workload:
    return replace(BY_NAME[name], seconds=seconds, window=window)


def test_the_gap_is_the_largest_difference_over_any_interval_of_common_backlog() -> None:
    gaps = Gaps({"a": 1.0, "b": 2.0})
    assert gaps.measure({"a"}, {"a": 50.0, "b": 0.0}) is None
    assert gaps.measure({"a", "b"}, {"a": 60.0, "b": 0.0}) == 10  # what was before is not held against them
    assert gaps.measure({"a", "b"}, {"a": 60.0, "b": 60.0}) == 30  # from +10 to −20
    assert (
        gaps.measure({"a", "b"}, {"a": 70.0, "b": 60.0}) == 20
    )  # this interval's end is nearer to its begin
    assert gaps.measure({"b"}, {"a": 70.0, "b": 90.0}) is None
    assert gaps.measure({"a", "b"}, {"a": 70.0, "b": 100.0}) == 5


def test_the_arrivals_are_those_that_were_published() -> None:
    counts = {
        name: {
            tenant: sum(arrival.tenant == tenant for arrival in BY_NAME[name].arrivals())
            for tenant in tenants
        }
        for name, tenants in (("overload", ("slower", "faster")), ("proportional", ("a", "b", "c")))
    }
    assert counts == {
        "overload": {"slower": 540, "faster": 1080},
        "proportional": {"a": 150, "b": 300, "c": 900},
    }
    on = [arrival.at for arrival in BY_NAME["on-off"].arrivals() if arrival.tenant == "on-off"]
    assert {int(at // 60) % 2 for at in on} == {0}
    assert BY_NAME["short-long"].arrivals(1) != BY_NAME["short-long"].arrivals(2)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_engine_whole(name: str) -> None:
    run = simulate(short("waves", 30), POLICIES[name], device=SMALL, check_every=1)
    assert run.preemptions > 0
    assert sum(len(waits) for waits in run.first_token_s.values()) > 3


@pytest.mark.slow
def test_the_policies_to_compare_with_are_what_their_names_say() -> None:
    overload = short("overload", 90, (30, 90))
    for policy, share in ((FirstCome, 2 / 3), (RoundRobin, 1 / 2)):
        run = simulate(overload, policy)
        assert run.share("faster", overload.window) == pytest.approx(share, abs=0.03)
    away = replace(short("returning", 60), make=_comes_late)
    saved, lifted = simulate(away, LeastCounter), simulate(away, PlainVtc)
    assert saved.share("late", (30, 50)) > 0.7
    assert lifted.share("late", (30, 50)) == pytest.approx(0.5, abs=0.1)


def _comes_late(rng: random.Random) -> Iterator[Arrival]:
    yield from (Arrival(number / 3, "early", 256, 256) for number in range(180))
    yield from (Arrival(30 + number / 30, "late", 256, 256) for number in range(90))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overload", "waves"])
def test_at_overload_the_gap_is_a_twentieth_of_the_bound(name: str) -> None:
    workload = short(name, 120)
    gap = simulate(workload, None).max_gap
    assert gap is not None
    assert 0 < gap <= 0.05 * bound(Device(), workload)


@pytest.mark.slow
def test_shares_are_by_weight() -> None:
    run = simulate(short("weights", 120), None)
    for tenant, weight in run.weights.items():
        assert run.share(tenant, (40, 120)) == pytest.approx(weight / 10, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fifty-adapters", "fifty-keys"])
def test_adapters_and_keys_buy_no_share(name: str) -> None:
    run = simulate(short(name, 120), None)
    assert run.share("fifty", (30, 120)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_who_comes_back_has_saved_up_nothing() -> None:
    run = simulate(replace(BY_NAME["returning"], seconds=60, make=_comes_late), None)
    assert run.share("late", (30, 60)) <= 0.55


@pytest.mark.slow
def test_who_swaps_adapters_without_end_delays_nobody_for_ten_seconds() -> None:
    run = simulate(short("many-adapters", 120), None)
    assert run.copies > 100
    assert max(waited for tenant, waited in run.longest_wait_s.items() if tenant != "many") <= 10.0


def _random(seed: int) -> tuple[Workload, Device]:
    """A few tenants that flood a device with little memory, each with requests of its own kind."""
    rng = random.Random(seed)
    tenants = {f"t{index}": float(rng.choice((1, 1, 2, 4))) for index in range(rng.randint(2, 4))}
    shapes = {tenant: (rng.choice((4, 40, 150)), rng.choice((2, 20, 60))) for tenant in tenants}

    def make(again: random.Random) -> Iterator[Arrival]:
        for tenant, (prompt, output) in shapes.items():
            at = again.choice((0.0, 0.0, 1.0))
            for _ in range(again.randint(20, 60)):
                yield Arrival(at, tenant, again.randint(1, prompt), again.randint(1, output))
                at += again.choice((0.0, 0.02, 0.1))

    workload = Workload(f"seed {seed}", "", 12.0, make, tenants, max_running=rng.choice((3, 8, 64)))
    return workload, Device(num_blocks=rng.choice((14, 24, 60)))


def _worst(seeds: range) -> float:
    """The largest gap of these histories, as a share of its bound."""
    worst = 0.0
    for seed in seeds:
        workload, device = _random(seed)
        gap = simulate(workload, None, device=device, seed=seed).max_gap
        worst = max(worst, (gap or 0.0) / bound(device, workload))
    return worst


@pytest.mark.slow
def test_the_gap_of_random_histories_is_within_the_bound() -> None:
    assert 0 < _worst(range(HISTORIES)) <= 1


@pytest.mark.slow
def test_the_report_names_every_workload_and_policy() -> None:
    workloads = [short(name, 30) for name in ("overload", "many-adapters")]
    runs = {w.name: {name: simulate(w, policy) for name, policy in POLICIES.items()} for w in workloads}
    told = figures(workloads, runs, Device())
    text = tables(told, runs)
    for word in ("overload", "many-adapters", *POLICIES):
        assert word in text
    assert told[0]["policies"][OURS]["tenants"]["faster"]["answered"] > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_gap_of_ten_thousand_random_histories_is_within_the_bound() -> None:
    chunks = [range(start, start + CHUNK) for start in range(0, SOAK_HISTORIES, CHUNK)]
    with ProcessPoolExecutor(
        max_workers=min(2, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        worst = max(pool.map(_worst, chunks))
    print(f"{SOAK_HISTORIES} histories, the largest gap is {worst:.1%} of the bound")
    assert 0 < worst <= 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_in_full_stays_within_the_bound(workload: Workload) -> None:
    for seed in range(3):
        run = simulate(workload, None, seed=seed, check_every=100)
        gap = (run.max_gap or 0.0) / bound(Device(), workload)
        shares = {tenant: f"{run.share(tenant, workload.window):.3f}" for tenant in run.weights}
        print(
            f"{workload.name}, seed {seed}: gap {gap:.1%} of the bound, {run.tokens_per_s:.0f} tokens/s, {shares}"
        )
        assert gap <= 1
        match workload.name:
            case "overload" | "waves":
                assert gap <= 0.05
            case "weights":
                for tenant, weight in run.weights.items():
                    assert run.share(tenant, workload.window) == pytest.approx(weight / 10, rel=0.02)
            case "fifty-adapters" | "fifty-keys":
                assert run.share("fifty", workload.window) == pytest.approx(0.5, abs=0.01)
            case "returning":
                assert run.share("returning", workload.window) <= 0.52
            case "many-adapters":
                others = (waited for tenant, waited in run.longest_wait_s.items() if tenant != "many")
                assert max(others) <= 10.0
