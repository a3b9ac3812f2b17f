"""Limits: one decision over key, tenant and server, exact refunds, true waits; against a model that keeps it all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.gcra import PERIOD_S, RateWindow
from loraplex.control.limits import SWEEP_EVERY, InProcessLimiter
from loraplex.control.types import Limits, Principal, Reservation
from support.control import FakeClock, caller


class Harness:
    """A limiter on a clock moved by hand; calls are plain functions."""

    def __init__(self, server: Limits | None = None) -> None:
        self.clock = FakeClock()
        self.limiter = InProcessLimiter(server=server or Limits(), clock=self.clock)
        self._runner = asyncio.Runner()

    def reserve(
        self, principal: Principal, prompt: int = 1, asked: int | None = 1, default: int = 256, n: int = 1
    ) -> Reservation:
        return self._runner.run(
            self.limiter.reserve(
                principal, prompt_tokens=prompt, asked_tokens=asked, default_tokens=default, n=n
            )
        )

    def settle(self, reservation: Reservation, used: int) -> None:
        self._runner.run(self.limiter.settle(reservation, used_tokens=used))

    def close(self) -> None:
        self._runner.close()

    def refused(self, principal: Principal, **asked: Any) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.reserve(principal, **asked)
        return caught.value


@pytest.fixture
def limiter() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.close()


def tenant(name: str = "acme", **limits: int) -> Principal:
    return caller(name, tenant_limits=Limits(**limits))


def test_a_minutes_worth_passes_at_once_and_then_one_each_interval(limiter: Harness) -> None:
    acme = tenant(requests_per_minute=3)
    windows = [limiter.reserve(acme).requests for _ in range(3)]
    assert [window.remaining for window in windows if window] == [2, 1, 0]
    assert windows[2] is not None
    assert windows[2].reset_s == 60.0
    assert limiter.refused(acme).retry_after_s == pytest.approx(20.0)
    limiter.clock.advance(19.99)
    assert limiter.refused(acme).retry_after_s == pytest.approx(0.01)
    limiter.clock.advance(0.01)
    limiter.reserve(acme)
    assert limiter.refused(acme).retry_after_s == pytest.approx(20.0)


def test_a_request_passes_after_exactly_the_wait_that_it_was_told(limiter: Harness) -> None:
    rng = random.Random(7)
    acme = tenant(requests_per_minute=17, tokens_per_minute=1009)
    for _ in range(200):
        asked = rng.randint(1, 400)
        try:
            limiter.settle(limiter.reserve(acme, asked=asked), used=rng.randint(1, asked + 1))
        except RateLimited as refusal:
            wait = refusal.retry_after_s
            limiter.clock.advance(wait * 0.99)
            limiter.refused(acme, asked=asked)
            limiter.clock.advance(wait * 0.01 + 1e-9)
            limiter.settle(limiter.reserve(acme, asked=asked), used=asked + 1)


def test_tokens_are_prompt_and_every_choice_and_what_was_not_used_comes_back(limiter: Harness) -> None:
    acme = tenant(tokens_per_minute=1000)
    held = limiter.reserve(acme, prompt=100, asked=150, n=4)
    assert held.tokens is not None
    assert held.tokens.remaining == 300
    assert held.max_output_tokens == 150
    limiter.settle(held, used=140)
    again = limiter.reserve(acme, prompt=1, asked=1)
    assert again.tokens is not None
    assert again.tokens.remaining == 1000 - 140 - 2


def test_settling_twice_gives_back_once(limiter: Harness) -> None:
    acme = tenant(tokens_per_minute=1000, max_concurrency=2)
    first = limiter.reserve(acme, asked=400)
    limiter.reserve(acme, asked=400)
    for _ in range(3):
        limiter.settle(first, used=401)
    limiter.reserve(acme, asked=100)
    assert "at a time" in limiter.refused(acme).message
    assert limiter.limiter.num_live == 2


def test_what_has_flowed_back_already_is_not_given_back_again(limiter: Harness) -> None:
    acme = tenant(tokens_per_minute=1000)
    slow = limiter.reserve(acme, asked=999)
    limiter.clock.advance(60)
    limiter.reserve(acme, asked=999)  # the minute's worth of the second minute
    limiter.settle(slow, used=1)
    assert limiter.refused(acme, asked=500).retry_after_s == pytest.approx(501 * 0.06)


def test_a_long_request_in_a_busy_minute_still_gets_back_what_others_had_to_wait_for(
    limiter: Harness,
) -> None:
    acme = tenant(tokens_per_minute=1000)
    slow = limiter.reserve(acme, asked=499)
    for _ in range(20):  # the window is never empty
        limiter.settle(limiter.reserve(acme, asked=99), used=100)
        limiter.clock.advance(6)
    before = limiter.reserve(acme, asked=1).tokens
    limiter.settle(slow, used=100)
    after = limiter.reserve(acme, asked=1).tokens
    assert before is not None
    assert after is not None
    assert after.remaining - before.remaining == 400 - 2


def test_a_refused_request_takes_nothing_from_any_limit() -> None:
    with closing(Harness(server=Limits(requests_per_minute=5, max_concurrency=9))) as limiter:
        _refuse_on_each_level(limiter)


def _refuse_on_each_level(limiter: Harness) -> None:
    key = Limits(requests_per_minute=2)
    acme = caller("acme", key_limits=key, tenant_limits=Limits(requests_per_minute=4, max_concurrency=8))
    limiter.reserve(acme)
    limiter.reserve(acme)
    for _ in range(50):
        assert "The key's limit of 2 requests" in limiter.refused(acme).message
    sibling = caller("acme", key_id="other", tenant_limits=acme.tenant_limits)
    limiter.reserve(sibling)
    limiter.reserve(sibling)
    assert "The tenant's limit of 4 requests" in limiter.refused(sibling).message
    limiter.reserve(caller("rival"))
    assert "The server's limit of 5 requests" in limiter.refused(caller("rival")).message
    assert limiter.limiter.num_live == 5


def test_places_are_counted_and_come_back(limiter: Harness) -> None:
    acme = tenant(max_concurrency=2)
    held = [limiter.reserve(acme), limiter.reserve(acme)]
    assert limiter.refused(acme).retry_after_s == 1.0
    limiter.reserve(tenant("rival", max_concurrency=1))
    limiter.settle(held[0], used=0)
    limiter.reserve(acme)
    limiter.refused(acme)


def test_the_longest_wait_is_told_where_several_limits_are_reached(limiter: Harness) -> None:
    acme = tenant(requests_per_minute=1, max_concurrency=1)
    limiter.reserve(acme)
    refusal = limiter.refused(acme)
    assert refusal.retry_after_s == pytest.approx(60.0)
    assert refusal.requests is not None
    assert (refusal.requests.limit, refusal.requests.remaining) == (1, 0)


@pytest.mark.parametrize(
    ("limits", "asked", "param"),
    [
        ({"max_output_tokens": 10}, {"asked": 11}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 50, "asked": 51}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 50, "asked": 26, "n": 2}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 100, "asked": None}, None),
    ],
)
def test_what_can_never_fit_is_told_apart_from_what_must_wait(
    limiter: Harness, limits: dict[str, int], asked: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(NeverFits) as caught:
        limiter.reserve(tenant(**limits), **asked)
    assert caught.value.code == "invalid_value"
    assert param is None or caught.value.param == param
    assert limiter.limiter.num_live == 0


def test_what_was_not_asked_for_is_cut_to_what_the_limits_allow(limiter: Harness) -> None:
    assert limiter.reserve(tenant(), asked=None).max_output_tokens == 256
    assert limiter.reserve(tenant("a", max_output_tokens=64), asked=None).max_output_tokens == 64
    cut = limiter.reserve(tenant("b", tokens_per_minute=100), prompt=40, asked=None, n=2)
    assert cut.max_output_tokens == 30


def test_a_changed_limit_is_in_force_for_the_next_request(limiter: Harness) -> None:
    limiter.reserve(tenant(requests_per_minute=1))
    limiter.refused(tenant(requests_per_minute=1))
    limiter.clock.advance(1)
    limiter.reserve(tenant(requests_per_minute=1000))
    limiter.reserve(tenant())
    held = limiter.reserve(tenant(tokens_per_minute=1000), asked=999)
    limiter.settle(held, used=0)  # under other limits by now
    limiter.reserve(tenant(tokens_per_minute=10), asked=9)


def test_nothing_is_kept_of_those_who_went_away(limiter: Harness) -> None:
    for number in range(SWEEP_EVERY):
        limiter.clock.advance(0.1)
        one = tenant(f"t{number}", requests_per_minute=60, tokens_per_minute=1000, max_concurrency=1)
        limiter.settle(limiter.reserve(one), used=2)
    assert limiter.limiter.num_live == 0
    assert limiter.limiter.num_tracked < 1000


async def test_many_that_come_and_fail_leave_no_place_taken() -> None:
    limiter = InProcessLimiter(server=Limits(max_concurrency=10))
    most = running = 0

    async def request(seed: int) -> None:
        nonlocal most, running
        rng = random.Random(seed)
        one = caller(f"t{seed % 3}", tenant_limits=Limits(max_concurrency=4, tokens_per_minute=10**6))
        for _ in range(20):
            try:
                held = await limiter.reserve(one, prompt_tokens=1, asked_tokens=5, default_tokens=1, n=1)
            except RateLimited:
                await asyncio.sleep(0)
                continue
            running += 1
            most = max(most, running)
            try:
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    raise ConnectionError
            except ConnectionError:
                pass
            finally:
                running -= 1
                await limiter.settle(held, used_tokens=rng.randint(0, 6))

    tasks = [asyncio.create_task(request(seed)) for seed in range(60)]
    for task in tasks[::7]:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 10
    assert limiter.num_live == 0
    for name in ("t0", "t1", "t2"):
        one = caller(name, tenant_limits=Limits(max_concurrency=4))
        for _ in range(3):
            await limiter.reserve(one, prompt_tokens=1, asked_tokens=5, default_tokens=1, n=1)


@dataclass
class Replay:
    """The same window without any cleverness: all charges there ever were, gone through from the first each time."""

    charges: list[list[float]] = field(default_factory=list)

    def tat(self) -> float:
        tat = float("-inf")
        for at, seconds in self.charges:
            tat = max(tat, at) + seconds
        return tat


_EVENTS = st.lists(
    st.tuples(
        st.floats(0, 40, allow_nan=False),  # time that passes
        st.integers(1, 60),  # seconds of the period that are asked for
        st.floats(0, 1),  # the part of them that is used
        st.integers(0, 7),  # which of those held is settled afterwards; most numbers settle none
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(_EVENTS)
def test_a_window_is_what_it_would_be_had_only_what_was_used_been_charged(events: list[Any]) -> None:
    window, replay, now = RateWindow(), Replay(), 0.0
    held: dict[str, tuple[list[float], float]] = {}
    for number, (passed, seconds, used, settled) in enumerate(events):
        now += passed
        wait = window.wait(seconds, now)
        assert wait == pytest.approx(max(0.0, max(replay.tat(), now) + seconds - PERIOD_S - now), abs=1e-6)
        if wait == 0.0:
            window.charge(seconds, now, f"r{number}")
            replay.charges.append([now, float(seconds)])
            held[f"r{number}"] = (replay.charges[-1], seconds * (1 - used))
        if settled < len(held):
            name = list(held)[settled]
            charge, unused = held.pop(name)
            window.give_back(name, unused)
            charge[1] -= unused
        assert window.spent(now) == pytest.approx(min(max(0.0, replay.tat() - now), PERIOD_S), abs=1e-6)
    # Whatever was settled when: in no stretch of time more than a period's worth and what flowed back meanwhile.
    for first, (start, _) in enumerate(replay.charges):
        total = 0.0
        for at, seconds in replay.charges[first:]:
            total += seconds
            assert total <= PERIOD_S + (at - start) + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(20, 2000), st.integers(1, 6))
def test_no_stretch_of_time_sees_more_than_the_limits_whatever_comes(
    seed: int, requests: int, tokens: int, places: int
) -> None:
    """Tokens that were really used, requests and places of a tenant with two keys, against plain counts."""
    with closing(Harness(server=Limits(tokens_per_minute=2 * tokens))) as limiter:
        _check_stretches(limiter, random.Random(seed), requests, tokens, places)


def _check_stretches(limiter: Harness, rng: random.Random, requests: int, tokens: int, places: int) -> None:
    limits = Limits(requests_per_minute=requests, tokens_per_minute=tokens, max_concurrency=places)
    keys = [caller("acme", key_id=f"k{i}", tenant_limits=limits, key_limits=Limits()) for i in range(2)]
    spent: list[tuple[float, int]] = []
    held: list[tuple[Reservation, float, int]] = []
    waits: list[float] = []
    for _ in range(80):
        limiter.clock.advance(rng.choice([0.0, 0.1, 1.0, 7.0, 30.0]) * rng.random())
        now = limiter.clock()
        if held and rng.random() < 0.5:
            reservation, at, most = held.pop(rng.randrange(len(held)))
            used = rng.randint(0, most)
            limiter.settle(reservation, used=used)
            spent.append((at, used))
        try:
            asked = rng.randint(1, tokens)
            prompt = rng.randint(0, tokens - asked)
            made = limiter.reserve(rng.choice(keys), prompt=prompt, asked=asked)
        except RateLimited as refusal:
            waits.append(refusal.retry_after_s)
            continue
        held.append((made, now, prompt + asked))
        assert len(held) <= places
    assert limiter.limiter.num_live == len(held)
    assert all(0 < wait <= PERIOD_S + 1e-6 for wait in waits)
    spent += [(at, most) for _, at, most in held]
    spent.sort()
    for first, (start, _) in enumerate(spent):
        for last in range(first, len(spent)):
            room = 1 + (spent[last][0] - start) / PERIOD_S
            assert last - first + 1 <= requests * room + 1e-6
            assert sum(used for _, used in spent[first : last + 1]) <= tokens * room + 1e-6
