"""The last hour in memory: slices by a fake clock, what is kept of many tenants, its size and what counting takes."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest

from loraplex.control.history.figures import FIRST_TOKEN_S, GAP_S
from loraplex.control.history.history import SLICE_S, History, Report, Span
from loraplex.control.history.slices import (
    MAX_ADAPTERS,
    MAX_TENANTS,
    OPEN_ADAPTERS,
    OPEN_FAILING,
    OPEN_TENANTS,
)

MOST_BYTES = 16_000_000
MOST_OF_A_CORE = 0.002
RATE = 100
"""Requests a second at which counting may take `MOST_OF_A_CORE`."""


@dataclass
class Clocks:
    """Both clocks of a history; a slice and a minute begin at their start."""

    now: float = 6000.0
    wall: float = 1_800_000_000.0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def history(clocks: Clocks) -> History:
    return History("here", clock=lambda: clocks.now, wall_clock=lambda: clocks.wall)


def requests(history: History, span: Span = "5m") -> list[int]:
    return [figures.requests for _, figures in history.past(span).report().slices]


def rows(report: Report) -> dict[tuple[str, ...], int]:
    """Requests by tenant, and by tenant, adapter and version."""
    found: dict[tuple[str, ...], int] = {(row.tenant,): row.figures.requests for row in report.tenants}
    return found | {
        (row.tenant, row.adapter, str(row.version)): row.figures.requests for row in report.adapters
    }


def test_a_slice_is_told_once_it_has_ended(history: History, clocks: Clocks) -> None:
    history.count("acme", ("support", 1))
    clocks.pass_time(9.9)
    history.count("acme", ("support", 1))
    assert requests(history) == [0] * 30
    clocks.pass_time(0.1)
    history.count("acme", ("support", 1))
    report = history.past("5m").report()
    assert [figures.requests for _, figures in report.slices] == [0] * 29 + [2]
    assert report.slices[-1][0].timestamp() == clocks.wall - 10
    assert report.total.requests == 2
    assert rows(report) == {("acme",): 2, ("acme", "support", "1"): 2}


def test_the_rings_wrap(history: History, clocks: Clocks) -> None:
    for second in range(0, 4000, 5):
        for _ in range(1 + second // 10 % 7):
            history.count("acme", None)
        clocks.pass_time(5)
    expected = [2 * (1 + number % 7) for number in range(400)]
    assert requests(history) == expected[-30:]
    by_minute = [sum(expected[start : start + 6]) for start in range(0, 400, 6)]
    assert requests(history, "1h") == by_minute[-61:-1]  # of 400 slices the last four are of an open minute
    assert history.past("1h").report().tenants[0].figures.requests == sum(by_minute[-61:-1])


def test_what_is_too_old_is_told_no_more(history: History, clocks: Clocks) -> None:
    history.count("acme", None)
    clocks.pass_time(60)
    history.count("acme", None)
    clocks.pass_time(240)
    assert sum(requests(history)) == 2
    clocks.pass_time(10)
    assert sum(requests(history)) == 1
    clocks.pass_time(3600 - 310)
    assert sum(requests(history, "1h")) == 2
    clocks.pass_time(60)
    assert sum(requests(history, "1h")) == 1
    clocks.pass_time(60)
    assert sum(requests(history, "1h")) == 0


def test_clocks_that_jump(history: History, clocks: Clocks) -> None:
    """The monotonic clock orders; the wall's clock only says when that was."""
    history.count("acme", None)
    clocks.now -= 500
    history.count("acme", None)
    clocks.now += 510
    clocks.wall -= 86_400
    report = history.past("5m").report()
    assert [figures.requests for _, figures in report.slices][-1] == 2
    assert report.slices[-1][0].timestamp() == clocks.wall - 10
    clocks.now += 40 * 86_400  # a machine that slept
    assert sum(requests(history)) == sum(requests(history, "1h")) == 0
    history.count("acme", None)
    clocks.pass_time(60)
    assert sum(requests(history)) == sum(requests(history, "1h")) == 1


def test_each_figure(history: History, clocks: Clocks) -> None:
    counted: list[dict[str, Any]] = [
        {"computed": 7, "cached": 3, "output": 5, "first_token_s": 0.3, "gap_s": 0.025},
        {"computed": 1, "output": 2, "failed": True, "first_token_s": 0.3},
        {"limited": True},
    ]
    for one in counted:
        history.count("acme", ("support", 2), **one)
    clocks.pass_time(SLICE_S)
    (row,) = history.past("5m").report().adapters
    told = row.figures
    assert (told.requests, told.errors, told.limited) == (3, 1, 1)
    assert (told.computed_tokens, told.cached_tokens, told.output_tokens) == (8, 3, 7)
    # Within the bucket that has both: of 0.2 to 0.4 s, and of 20 to 30 ms.
    assert (told.first_token_seconds, told.first_token_p95_seconds) == pytest.approx((0.3, 0.39))
    assert (told.gap_seconds, told.gap_p95_seconds) == pytest.approx((0.025, 0.0295))


@pytest.mark.parametrize(("told", "bounds"), [("first_token", FIRST_TOKEN_S), ("gap", GAP_S)])
def test_quantiles_are_in_the_bucket_of_the_true_ones(
    history: History, clocks: Clocks, told: str, bounds: tuple[float, ...]
) -> None:
    values = [bounds[0] / 2 * 1.11**number for number in range(80)]
    for value in values:
        history.count("acme", None, **{f"{told}_s": value})
    history.count("acme", None)
    clocks.pass_time(SLICE_S)
    total = history.past("5m").report().total
    for found, part in (
        (getattr(total, f"{told}_seconds"), 0.5),
        (getattr(total, f"{told}_p95_seconds"), 0.95),
    ):
        true = values[int(part * len(values)) - 1]
        above = [bound for bound in bounds if bound >= true]
        low = max((bound for bound in bounds if bound < true), default=0.0)
        assert low <= found <= (above[0] if above else bounds[-1]), (true, found)


def test_nothing_measured_is_no_time(history: History, clocks: Clocks) -> None:
    history.count("acme", None)
    clocks.pass_time(SLICE_S)
    total = history.past("5m").report().total
    assert (total.first_token_seconds, total.gap_p95_seconds) == (None, None)


def test_one_tenant_or_one_adapter(history: History, clocks: Clocks) -> None:
    for tenant, adapter, times in (("acme", "a", 3), ("acme", "b", 2), ("rival", "a", 5)):
        for _ in range(times):
            history.count(tenant, (adapter, 1))
    history.count("acme", None, limited=True)  # before its adapter was known
    clocks.pass_time(SLICE_S)
    past = history.past("5m")
    of_acme = past.report(tenant="acme")
    assert rows(of_acme) == {("acme",): 6, ("acme", "a", "1"): 3, ("acme", "b", "1"): 2}
    assert (of_acme.total.requests, of_acme.slices[-1][1].requests) == (6, 6)
    assert (of_acme.other_adapters.requests, of_acme.other_adapters.limited) == (1, 1)
    named = past.report(adapter="a")
    assert rows(named) == {("acme", "a", "1"): 3, ("rival", "a", "1"): 5}
    assert (named.total.requests, named.tenants) == (8, [])
    assert rows(past.report(tenant="rival", adapter="a")) == {("rival", "a", "1"): 5}
    assert past.report(tenant="nobody").total.requests == 0


def test_the_worst_come_first(history: History, clocks: Clocks) -> None:
    for number, name in enumerate("abcd"):
        for time_s in range(4):
            history.count(
                "acme",
                (name, 1),
                failed=time_s < number,
                limited=time_s < 3 - number,
                output=10 * (number % 2),
                first_token_s=0.1 * (1 + (number + 2) % 4),
            )
    clocks.pass_time(SLICE_S)
    past = history.past("5m")

    def order(sort: Any) -> str:
        return "".join(row.adapter for row in past.report(sort=sort).adapters)

    assert (order("errors"), order("limited")) == ("dcba", "abcd")
    assert (order("tokens"), order("first_token"), order("requests")) == ("bdac", "abdc", "abcd")
    assert order("error_rate") == "dcba"
    two = past.report(limit=2)
    assert [row.adapter for row in two.adapters] == ["d", "c"]
    assert (two.other_adapters.requests, two.other_adapters.errors) == (8, 1)


def test_the_largest_part_that_failed_is_no_single_request(history: History, clocks: Clocks) -> None:
    """One of two may be chance; a fifth of a hundred is none, and is more than a tenth of a thousand."""
    for name, every, number in (("single", 2, 2), ("small", 5, 100), ("large", 10, 1000)):
        for at in range(number):
            history.count("acme", (name, 1), failed=at % every == 0)
    clocks.pass_time(SLICE_S)
    past = history.past("5m")

    def order(sort: Any) -> list[str]:
        return [row.adapter for row in past.report(sort=sort).adapters]

    assert order("error_rate") == ["small", "single", "large"]
    assert order("errors") == ["large", "small", "single"]


def test_of_many_the_largest_and_the_worst_are_exact(history: History, clocks: Clocks) -> None:
    """The others are in the sums; an adapter that fails is told, though it is the smallest and the last to come."""
    number = OPEN_ADAPTERS + 500
    for name in range(number):
        for _ in range(3 if name < 20 else 1):
            history.count(f"t{name % 200}", (f"a{name}", 1))
    history.count("late", ("broken", 1), failed=True)
    clocks.pass_time(60)
    for span in ("5m", "1h"):
        report = history.past(span).report(limit=500)
        assert not report.exact
        assert report.total.requests == number + 41
        found = rows(report)
        assert (report.adapters[0].adapter, report.adapters[0].figures.errors) == ("broken", 1)
        assert all(found[f"t{name}", f"a{name}", "1"] == 3 for name in range(20))
        assert len(history.past(span).report(limit=1000).adapters) == MAX_ADAPTERS
        assert len(report.tenants) == MAX_TENANTS
        assert (
            sum(row.figures.requests for row in report.adapters) + report.other_adapters.requests
            == number + 41
        )


@pytest.mark.parametrize("failed", [False, True])
def test_one_tenants_versions_leave_others_their_rows(history: History, clocks: Clocks, failed: bool) -> None:
    """A tenant that comes after hundreds of another one's, each larger, has its rows in every span."""
    for version in range(2 * (OPEN_ADAPTERS + OPEN_FAILING)):
        for _ in range(3):
            history.count("loud", ("support", version + 1), failed=failed)
    for number in range(20):
        history.count("quiet", (f"a{number}", 1), failed=failed)
    clocks.pass_time(60)
    for span in ("5m", "1h"):
        report = history.past(span).report(tenant="quiet")
        assert not report.exact
        assert len(report.adapters) == 20
        assert report.total.requests == 20
        assert len(history.past(span).report(limit=1000).adapters) == MAX_ADAPTERS


def test_a_request_of_nobody_is_in_the_sums_alone(history: History, clocks: Clocks) -> None:
    history.count("", None, failed=True)
    history.count("acme", None)
    clocks.pass_time(SLICE_S)
    report = history.past("5m").report()
    assert (report.total.requests, report.total.errors) == (2, 1)
    assert rows(report) == {("acme",): 1}
    assert (report.other_tenants.errors, report.exact) == (1, True)


def names(slice_number: int, count: int, length: int) -> list[str]:
    """Other names in each slice."""
    return [f"{slice_number:05}-{number:05}-".ljust(length, "x") for number in range(count)]


@pytest.mark.slow
def test_an_hour_is_at_most_16_mb(clocks: Clocks) -> None:
    """All rows that there is room for, in each slice of tenants and adapters that no other slice has, with names of the
    longest kind and counts of every bucket."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    history = History("here", clock=lambda: clocks.now, wall_clock=lambda: clocks.wall)
    firsts, gaps = itertools.cycle([*FIRST_TOKEN_S, 99.0]), itertools.cycle([*GAP_S, 9.0])
    for number in (*range(0, 331, 6), *range(331, 361)):  # one slice of a minute, and all of the last minutes
        clocks.now = 6000.0 + number * SLICE_S
        tenants = names(number, OPEN_TENANTS + OPEN_FAILING, 63)
        adapters = names(number, OPEN_ADAPTERS + OPEN_FAILING, 63)
        for place, adapter in enumerate(adapters):
            history.count(
                tenants[place % len(tenants)],
                (adapter, 999_999_999),
                failed=place >= OPEN_TENANTS,
                computed=100_000,
                cached=100_000,
                output=100_000,
                first_token_s=next(firsts),
                gap_s=next(gaps),
            )
    past = history.past("1h")
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"an hour of {MAX_TENANTS} tenants and {MAX_ADAPTERS} adapters in each slice: {taken / 1e6:.1f} MB")
    assert sum(one is not None for one in past.slices) == 60
    assert taken <= MOST_BYTES


@pytest.mark.slow
def test_counting_takes_a_fifth_of_a_percent_of_a_core(history: History, clocks: Clocks) -> None:
    """The best of three times 100 s, of requests to 500 adapters of 40 tenants, slices closed on the way, by the
    processor time of this thread."""
    asked = [(f"tenant-{number % 40}", (f"adapter-{number}", 1)) for number in range(500)]
    parts = [_part_of_a_core(history, clocks, asked) for _ in range(3)]
    began = time.thread_time()
    report = history.past("5m").report()
    read_s = time.thread_time() - began
    print(
        f"counting at {RATE} requests a second: {100 * min(parts):.3f} % of a core; a report: {1000 * read_s:.0f} ms"
    )
    assert report.exact
    assert min(parts) <= MOST_OF_A_CORE


def _part_of_a_core(history: History, clocks: Clocks, asked: list[tuple[str, tuple[str, int]]]) -> float:
    """Counting 100 s of requests over the 100 s."""
    seconds = 100
    began = time.thread_time()
    for number in range(seconds * RATE):
        tenant, adapter = asked[number * 7919 % len(asked)]
        history.count(
            tenant,
            adapter,
            failed=number % 50 == 0,
            computed=300,
            cached=100,
            output=200,
            first_token_s=0.001 * (number % 1000),
            gap_s=0.0001 * (number % 500),
        )
        clocks.pass_time(1 / RATE)
    return (time.thread_time() - began) / seconds
