"""What every limiter holds, whatever keeps its counts. A new one joins with a kit of its own in `KITS`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from loraplex.control.errors import RateLimited
from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.types import Limits, ReachedLimit
from support.control.limiters import Held, LimiterKit, in_process_kit, redis_kit, tenant
from support.control.plane import caller

KITS: dict[str, Callable[[], LimiterKit]] = {"in-process": in_process_kit, "redis": redis_kit}


@pytest.fixture(params=sorted(KITS))
def kit(request: pytest.FixtureRequest) -> Iterator[LimiterKit]:
    made = KITS[request.param]()
    yield made
    made.close()


def test_limiter_has_a_name(kit: LimiterKit) -> None:
    assert kit.limiter.name in KITS


def test_a_minutes_worth_passes_at_once_and_then_one_each_interval(kit: LimiterKit) -> None:
    acme = tenant(requests_per_minute=3)
    held = [kit.reserve(acme) for _ in range(3)]
    assert [one.requests_left for one in held] == [2, 1, 0]
    last = held[2].decision.windows["requests"]
    assert last.limit == 3
    assert last.reset_s == kit.about(60.0)
    assert kit.refused(acme).retry_after_s == kit.about(20.0)
    kit.advance(19)
    assert kit.refused(acme).retry_after_s == kit.about(1.0)
    kit.advance(1 + kit.tolerance_s)
    kit.reserve(acme)
    assert kit.refused(acme).retry_after_s == kit.about(20.0)


def test_a_request_passes_after_exactly_the_wait_that_it_was_told(kit: LimiterKit) -> None:
    rng = random.Random(7)
    acme = tenant(requests_per_minute=17, tokens_per_minute=1009)
    for _ in range(100):
        asked = rng.randint(1, 400)
        try:
            kit.settle(kit.reserve(acme, asked=asked), rng.randint(1, asked + 1))
        except RateLimited as refusal:
            whole = math.ceil(refusal.retry_after_s - 1e-6)
            if refusal.retry_after_s - (whole - 1) > 2 * kit.tolerance_s:  # one second earlier it is too soon
                kit.advance(whole - 1)
                kit.refused(acme, asked=asked)
                kit.advance(1 + kit.tolerance_s)
            else:
                kit.advance(whole + kit.tolerance_s)
            kit.settle(kit.reserve(acme, asked=asked), asked + 1)


def test_unused_tokens_come_back(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000)
    held = kit.reserve(acme, prompt=100, asked=150, n=4)
    assert held.tokens_left == 300
    kit.settle(held, 140)
    assert kit.reserve(acme, prompt=1, asked=1).tokens_left == 1000 - 140 - 2


def test_more_than_was_reserved_is_charged_as_what_was_reserved(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000)
    kit.settle(kit.reserve(acme, prompt=100, asked=100), 900)
    assert kit.reserve(acme, prompt=100, asked=100).tokens_left == 600


@pytest.mark.parametrize(
    ("limit", "kind"),
    [
        ({"requests_per_minute": 1}, "requests"),
        ({"tokens_per_minute": 3}, "tokens"),
        ({"max_concurrency": 1}, "concurrency"),
        ({"max_sequences": 1}, "sequences"),
    ],
)
def test_a_refusal_names_the_limit(kit: LimiterKit, limit: dict[str, int], kind: str) -> None:
    acme = tenant(**limit)
    kit.reserve(acme)
    assert kit.refused(acme).reached == ReachedLimit("tenant", kind)
    free = tenant("free")
    kit.reserve(free, server=Limits(max_concurrency=2))
    assert kit.refused(free, server=Limits(max_concurrency=2)).reached == ReachedLimit(
        "server", "concurrency"
    )


def test_settling_again_changes_nothing(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000, requests_per_minute=10, max_concurrency=2)
    first = kit.reserve(acme, asked=399)
    kit.reserve(acme, asked=399)
    for used in (400, 0, None):
        kit.settle(first, used)
    last = kit.reserve(acme, asked=99)
    assert (last.tokens_left, last.requests_left) == (100, 7)
    assert "at a time" in kit.refused(acme).message


def test_settling_what_was_never_reserved_changes_nothing(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000, max_concurrency=1)
    held = kit.reserve(acme, asked=399)
    kit.settle(Held("nobody", held.plan, held.decision), None)
    assert "at a time" in kit.refused(acme).message


def test_the_same_request_reserved_again_takes_nothing_more(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000, requests_per_minute=10, max_concurrency=2)
    first = kit.reserve(acme, asked=399, request_id="same")
    again = kit.reserve(acme, asked=399, request_id="same")
    assert again.tokens_left == first.tokens_left == 600
    kit.settle(again, 400)
    other = kit.reserve(acme, asked=99)
    assert (other.tokens_left, other.requests_left) == (500, 8)


def test_request_without_any_output_costs_nothing(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000, requests_per_minute=2, max_concurrency=1)
    for _ in range(5):
        held = kit.reserve(acme, asked=999)
        assert (held.tokens_left, held.requests_left) == (0, 1)
        kit.settle(held, None)


def test_replenished_tokens_are_not_refunded_again(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000)
    slow = kit.reserve(acme, asked=999)
    kit.advance(60 + kit.tolerance_s)
    kit.reserve(acme, asked=999)  # the minute's worth of the second minute
    kit.settle(slow, 1)
    assert kit.refused(acme, asked=500).retry_after_s == kit.about(501 * 0.06)


def test_a_long_request_in_a_busy_minute_still_gets_back_what_others_had_to_wait_for(
    kit: LimiterKit,
) -> None:
    acme = tenant(tokens_per_minute=1000)
    slow = kit.reserve(acme, asked=499)
    for _ in range(20):  # the window is never empty
        kit.settle(kit.reserve(acme, asked=99), 100)
        kit.advance(6)
    before = kit.reserve(acme, asked=1)
    kit.settle(slow, 100)
    after = kit.reserve(acme, asked=1)
    assert after.tokens_left - before.tokens_left == pytest.approx(400 - 2, abs=1 + kit.tolerance_s * 17)


def test_a_refused_request_takes_nothing_from_any_limit(kit: LimiterKit) -> None:
    server = Limits(requests_per_minute=5, max_concurrency=9)
    limits = Limits(requests_per_minute=4, max_concurrency=8)
    acme = caller("acme", key_limits=Limits(requests_per_minute=2), tenant_limits=limits)
    for _ in range(2):
        kit.reserve(acme, server=server)
    for _ in range(20):
        assert "The key's limit of 2 requests" in kit.refused(acme, server=server).message
    sibling = caller("acme", key_id="other", tenant_limits=limits)
    for _ in range(2):
        kit.reserve(sibling, server=server)
    assert "The tenant's limit of 4 requests" in kit.refused(sibling, server=server).message
    rival = caller("rival")
    assert kit.reserve(rival, server=server).requests_left == 0
    assert "The server's limit of 5 requests" in kit.refused(rival, server=server).message


def test_places_are_counted_and_come_back(kit: LimiterKit) -> None:
    acme = tenant(max_concurrency=2)
    held = [kit.reserve(acme), kit.reserve(acme)]
    assert kit.refused(acme).retry_after_s == PLACE_RETRY_S
    kit.reserve(tenant("rival", max_concurrency=1))
    kit.settle(held[0], 0)
    kit.reserve(acme)
    kit.refused(acme)


def test_sequences_of_all_requests_are_counted_together_and_taken_all_or_none(kit: LimiterKit) -> None:
    acme = tenant(max_sequences=10, requests_per_minute=100)
    held = [kit.reserve(acme, n=4), kit.reserve(acme, n=4)]
    refusal = kit.refused(acme, n=3)
    assert "The tenant's limit of 10 sequences at a time is reached." in refusal.message
    assert (refusal.retry_after_s, refusal.is_own) == (PLACE_RETRY_S, True)
    held.append(kit.reserve(acme, n=2))
    assert held[2].requests_left == 97, "a refused request takes nothing"
    kit.refused(acme)
    kit.settle(held[0], 0)
    kit.reserve(acme, n=4)
    kit.refused(acme)


def test_sequences_of_key_tenant_and_server_are_taken_together(kit: LimiterKit) -> None:
    server = Limits(max_sequences=6)
    one, other = (
        caller(
            "acme",
            key_id=key,
            key_limits=Limits(max_sequences=3),
            tenant_limits=Limits(max_sequences=5),
        )
        for key in ("one", "other")
    )
    kit.reserve(one, n=3, server=server)
    assert "The key's limit of 3" in kit.refused(one, server=server).message
    assert "The tenant's limit of 5" in kit.refused(other, n=3, server=server).message
    held = kit.reserve(other, n=2, server=server)
    refusal = kit.refused(tenant("rival"), n=2, server=server)
    assert ("The server's limit of 6" in refusal.message, refusal.is_own) == (True, False)
    kit.settle(held, 0)
    kit.reserve(tenant("rival"), n=3, server=server)


def test_a_lowered_or_new_number_of_sequences_counts_those_that_run(kit: LimiterKit) -> None:
    held = [kit.reserve(tenant(), n=3), kit.reserve(tenant(), n=3)]
    kit.refused(tenant(max_sequences=6))
    kit.settle(held[0], 0)
    kit.reserve(tenant(max_sequences=6), n=3)


def test_a_plan_that_passed_tells_when_the_same_would_pass_again(kit: LimiterKit) -> None:
    acme = tenant(requests_per_minute=2)
    assert kit.reserve(acme).decision.again_s == 0
    assert kit.reserve(acme).decision.again_s == kit.about(30.0)
    kit.advance(30 + kit.tolerance_s)
    assert kit.reserve(acme).decision.again_s == kit.about(30.0)


def test_several_reservations_are_settled_together(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=1000, requests_per_minute=3, max_concurrency=3)
    first, second = kit.reserve(acme, asked=399), kit.reserve(acme, asked=399)
    kit.run(kit.limiter.settle(first.request_id, "never reserved", second.request_id, used_tokens=100))
    last = kit.reserve(acme, asked=99)
    assert (last.tokens_left, last.requests_left) == (700, 0)
    kit.run(kit.limiter.settle(first.request_id, last.request_id, used_tokens=None))
    assert kit.reserve(acme, asked=99).tokens_left == 700


def test_the_longest_wait_is_told_where_several_limits_are_reached(kit: LimiterKit) -> None:
    acme = tenant(requests_per_minute=1, max_concurrency=1)
    kit.reserve(acme)
    refusal = kit.refused(acme)
    assert refusal.retry_after_s == kit.about(60.0)
    requests = refusal.windows["requests"]
    assert (requests.limit, requests.remaining) == (1, 0)


def test_window_with_the_least_left_is_reported(kit: LimiterKit) -> None:
    limits = {"key_limits": Limits(tokens_per_minute=500), "tenant_limits": Limits(tokens_per_minute=9000)}
    held = kit.reserve(caller("acme", **limits), asked=99, server=Limits(tokens_per_minute=700))
    tokens = held.decision.windows["tokens"]
    assert (tokens.limit, tokens.remaining) == (500, 400)


def test_limits_of_different_owners_are_apart(kit: LimiterKit) -> None:
    kit.reserve(tenant("a", requests_per_minute=1))
    kit.reserve(tenant("b", requests_per_minute=1))
    # A key and a tenant of the same name, too.
    kit.reserve(caller("x", key_id="a", key_limits=Limits(requests_per_minute=1)))


def test_a_changed_limit_is_in_force_for_the_next_request(kit: LimiterKit) -> None:
    kit.reserve(tenant(requests_per_minute=1))
    kit.refused(tenant(requests_per_minute=1))
    kit.advance(1)
    kit.reserve(tenant(requests_per_minute=1000))
    kit.reserve(tenant())
    held = kit.reserve(tenant(tokens_per_minute=1000), asked=999)
    kit.settle(held, 0)  # under other limits by now
    kit.reserve(tenant(tokens_per_minute=10), asked=9)


def test_a_lowered_rate_applies_to_a_window_that_is_charged_already(kit: LimiterKit) -> None:
    """What is spent stays spent, as a share of the limit; it flows back at the new rate."""
    held = kit.reserve(tenant(tokens_per_minute=1000), asked=499)
    less = tenant(tokens_per_minute=10)
    assert kit.reserve(less, asked=4).tokens_left == 0
    assert kit.refused(less, asked=1).retry_after_s == kit.about(12.0)
    kit.settle(held, 0)
    assert kit.reserve(less, asked=1).tokens_left == 3


def test_lowered_or_new_concurrency_counts_running_requests(kit: LimiterKit) -> None:
    held = [kit.reserve(tenant()) for _ in range(3)]
    kit.refused(tenant(max_concurrency=2))
    kit.settle(held[0], 0)
    kit.refused(tenant(max_concurrency=2))
    kit.settle(held[1], 0)
    kit.reserve(tenant(max_concurrency=2))


def test_the_largest_limit_there_may_be(kit: LimiterKit) -> None:
    acme = tenant(tokens_per_minute=2**53, requests_per_minute=2**53, max_concurrency=2**53)
    kit.settle(kit.reserve(acme, asked=2**40), 1)
    assert kit.reserve(acme).tokens_left > 2**52


@pytest.mark.parametrize("seed", range(3))
def test_no_stretch_of_time_sees_more_than_the_limits_whatever_comes(kit: LimiterKit, seed: int) -> None:
    """Tokens that were really used, requests and places of a tenant with two keys, against plain counts."""
    rng = random.Random(seed)
    requests, tokens, places = rng.randint(1, 30), rng.randint(20, 2000), rng.randint(1, 6)
    sequences = rng.randint(1, 9)
    limits = Limits(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        max_concurrency=places,
        max_sequences=sequences,
    )
    keys = [caller("acme", key_id=f"k{i}", tenant_limits=limits) for i in range(2)]
    server = Limits(tokens_per_minute=2 * tokens)
    now = 0.0
    held: list[tuple[Held, float]] = []
    spent: list[tuple[float, int]] = []
    waits: list[float] = []
    for _ in range(60):
        passed = rng.choice([0.0, 0.1, 1.0, 7.0, 30.0]) * rng.random()
        kit.advance(passed)
        now += passed
        if held and rng.random() < 0.5:
            reservation, at = held.pop(rng.randrange(len(held)))
            used = rng.randint(0, reservation.plan.tokens)
            kit.settle(reservation, used)
            spent.append((at, used))
        try:
            n = rng.randint(1, min(3, tokens, sequences))
            asked = rng.randint(1, tokens // n)
            prompt = rng.randint(0, tokens - n * asked)
            made = kit.reserve(rng.choice(keys), prompt=prompt, asked=asked, n=n, server=server)
        except RateLimited as refusal:
            waits.append(refusal.retry_after_s)
            continue
        held.append((made, now))
        assert len(held) <= places
        assert sum(one.plan.held["sequences"] for one, _ in held) <= sequences
    assert all(0 < wait <= PERIOD_S + kit.tolerance_s for wait in waits)
    spent += [(at, reservation.plan.tokens) for reservation, at in held]
    spent.sort()
    for first, (start, _) in enumerate(spent):
        for last in range(first, len(spent)):
            room = 1 + (spent[last][0] - start + 60 * kit.tolerance_s) / PERIOD_S
            assert last - first + 1 <= requests * room + 1e-6
            assert sum(used for _, used in spent[first : last + 1]) <= tokens * room + 1e-6
