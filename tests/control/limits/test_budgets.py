"""Token budgets: leased in slices to servers, never overspent, given back; on both databases."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from loraplex.control.errors import DatabaseUnavailable, InvalidKey, NeverFits, QuotaSpent, RateLimited
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.periods import period_end, period_start
from loraplex.control.limits.plan import BudgetCharge, Owner, plan_request
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import NO_LIMITS, BudgetPeriod, Limits, ReachedLimit
from support.control.budgets import SLICE_S, Replica, World, charge
from support.control.plane import ControlPlane, caller
from support.virtual_time import VirtualTimeLoop


@pytest.fixture
def world(plane: ControlPlane) -> Iterator[World]:
    made = World(plane.database)
    yield made
    made.close()


@pytest.fixture
def one(world: World) -> Replica:
    return world.replica()


def test_spent_and_left_tokens_can_be_read(world: World, one: Replica) -> None:
    assert (world.state(1000).spent, world.state(1000).left) == (0, 1000)
    name = one.take(charge(100))
    assert world.state(1000).spent == 0
    assert world.state(1000).held >= 100
    one.settle(name, 30)
    one.settle(name, 100)  # a second time it does nothing
    one.report()
    one.report()
    seen = world.state(1000)
    assert (seen.limit, seen.spent, seen.held, seen.left) == (1000, 30, 0, 970)
    assert (seen.ends_at or seen.starts_at) - seen.starts_at == timedelta(days=1)


def test_a_request_takes_from_the_slice_that_is_here_without_asking(one: Replica) -> None:
    for _ in range(100):
        one.use(charge(100, limit=10**6))
    assert one.asked <= 8
    one.take(charge(100, limit=10**6))
    one.take(charge(100, limit=10**6))


def test_a_slice_is_a_part_of_what_is_left(world: World, one: Replica) -> None:
    one.take(charge(100))
    assert world.promised() <= 100 + 900 // 8
    one.take(charge(600))
    assert world.promised() <= 700 + 300 // 8


def test_spent_budget_is_reported_and_nothing_is_consumed(world: World, one: Replica) -> None:
    one.use(charge(900))
    for _ in range(3):
        with pytest.raises(QuotaSpent) as refused:
            one.take(charge(101))
        world.clock.advance(2)
    assert refused.value.code == "insufficient_quota"
    assert refused.value.reached == ReachedLimit("tenant", "budget")
    assert "has 100 tokens left" in refused.value.message
    assert "It begins again at 2027-01-16 00:00 UTC" in refused.value.message
    one.use(charge(100))
    with pytest.raises(QuotaSpent):
        one.take(charge(1))


def test_a_spent_budget_costs_the_database_one_question_a_second(world: World, one: Replica) -> None:
    one.use(charge(1000))
    asked = one.asked
    for _ in range(50):
        with pytest.raises(QuotaSpent):
            one.take(charge(1))
        world.clock.advance(0.1)
    assert one.asked - asked <= 6


def test_tokens_held_by_other_servers_may_be_waited_for(world: World, one: Replica) -> None:
    held = one.take(charge(900))
    other = world.replica()
    with pytest.raises(RateLimited) as refused:
        other.take(charge(200))
    assert refused.value.retry_after_s == 1.0
    one.settle(held, 10)
    one.report()
    one.report()
    world.clock.advance(1)
    other.use(charge(200))


def test_servers_share_a_budget_to_the_last_token(world: World) -> None:
    replicas = [world.replica() for _ in range(4)]
    spent, cost = 0, 7
    for replica in itertools.cycle(replicas):
        try:
            replica.use(charge(cost))
            spent += cost
        except RateLimited:  # others hold the rest: they tell that they do not need it
            for other in replicas:
                other.report()
            world.clock.advance(1)
        except QuotaSpent:
            if cost == 1:
                break
            cost = 1
        assert world.promised() <= 1000
    assert spent == 1000
    for replica in replicas:
        world.clock.advance(1)
        with pytest.raises(QuotaSpent):
            replica.take(charge(1))
        replica.close()
    assert (world.state(1000).spent, world.state(1000).left) == (1000, 0)


def test_a_killed_servers_slice_comes_back_and_what_it_spent_does_not(world: World) -> None:
    killed, other = world.replica(), world.replica()
    killed.use(charge(200))
    killed.report()
    for _ in range(3):
        killed.take(charge(200))  # they never end
    world.clock.advance(SLICE_S + 1)
    with pytest.raises(QuotaSpent):
        other.take(charge(801))  # what the killed one had said that it might spend counts as spent
    world.clock.advance(2)
    other.use(charge(100))
    other.report()
    assert 300 <= world.state(1000).spent <= 1000
    assert world.promised() <= 1000


def test_an_idle_server_that_is_killed_loses_nothing(world: World) -> None:
    killed = world.replica()
    killed.use(charge(200), used=150)
    killed.report()
    killed.report()
    world.clock.advance(SLICE_S + 1)
    world.replica().use(charge(850))


def test_tokens_returned_by_a_killed_server_do_not_count_as_spent(world: World, one: Replica) -> None:
    """It was told that it might be spent, and given to another since."""
    for cost in (100, 150, 200):
        one.use(charge(cost), 10)
    world.clock.advance(SLICE_S / 2 + 1)
    one.use(charge(5))  # of a new share: the old one is too old to be used
    other = world.replica()
    other.take(charge(800))
    for _ in range(2):
        world.clock.advance(SLICE_S / 2 + 1)
        other.report()
    assert world.promised() <= 1000
    other.close()


def test_a_server_that_comes_back_late_tells_what_it_really_spent(world: World) -> None:
    away, other = world.replica(), world.replica()
    held = away.take(charge(300))
    away.reach = "away"
    away.settle(held, 100)
    world.clock.advance(SLICE_S + 1)
    other.use(charge(10))
    away.reach = "answers"
    away.report()
    away.close()
    other.close()
    assert world.state(1000).spent == 110


def test_slice_serves_while_the_database_is_away_and_then_requests_are_refused(
    world: World, one: Replica
) -> None:
    one.use(charge(10, limit=10**6))
    one.reach = "away"
    one.use(charge(10, limit=10**6))
    with pytest.raises(DatabaseUnavailable) as refused:
        one.take(charge(10**5, limit=10**6))
    assert refused.value.retry_after_s > 0
    world.clock.advance(SLICE_S / 2)
    with pytest.raises(DatabaseUnavailable):
        one.take(charge(10, limit=10**6))
    one.reach = "answers"
    one.use(charge(10, limit=10**6))
    one.close()
    assert world.state(10**6).spent == 30


def test_an_answer_that_is_lost_counts_nothing_twice(world: World, one: Replica) -> None:
    one.reach = "lost"
    for _ in range(3):
        with pytest.raises(DatabaseUnavailable):
            one.take(charge(10))
    one.reach = "answers"
    one.use(charge(10))
    one.reach = "lost"
    one.report()
    one.report()
    one.close()
    one.reach = "answers"
    one.use(charge(10))
    one.close()
    assert world.state(1000).spent == 20


def test_a_lowered_budget_holds_from_the_next_request(world: World, one: Replica) -> None:
    one.use(charge(100, limit=10**6))
    with pytest.raises(QuotaSpent):
        one.take(charge(100, limit=150))
    one.use(charge(50, limit=150))
    assert world.promised() <= 150
    one.use(charge(100, limit=10**6))


def test_a_raised_budget_is_there_at_once(one: Replica) -> None:
    one.use(charge(1000))
    with pytest.raises(QuotaSpent):
        one.take(charge(10))
    one.take(charge(10, limit=2000))


@pytest.mark.parametrize(("period", "seconds"), [("hour", 3600.0), ("day", 86400.0), ("month", 31 * 86400.0)])
def test_a_new_period_begins_with_the_whole_budget(
    world: World, one: Replica, period: BudgetPeriod, seconds: float
) -> None:
    one.use(charge(1000, period=period))
    still_running = one.take(charge(10, period="forever"))
    world.clock.advance(1)
    with pytest.raises(QuotaSpent):
        one.take(charge(1, period=period))
    world.clock.advance(seconds)
    one.use(charge(1000, period=period))
    one.settle(still_running, 10)
    one.close()
    assert world.state(1000, period).spent == 1000
    assert world.state(1000, "forever").spent == 10


def test_request_is_charged_to_the_period_in_which_it_began(world: World, one: Replica) -> None:
    held = one.take(charge(1000))
    world.clock.advance(86400)
    one.use(charge(600))
    one.settle(held, 1000)
    one.close()
    assert world.state(1000).spent == 600


def test_budget_without_a_period_never_renews(world: World, one: Replica) -> None:
    one.use(charge(1000, period="forever"))
    world.clock.advance(10 * 366 * 86400)
    with pytest.raises(QuotaSpent) as refused:
        one.take(charge(1, period="forever"))
    assert "1000 tokens in all" in refused.value.message
    assert "anew" not in refused.value.message


@pytest.mark.parametrize(
    ("now", "period", "start", "end"),
    [
        ((2027, 1, 31, 23, 59, 59), "month", (2027, 1, 1), (2027, 2, 1)),
        ((2028, 2, 29, 0, 0, 0), "month", (2028, 2, 1), (2028, 3, 1)),
        ((2027, 12, 5, 3, 4, 5), "month", (2027, 12, 1), (2028, 1, 1)),
        ((2027, 3, 31, 23, 0, 0), "day", (2027, 3, 31), (2027, 4, 1)),
        ((2027, 3, 31, 23, 1, 2), "hour", (2027, 3, 31, 23), (2027, 4, 1)),
    ],
)
def test_periods_are_those_of_the_calendar(
    now: tuple[int, ...], period: BudgetPeriod, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    begun = period_start(period, datetime(*now, tzinfo=UTC))  # type: ignore[misc]
    assert begun == datetime(*start, tzinfo=UTC)  # type: ignore[misc]
    assert period_end(period, begun) == datetime(*end, tzinfo=UTC)  # type: ignore[misc]


def test_budgets_of_key_tenant_and_server_are_taken_together_or_not_at_all(
    world: World, one: Replica
) -> None:
    key, server = Owner("key", "k1"), Owner("server", "")
    all_three = (charge(10, limit=50, owner=key), charge(10), charge(10, limit=95, owner=server))
    for _ in range(5):
        one.settle(one.take(*all_three), 10)
    with pytest.raises(QuotaSpent, match="The key's budget of 50 tokens a day"):
        one.take(*all_three)
    for _ in range(4):
        one.settle(one.take(*all_three[1:]), 10)
    world.clock.advance(2)
    with pytest.raises(QuotaSpent, match="The server's budget"):
        one.take(*all_three[1:])
    one.close()
    assert world.state(50, owner=key).spent == 50
    assert world.state(1000).spent == 90
    assert world.state(95, owner=server).spent == 90


def test_budget_is_deleted_with_its_tenant(world: World, one: Replica, plane: ControlPlane) -> None:
    one.use(charge(900))
    plane.tenants.delete("acme")
    with pytest.raises(InvalidKey):
        one.take(charge(200))
    one.report()
    one.close()
    assert world.promised() == 0


def test_many_at_once_ask_the_database_together(world: World, one: Replica) -> None:
    async def burst() -> list[Any]:
        takes = (one.budgets.take_budget(f"b{i}", [charge(10)]) for i in range(150))
        return await asyncio.gather(*takes, return_exceptions=True)

    outcomes = one._run(burst())
    assert outcomes.count(None) == 100
    assert one.asked <= 5
    assert world.promised() == 1000


def test_a_database_that_does_not_answer_is_waited_for_once(world: World) -> None:
    """For a second at most; those who come later are not kept waiting, and it serves again when it answers."""
    answers = asyncio.Event()

    async def ask(function: Callable[..., Any], *args: Any) -> Any:
        await answers.wait()
        return function(*args)

    async def history() -> None:
        store = BudgetStore(world.database, now=lambda _: world.clock.now())
        budgets = Budgets(store, ask, clock=world.clock)
        loop = asyncio.get_running_loop()
        waited = []
        for number in range(3):
            began = loop.time()
            with pytest.raises(DatabaseUnavailable):
                await budgets.take_budget(f"r{number}", [charge(10)])
            waited.append(loop.time() - began)
            await asyncio.sleep(0.05)
        assert waited == [pytest.approx(1.0), 0.0, 0.0]
        assert budgets.num_live == 0
        answers.set()
        await asyncio.sleep(0.05)
        await budgets.take_budget("later", [charge(10)])
        await budgets.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(history())


def test_request_refused_by_the_limiter_takes_nothing_from_a_budget(world: World, one: Replica) -> None:
    limits = RequestLimits(InProcessLimiter(), one.budgets)
    who = caller("acme", tenant_limits=Limits(token_budget=1000, budget_period="day", max_concurrency=1))
    asked: dict[str, Any] = {"prompt_tokens": 10, "asked_tokens": 90, "default_tokens": 1, "n": 1}

    async def requests() -> None:
        admission = await limits.admit("a", who)
        await limits.reserve(admission, who, **asked)
        with pytest.raises(RateLimited):
            await limits.reserve(await limits.admit("b", who), who, **asked)
        assert one.budgets.num_live == 1
        await limits.settle(admission, used_tokens=40)

    one._run(requests())
    one.close()
    assert world.state(1000).spent == 40


def test_request_larger_than_a_budget_is_refused_at_once() -> None:
    who = caller("acme", tenant_limits=Limits(token_budget=100, budget_period="month"))
    asked: dict[str, Any] = {"prompt_tokens": 50, "default_tokens": 256, "n": 2}
    with pytest.raises(NeverFits, match="100 tokens a month"):
        plan_request(who, NO_LIMITS, asked_tokens=26, **asked)
    made = plan_request(who, NO_LIMITS, asked_tokens=None, **asked)
    assert made.output_tokens == 25
    assert made.budgets == (BudgetCharge(Owner("tenant", "acme"), "acme", 100, "month", 100),)
