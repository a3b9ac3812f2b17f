"""VTC's workloads and ours on the real scheduler (`bench.fairness`), in a short form; in full under soak."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from bench.fairness.account import Arrivals, bound
from bench.fairness.baselines import FIRST_COME, ORDERS, RULES, play
from bench.fairness.device import Device
from bench.fairness.gap import Gaps
from bench.fairness.report import OURS, figures, tables
from bench.fairness.simulation import simulate
from bench.fairness.workloads import HOGS, WORKLOADS, Arrival, Workload

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


def test_the_scheduler_stays_whole_on_little_memory() -> None:
    run = simulate(short("waves", 30), device=SMALL, check_every=1)
    assert run.preemptions > 0
    assert sum(len(waits) for waits in run.first_token_s.values()) > 3


def test_ended_arrivals_repeat_where_the_workload_says_so() -> None:
    stream = Arrival(0.0, "a", 8, 4, again=True)
    arrivals = Arrivals([stream, Arrival(1.0, "b", 8, 4)])
    assert list(arrivals.take(0.0)) == [(0, stream)]
    arrivals.ended(stream, 0.5)
    assert arrivals.next_at == 0.5
    assert [(number, a.at, a.tenant) for number, a in arrivals.take(2.0)] == [(2, 0.5, "a"), (1, 1.0, "b")]


def _two_answers(rng: random.Random) -> Iterator[Arrival]:
    yield Arrival(0.0, "a", 200, 20, max_tokens=400)
    yield Arrival(0.0, "b", 200, 20, max_tokens=400)


def test_an_answer_ends_before_its_max_tokens() -> None:
    run = simulate(Workload("two", "", 60.0, _two_answers), device=SMALL)
    assert run.tokens == 2 * (200 + 20)
    assert run.preemptions == 0
    assert run.steps_to_place == {"a": [1], "b": [1]}


@pytest.mark.parametrize(("rule", "places"), [("reserved", [1, 21]), ("as needed", [1, 1])])
def test_reservation_keeps_out_a_request_that_blocks_as_needed_admit(rule: str, places: list[int]) -> None:
    """640 positions hold both of these answers, and not both of what they might become."""
    run = play(Workload("two", "", 60.0, _two_answers), FIRST_COME, rule, device=SMALL)
    assert sorted(run.steps_to_place["a"] + run.steps_to_place["b"]) == places
    assert run.tokens == 2 * (200 + 20)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_baseline_computes_what_was_asked_for(order: str, rule: str) -> None:
    def some(rng: random.Random) -> Iterator[Arrival]:
        for number in range(30):
            yield Arrival(
                number / 50, f"t{number % 3}", rng.randint(1, 200), rng.randint(1, 90), max_tokens=99
            )

    workload = Workload("some", "", 200.0, some)
    run = play(workload, order, rule, device=SMALL)
    assert run.tokens == sum(arrival.prompt + arrival.output for arrival in workload.arrivals())
    assert (run.preemptions > 0) == rule.startswith("as needed")


def test_room_kept_to_grow_spares_preemptions() -> None:
    overload = short("overload", 60)
    run = play(overload, FIRST_COME, "as needed")
    kept = play(overload, FIRST_COME, "as needed, room kept")
    assert kept.preemptions < run.preemptions
    assert kept.tokens_per_s > run.tokens_per_s


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["reserved", "as needed"])
def test_the_policies_to_compare_with_are_what_their_names_say(rule: str) -> None:
    overload = short("overload", 90, (30, 90))
    for order, share in (
        (FIRST_COME, 2 / 3),
        ("round robin", 1 / 2),
        ("plain VTC", 1 / 2),
        ("VTC oracle", 1 / 2),
    ):
        run = play(overload, order, rule)
        assert run.share("faster", overload.window) == pytest.approx(share, abs=0.03)
    away = replace(short("returning", 60), make=_comes_late)
    saved, lifted = play(away, "least counter", rule), play(away, "plain VTC", rule)
    assert saved.share("late", (30, 50)) > 0.7
    assert lifted.share("late", (30, 50)) == pytest.approx(0.5, abs=0.1)


def _comes_late(rng: random.Random) -> Iterator[Arrival]:
    yield from (Arrival(number / 3, "early", 256, 256) for number in range(180))
    yield from (Arrival(30 + number / 30, "late", 256, 256) for number in range(90))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overload", "waves"])
def test_at_overload_the_gap_is_a_twentieth_of_the_bound(name: str) -> None:
    workload = short(name, 120)
    gap = simulate(workload).max_gap
    assert gap is not None
    assert 0 < gap <= 0.05 * bound(Device(), workload)


@pytest.mark.slow
def test_shares_are_by_weight() -> None:
    run = simulate(short("weights", 120))
    for tenant, weight in run.weights.items():
        assert run.share(tenant, (40, 120)) == pytest.approx(weight / 10, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fifty-adapters", "fifty-keys"])
def test_adapters_and_keys_buy_no_share(name: str) -> None:
    run = simulate(short(name, 120))
    assert run.share("fifty", (30, 120)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_returning_tenant_has_no_saved_credit() -> None:
    run = simulate(replace(BY_NAME["returning"], seconds=60, make=_comes_late))
    assert run.share("late", (30, 60)) <= 0.55


@pytest.mark.slow
def test_endless_adapter_swaps_delay_no_tenant_for_ten_seconds() -> None:
    run = simulate(short("many-adapters", 120))
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
        gap = simulate(workload, device=device, seed=seed).max_gap
        worst = max(worst, (gap or 0.0) / bound(device, workload))
    return worst


@pytest.mark.slow
def test_the_gap_of_random_histories_is_within_the_bound() -> None:
    assert 0 < _worst(range(HISTORIES)) <= 1


def test_the_report_names_every_workload_and_policy() -> None:
    workloads = [short(name, 10) for name in ("overload", "many-adapters", HOGS[0].name)]
    runs = {
        w.name: {order: play(w, order, "as needed") for order in ORDERS} | {OURS: simulate(w)}
        for w in workloads
    }
    told = figures(workloads, runs, Device())
    text = tables(told, runs)
    for word in ("overload", "many-adapters", HOGS[0].name, *ORDERS, OURS):
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
        run = simulate(workload, seed=seed, check_every=100)
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
