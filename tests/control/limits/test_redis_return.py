"""A server, or Redis, comes back: what was held, spent and lost meanwhile is charged once."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_link import TAG
from loraplex.control.types import NO_LIMITS
from support.control.limiters import SharedLimits, request_plan, tenant, whole_plan
from support.faults.tcp_proxy import TcpProxy


async def test_silent_servers_reservations_come_back_and_count_again_on_return(
    shared: SharedLimits,
) -> None:
    with TcpProxy(shared.redis.port) as proxy:
        (cut_off,) = await shared.servers(1, port=proxy.port)
        (one,) = await shared.servers(1)
        acme = tenant(tokens_per_minute=1000, max_concurrency=2)
        await cut_off.reserve("a", request_plan(acme, 600))
        await cut_off.reserve("b", request_plan(acme, 200))
        proxy.hang()
        shared.links[0].patience_s = 0.0
        shared.advance(14)
        await one.beat()
        with pytest.raises(RateLimited):
            await one.reserve("c", request_plan(acme))
        shared.advance(2)
        await one.beat()
        held = await one.reserve("c", request_plan(acme, 100))
        assert held.windows["tokens"].remaining == 900
        # It was not dead, and what it runs counts again.
        await cut_off.beat()
        proxy.carry()
        shared.go_on()
        await shared.together()
        assert shared.running() == 3
        with pytest.raises(RateLimited, match="at a time"):
            await one.reserve("d", request_plan(acme))
        await cut_off.settle("a", used_tokens=100)
        await cut_off.settle("b", used_tokens=100)
        await one.settle("c", used_tokens=100)
        assert shared.running() == 0
        held = await one.reserve("d", request_plan(acme, 100))
        assert held.windows["tokens"].remaining == 600  # the first two count as if they had come now


async def test_silent_servers_sequences_come_back_and_count_again_on_return(
    shared: SharedLimits,
) -> None:
    acme = tenant(max_sequences=8)

    def sequences(n: int) -> LimitPlan:
        return whole_plan(acme, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=n)

    with TcpProxy(shared.redis.port) as proxy:
        (cut_off,) = await shared.servers(1, port=proxy.port)
        (one,) = await shared.servers(1)
        await cut_off.reserve("a", sequences(6))
        with pytest.raises(RateLimited, match="limit of 8 sequences at a time"):
            await one.reserve("b", sequences(3))
        proxy.hang()
        shared.links[0].patience_s = 0.0
        shared.advance(16)
        await one.beat()
        await one.reserve("b", sequences(8))
        await cut_off.beat()
        proxy.carry()
        shared.go_on()
        await shared.together()
        await one.settle("b", used_tokens=1)
        with pytest.raises(RateLimited):
            await one.reserve("c", sequences(3))
        await one.reserve("c", sequences(2))
        await cut_off.settle("a", used_tokens=1)
        await one.settle("c", used_tokens=1)
    assert shared.redis.client.keys(f"{TAG}:sequences:*") == []


async def test_outage_spending_is_charged_once_however_often_it_is_reported(shared: SharedLimits) -> None:
    """Redis hears it, and its answers come too late."""
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("a", request_plan(acme, 100))
    await one.settle("a", used_tokens=100)
    shared.links[0].reach = "late"
    shared.go_on()
    for number in range(3):
        before = shared.links[0].num_late
        async with asyncio.timeout(60):
            while shared.links[0].num_late < before + 2:
                await asyncio.sleep(0.005)
        await one.reserve(f"b{number}", request_plan(acme, 10))
        await one.settle(f"b{number}", used_tokens=10)
    shared.links[0].reach = "answers"
    await shared.together()
    held = await other.reserve("c", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 1000 - 100 - 30 - 100


async def test_requests_that_outlive_the_outage_are_settled_in_redis(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("runs", request_plan(acme, 300))
    await one.reserve("ended", request_plan(acme, 200))
    await one.settle("ended", used_tokens=50)
    await one.reserve("nothing", request_plan(acme, 100))
    await one.settle("nothing", used_tokens=None)
    shared.go_on()
    await shared.together()
    held = await other.reserve("a", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 1000 - 300 - 50 - 100
    await one.settle("runs", used_tokens=100)
    held = await other.reserve("b", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 1000 - 100 - 50 - 200


@pytest.mark.parametrize("loses_data", [False, True])
async def test_outage_spending_counts_in_the_next_outage_too(shared: SharedLimits, loses_data: bool) -> None:
    """Or each would bring a whole share again. No server asked Redis for this tenant in between."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("ended", request_plan(acme, 500))
    await one.settle("ended", used_tokens=500)
    await one.reserve("runs", request_plan(acme, 400))
    shared.go_on()
    await shared.together()
    if loses_data:
        shared.redis.kill()
        await one.beat()
        shared.redis.start()
        shared.tell_time()
        await shared.together()
        with pytest.raises(RateLimited, match="1000 tokens a minute"):
            await one.reserve("late", request_plan(acme, 101))
    else:
        await shared.hang_for(0)
        with pytest.raises(LimitsUnavailable, match="1000 tokens a minute"):
            await one.reserve("late", request_plan(acme, 101))
    await one.reserve("fits", request_plan(acme, 100))


async def test_a_request_whose_answer_crosses_with_a_joining_is_charged(shared: SharedLimits) -> None:
    """Redis lets it pass before the server joins for the second time, and the server hears of it only after."""
    (one,) = await shared.servers(1)
    (link,), (watch,) = shared.links, shared.watches
    acme = tenant(tokens_per_minute=1000)
    await one.reserve("before", request_plan(acme, 300))
    await one.settle("before", used_tokens=300)
    link.reach = "away"
    await shared.noticed()
    link.permits = {"tell": asyncio.Semaphore(1), "reserve": asyncio.Semaphore(0)}
    link.reach = "answers"
    async with asyncio.timeout(60):
        while not watch.up:
            await asyncio.sleep(0.005)
        joined = shared.joined()
        crossing = asyncio.create_task(one.reserve("crossing", request_plan(acme, 200)))
        while not shared.running():
            await asyncio.sleep(0.005)
        link.permits.pop("tell").release()
        while shared.joined() == joined:
            await asyncio.sleep(0.005)
        link.permits.pop("reserve").release()
        await crossing
    assert shared.running() == 1
    held = await one.reserve("after", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 1000 - 300 - 200 - 100
    await one.settle("crossing", "after", used_tokens=0)
    assert shared.running() == 0


async def test_an_outage_longer_than_a_minute_forgets_what_has_flowed_back(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=600)
    await one.reserve("before", request_plan(acme, 600))
    await shared.hang_for(0)
    with pytest.raises(LimitsUnavailable):
        await one.reserve("now", request_plan(acme, 1))
    for minute in range(3):
        shared.clock.advance(60)
        await one.reserve(f"m{minute}", request_plan(acme, 600))
        await one.settle(f"m{minute}", used_tokens=600)
    shared.clock.advance(30)
    shared.go_on()
    await shared.together()
    held = await one.reserve("after", request_plan(acme, 1))
    assert held.windows["tokens"].remaining == 299


async def test_a_redis_that_lost_its_data_is_told_what_it_knew(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000, requests_per_minute=10, max_concurrency=3)
    await one.reserve("a", request_plan(acme, 300))
    await other.reserve("b", request_plan(acme, 300))
    await other.settle("b", used_tokens=200)
    shared.redis.kill()
    for limiter in (one, other):
        await limiter.beat()
    shared.redis.start()
    shared.tell_time()
    await shared.together()
    held = await one.reserve("c", request_plan(acme, 100))
    assert (held.windows["requests"].remaining, held.windows["tokens"].remaining) == (7, 400)
    await other.reserve("d", request_plan(acme, 100))
    with pytest.raises(RateLimited, match="at a time"):
        await one.reserve("e", request_plan(acme, 100))
    # What was seen stays spent until it flows back: nobody can say any more what of it was whose.
    await one.settle("a", used_tokens=0)
    held = await one.reserve("e", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 200
