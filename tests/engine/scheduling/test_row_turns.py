"""Decoding sequences of a tenant take turns where their rows would fill a step that another tenant waits for."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.scheduling.test_step_bound import LONG, MAX_S, bench, predicted, streaming
from loraplex.engine.scheduling.timing.step_bound import ROWS_SHARE
from support.engine.scheduler_bench import Bench, sizes

SLOW_S = 0.03
"""A bound whose share for rows holds some of sixty."""


def turns(made: Bench, steps: int) -> Counter[str]:
    """How many rows each sequence had in these steps. No step is longer than the share of rows."""
    had: Counter[str] = Counter()
    for _ in range(steps):
        plan = made.plan()
        made.collect(plan)
        assert predicted(plan) <= ROWS_SHARE * SLOW_S + 1e-3
        had.update(sizes(plan))
    return had


def test_a_tenants_rows_take_turns_beside_another_tenants_one() -> None:
    made = bench(SLOW_S)
    streaming(made, "acme", 60)
    streaming(made, "chat")
    had = turns(made, 60)
    assert had.pop("chat0") == 60, "another tenant's row is in every step"
    assert len(had) == 60
    assert max(had.values()) - min(had.values()) <= 1
    assert min(had.values()) > 10


def test_rows_of_a_tenant_alone_are_all_in_every_step() -> None:
    made = bench(SLOW_S)
    streaming(made, "acme", 60)
    assert len(made.step()) == 60


def test_each_tenant_has_a_row_in_every_step_however_long_that_takes() -> None:
    made = bench(0.012)
    for number in range(40):
        made.add(f"r{number}", 1, 1000, tenant=f"t{number}", first=10**6 + 50 * number)
        made.step()
    assert len(made.step()) == 40


def test_weights_divide_the_rows() -> None:
    made = bench(SLOW_S)
    for tenant, weight in (("acme", 1.0), ("beta", 3.0)):
        for number in range(30):
            first = 10**6 + 50 * len(made.live)
            made.add(f"{tenant}{number}", 1, 10**4, tenant=tenant, weight=weight, first=first)
    while not all(seq.num_outputs for seq in made.live.values()):
        made.step()
    had = turns(made, 30)
    acme, beta = (sum(had[f"{tenant}{number}"] for number in range(30)) for tenant in ("acme", "beta"))
    assert beta == pytest.approx(3 * acme, rel=0.1)


def test_a_prompt_beside_many_rows_of_one_tenant_gets_as_long_as_these_rows() -> None:
    made = bench(SLOW_S)
    streaming(made, "acme", 60)
    made.add("long", LONG, tenant="chat")
    for _ in range(20):
        plan = made.plan()
        made.collect(plan)
        assert sizes(plan)["long"] > 1
        assert predicted(plan) <= 2 * ROWS_SHARE * SLOW_S + 1e-3


def test_sequences_end_and_come_while_others_take_turns() -> None:
    made = bench(SLOW_S)
    streaming(made, "chat")
    streaming(made, "acme", 60)
    for number in range(0, 60, 2):
        made.finish(made.live[f"acme{number}"])
        made.add(f"new{number}", 1, 10**4, tenant="acme", first=10**7 + 50 * number)
        made.step()
    had = turns(made, 60)
    assert len(had) == 61
    of_acme = [rows for name, rows in had.items() if name != "chat0"]
    assert max(of_acme) - min(of_acme) <= 1


def test_rows_that_fit_take_no_turns() -> None:
    made = bench(MAX_S)
    streaming(made, "acme", 40)
    streaming(made, "chat")
    assert len(made.step()) == 41
