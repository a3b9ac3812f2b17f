"""Limits of a request: what is charged and what can never fit; the in-process limiter's own memory."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from loraplex.control.db.database import Database
from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import SWEEP_EVERY, InProcessLimiter
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import NO_LIMITS, Limits
from support.control.limiters import tenant, whole_plan
from support.control.plane import FakeClock, caller


def plan(
    limits: dict[str, int],
    prompt: int = 1,
    asked: int | None = 1,
    n: int = 1,
    server: Limits = NO_LIMITS,
) -> LimitPlan:
    return whole_plan(
        tenant(**limits), server, prompt_tokens=prompt, asked_tokens=asked, default_tokens=256, n=n
    )


def no_budgets() -> Budgets:
    """Nobody has one: the database is never asked."""
    return Budgets(BudgetStore(Database("sqlite://")), _nobody)


async def _nobody(*_: Any) -> Any:
    raise AssertionError("the database was asked")


def test_tokens_are_prompts_and_every_answer() -> None:
    made = plan({"tokens_per_minute": 1000}, prompt=100, asked=150, n=4)
    assert (made.tokens, made.output_tokens) == (700, 150)
    assert [(charge.owner.kind, charge.what, charge.limit, charge.cost) for charge in made.rates] == [
        ("tenant", "tokens", 1000, 700)
    ]


def test_key_tenant_and_server_are_charged_each_for_itself() -> None:
    who = caller(
        "acme", key_limits=Limits(requests_per_minute=1), tenant_limits=Limits(requests_per_minute=2)
    )
    made = whole_plan(
        who,
        Limits(requests_per_minute=3, max_concurrency=7),
        prompt_tokens=1,
        asked_tokens=1,
        default_tokens=1,
        n=1,
    )
    assert [(charge.owner.kind, charge.owner.id, charge.limit) for charge in made.rates] == [
        ("key", "key-acme", 1),
        ("tenant", "acme", 2),
        ("server", "", 3),
    ]
    assert [place.limits["concurrency"] for place in made.places] == [None, None, 7]


@pytest.mark.parametrize(
    ("limits", "asked", "param"),
    [
        ({"max_output_tokens": 10}, {"asked": 11}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 50, "asked": 51}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 50, "asked": 26, "n": 2}, "max_tokens"),
        ({"tokens_per_minute": 100}, {"prompt": 100, "asked": None}, "messages"),
        ({"tokens_per_minute": 100}, {"prompt": 100, "asked": 1}, "messages"),
        ({"tokens_per_minute": 100}, {"prompt": 101, "asked": 0}, "messages"),
        ({}, {"prompt": 101, "asked": 0, "server": Limits(tokens_per_minute=100)}, "messages"),
    ],
)
def test_impossible_requests_are_told_apart_from_early_ones(
    limits: dict[str, int], asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(NeverFits) as caught:
        plan(limits, **asked)
    assert (caught.value.code, caught.value.param) == ("invalid_value", param)


def test_a_prompt_that_is_only_scored_may_take_the_whole_limit() -> None:
    made = plan({"tokens_per_minute": 100}, prompt=100, asked=0)
    assert (made.tokens, made.output_tokens) == (100, 0)


def test_default_length_is_cut_to_the_limits() -> None:
    assert plan({}, asked=None).output_tokens == 256
    assert plan({"max_output_tokens": 64}, asked=None).output_tokens == 64
    assert plan({"tokens_per_minute": 100}, prompt=40, asked=None, n=2).output_tokens == 30
    both = {"tokens_per_minute": 100, "max_output_tokens": 20}
    assert plan(both, prompt=40, asked=None, n=2).output_tokens == 20


async def test_a_reservation_is_the_requests_own_and_says_how_long_its_answers_may_be() -> None:
    limits = RequestLimits(InProcessLimiter(), no_budgets(), server=Limits(tokens_per_minute=100))
    asked: dict[str, Any] = {"prompt_tokens": 40, "asked_tokens": None, "default_tokens": 256, "n": 1}
    admission = await limits.admit("internal-1", caller("acme"))
    held = await limits.reserve(admission, caller("acme"), **asked)
    assert (admission.request_id, held.max_output_tokens) == ("internal-1", 60)
    assert (held.windows["tokens"].limit, held.windows["tokens"].remaining) == (100, 0)
    for _ in range(2):
        await limits.settle(admission, used_tokens=50)
    with pytest.raises(RateLimited) as refused:
        await limits.reserve(await limits.admit("internal-2", caller("rival")), caller("rival"), **asked)
    assert "The server's limit" in refused.value.message


ASKED: dict[str, Any] = {"prompt_tokens": 1, "asked_tokens": 9, "default_tokens": 1, "n": 1}


async def test_an_admitted_request_costs_one_of_its_rate_unless_all_is_given_back() -> None:
    clock = FakeClock()
    limits = RequestLimits(InProcessLimiter(clock=clock), no_budgets(), clock=clock)
    acme = tenant(requests_per_minute=2)
    for number in range(5):
        await limits.settle(await limits.admit(f"given back {number}", acme), used_tokens=None)
    first = await limits.admit("first", acme)
    assert (first.windows["requests"].remaining, limits.again_s(first)) == (1, 0)
    await limits.settle(first, used_tokens=0)
    second = await limits.admit("second", acme)
    assert limits.again_s(second) == pytest.approx(30)
    with pytest.raises(RateLimited) as refused:
        await limits.admit("third", acme)
    assert refused.value.retry_after_s == pytest.approx(30)
    await limits.settle(second, used_tokens=None)
    await limits.settle(await limits.admit("third", acme), used_tokens=0)


async def test_refusal_by_other_limits_reports_remaining_requests() -> None:
    limiter = InProcessLimiter()
    limits = RequestLimits(limiter, no_budgets())
    acme = tenant(requests_per_minute=3, tokens_per_minute=10, max_sequences=4)
    admission = await limits.admit("first", acme)
    await limits.reserve(admission, acme, **ASKED)
    await limits.settle(admission, used_tokens=10)
    admission = await limits.admit("second", acme)
    with pytest.raises(RateLimited, match="10 tokens a minute") as refused:
        await limits.reserve(admission, acme, **ASKED)
    assert refused.value.is_own
    assert (refused.value.windows["requests"].remaining, refused.value.windows["tokens"].remaining) == (1, 0)
    await limits.settle(admission, used_tokens=0)
    assert limiter.num_live == 0


async def test_caller_without_a_request_rate_is_admitted_without_the_limiter() -> None:
    limiter = InProcessLimiter()
    limits = RequestLimits(limiter, no_budgets())
    admission = await limits.admit("r", tenant(tokens_per_minute=10))
    assert (admission.windows, limiter.num_live) == ({}, 0)


def test_more_sequences_than_may_ever_run_never_fit() -> None:
    assert plan({"max_sequences": 4}, n=4).held["sequences"] == 4
    with pytest.raises(
        NeverFits, match="5 sequences were asked for at once; the tenant's limit is 4"
    ) as caught:
        plan({"max_sequences": 4}, n=5)
    assert caught.value.param == "n"
    with pytest.raises(NeverFits, match="the server's limit is 4"):
        plan({}, n=5, server=Limits(max_sequences=4))


async def test_limiter_forgets_idle_tenants() -> None:
    clock = FakeClock()
    limiter = InProcessLimiter(clock=clock)
    for number in range(SWEEP_EVERY):
        clock.advance(0.1)
        one = tenant(f"t{number}", requests_per_minute=60, tokens_per_minute=1000, max_concurrency=1)
        made = whole_plan(one, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=1)
        await limiter.reserve(str(number), made)
        await limiter.settle(str(number), used_tokens=2)
    assert limiter.num_live == 0
    assert len(limiter._windows) + len(limiter._running) < 1000


async def test_many_that_come_and_fail_leave_no_place_taken() -> None:
    limiter = InProcessLimiter()
    limits = RequestLimits(limiter, no_budgets(), server=Limits(max_concurrency=10))
    asked: dict[str, Any] = {"prompt_tokens": 1, "asked_tokens": 5, "default_tokens": 1, "n": 1}
    most = running = 0

    async def request(seed: int) -> None:
        nonlocal most, running
        rng = random.Random(seed)
        one = tenant(f"t{seed % 3}", max_concurrency=4, tokens_per_minute=10**6)
        for turn in range(20):
            try:
                held = await limits.admit(f"{seed}-{turn}", one)
                await limits.reserve(held, one, **asked)
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
                await limits.settle(held, used_tokens=rng.choice([None, 0, 3, 6]))

    tasks = [asyncio.create_task(request(seed)) for seed in range(60)]
    for task in tasks[::7]:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 10
    assert limiter.num_live == 0
    for name in ("t0", "t1", "t2"):
        for turn in range(3):
            one = tenant(name, max_concurrency=4)
            await limits.reserve(await limits.admit(f"{name}-{turn}", one), one, **asked)
