"""The arms of a release side by side, against numpy's figures."""

from __future__ import annotations

import random
from datetime import timedelta
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Usage
from loraplex.control.intervals import wilson_interval
from loraplex.control.usage import arms
from loraplex.control.usage.arms import ArmSummary, Bounds, Quantiles, compare_arms, quantile_bounds
from loraplex.control.usage.records import CANCELLED, Ended
from support.control.plane import ControlPlane
from support.control.usage import AT, ended


def write(database: Database, rows: list[Ended]) -> None:
    names = [name for name in Ended.__struct_fields__ if name != "key_hash"]
    with database.write() as session:
        values = [{name: getattr(row, name) for name in names} for row in rows]
        session.execute(database.insert(Usage), values)


def compared(database: Database, *versions: int, since: Any = AT) -> list[ArmSummary]:
    with database.read(report=True) as session:
        return compare_arms(session, "acme", "support", versions, since)


def row(version: int = 2, **changes: Any) -> Ended:
    return ended(**{"adapter": "support", "version": version, "completion_tokens": 11} | changes)


def test_times_have_the_quantiles_of_their_rows(plane: ControlPlane) -> None:
    chance = random.Random(3)
    rows = []
    for _ in range(257):
        first, n, tokens = chance.lognormvariate(-1, 1), chance.choice((1, 3)), chance.randint(2, 400)
        total = first + chance.uniform(0.01, 0.1) * tokens
        rows.append(row(first_token_s=first, total_s=total, n=n, completion_tokens=n * tokens))
    write(plane.database, rows)
    (arm,) = compared(plane.database, 2)
    firsts = sorted(r.first_token_s or 0 for r in rows)
    assert arm.first_token_s is not None
    assert arm.first_token_s[:2] == pytest.approx(np.quantile(firsts, [0.5, 0.95]))
    assert arm.first_token_s.p50_bounds == quantile_bounds(firsts, 0.5)
    assert arm.first_token_s.p95_bounds == quantile_bounds(firsts, 0.95)
    per_token = [(r.total_s - (r.first_token_s or 0)) / (r.completion_tokens / r.n - 1) for r in rows]
    assert arm.inter_token_s is not None
    assert arm.inter_token_s[:2] == pytest.approx(np.quantile(per_token, [0.5, 0.95]))
    lengths = [r.completion_tokens / r.n for r in rows]
    assert arm.output_tokens == pytest.approx(np.mean(lengths))
    assert arm.output_length is not None
    assert arm.output_length[:2] == pytest.approx(np.quantile(lengths, [0.5, 0.95]))


def test_failures_are_the_versions_own(plane: ControlPlane) -> None:
    statuses = ["stop"] * 5 + ["length"] * 2 + ["internal_error"] * 3 + [CANCELLED, "server_overloaded"]
    write(plane.database, [row(status=status) for status in statuses])
    (arm,) = compared(plane.database, 2)
    assert (arm.requests, arm.failures, arm.failure_share) == (12, 3, 0.3)
    assert arm.failure_interval == wilson_interval(3, 10)
    assert arm.length_share == pytest.approx(2 / 7)
    assert arm.length_interval == wilson_interval(2, 7)


@pytest.mark.parametrize(("hits", "count"), [(0, 50), (1, 1), (3, 10), (17, 9000)])
def test_bounds_are_where_the_score_test_of_a_share_begins_to_reject(hits: int, count: int) -> None:
    z2, share = NormalDist().inv_cdf(0.975) ** 2, hits / count
    # The roots of (share - p)^2 = z^2 p (1 - p) / count.
    bounds = np.roots([1 + z2 / count, -2 * share - z2 / count, share**2])
    assert wilson_interval(hits, count) == pytest.approx(sorted(bounds), abs=1e-9)


@pytest.mark.parametrize(("share", "count"), [(0.5, 12), (0.5, 200), (0.95, 90), (0.95, 1500)])
def test_bounds_hold_a_quantile_as_often_as_they_say(share: float, count: int) -> None:
    chance, true = np.random.default_rng(7), NormalDist().inv_cdf(share)
    held = 0
    for _ in range(2000):
        low, high = quantile_bounds(sorted(chance.normal(size=count)), share)
        held += (low is None or low <= true) and (high is None or true <= high)
    assert 0.94 <= held / 2000 <= 0.985


def test_few_observations_bound_no_quantile() -> None:
    assert quantile_bounds([1.0, 2.0, 3.0], 0.5) == (None, None)
    assert quantile_bounds([1.0, 2.0, 3.0], 0.95) == (2.0, None)
    # Six of six on one side of the median are seen in 1.6 % of samples, five of five in 3.1 %.
    assert quantile_bounds([float(n) for n in range(5)], 0.5) == (None, None)
    assert quantile_bounds([float(n) for n in range(6)], 0.5) == (0.0, 5.0)


def test_each_arm_has_its_own_rows_in_the_order_asked_for(plane: ControlPlane) -> None:
    write(
        plane.database,
        [
            *(row(1, first_token_s=0.25) for _ in range(3)),
            row(2, first_token_s=0.75, completion_tokens=1),
            row(2, adapter="other"),
            row(2, tenant_id="rival"),
            row(2, at=AT - timedelta(microseconds=1)),
        ],
    )
    second, first, third = compared(plane.database, 2, 1, 3)
    assert (second.version, first.version, third.version) == (2, 1, 3)
    assert (first.requests, first.first_token_s) == (3, Quantiles(0.25, 0.25, Bounds(), Bounds(0.25, None)))
    assert (second.requests, second.first_token_s, second.inter_token_s) == (1, Quantiles(0.75, 0.75), None)
    assert third == ArmSummary(3, 0, 0, None, None, None, None, None, None)


def test_the_newest_rows_are_read(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "MAX_ROWS", 4)
    write(plane.database, [row(at=AT + timedelta(seconds=n), first_token_s=float(n)) for n in range(10)])
    (arm,) = compared(plane.database, 2)
    assert arm.first_token_s is not None
    assert (arm.requests, arm.first_token_s[:2]) == (4, pytest.approx((7.5, 8.85)))
