"""Limits that several servers share in one Redis, while it answers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from loraplex.control.errors import LimitsNotShared, RateLimited
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import RedisLink, redis_script
from loraplex.control.limits.redis_messages import Caller, Reply, Reserve, rates_of, seats_of
from support.control.limit_watch import PatientLink, Watch
from support.control.limiters import SharedLimits, request_plan, tenant, with_clock_of_tests


async def test_servers_share_every_limit(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(requests_per_minute=10, tokens_per_minute=1000, max_concurrency=3)
    await one.reserve("a", request_plan(acme, 400))
    held = await other.reserve("b", request_plan(acme, 500))
    assert (held.windows["requests"].remaining, held.windows["tokens"].remaining) == (8, 100)
    with pytest.raises(RateLimited, match="1000 tokens"):
        await one.reserve("c", request_plan(acme, 101))
    await one.reserve("c", request_plan(acme, 100))
    with pytest.raises(RateLimited, match="at a time"):
        await other.reserve("d", request_plan(acme))
    await one.settle("a", used_tokens=0)
    await other.reserve("d", request_plan(acme, 400))


async def test_refund_leaves_later_charges(shared: SharedLimits) -> None:
    """It began when it came, and not when the one before it would have ended."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await one.reserve("first", request_plan(acme, 500))
    shared.advance(20)
    await one.reserve("second", request_plan(acme, 100))
    await one.settle("second", used_tokens=100)
    await one.settle("first", used_tokens=None)
    held = await one.reserve("third", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == 800


async def test_a_clock_that_is_set_back_gives_nothing_away(shared: SharedLimits) -> None:
    """The limit is spent then; and still is, except what flows back, when a request ends that came later."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await one.reserve("a", request_plan(acme, 1000))
    shared.advance(-10)
    with pytest.raises(RateLimited):
        await one.reserve("b", request_plan(acme, 1))
    shared.advance(6)
    await one.reserve("b", request_plan(acme, 100))
    await one.settle("b", used_tokens=100)
    with pytest.raises(RateLimited):
        await one.reserve("c", request_plan(acme, 1))


async def test_a_server_that_ends_leaves_nothing(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000, max_concurrency=1)
    await one.reserve("a", request_plan(acme, 1000))
    await one.close()
    await other.reserve("b", request_plan(acme, 1000))
    await other.beat()
    assert shared.watches[1].replicas == 1


@pytest.mark.parametrize("used", [None, 100])
async def test_a_request_that_redis_took_too_late_leaves_what_it_used(
    shared: SharedLimits, used: int | None
) -> None:
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000, max_concurrency=1)
    shared.hang()
    await one.reserve("late", request_plan(acme, 500))  # is in Redis' buffer, too
    await one.settle("late", used_tokens=used)
    shared.go_on()
    await shared.together()
    held = await one.reserve("next", request_plan(acme, 100))
    assert held.windows["tokens"].remaining == (900 if used is None else 800)
    assert shared.running() == 1


async def test_a_call_of_an_earlier_joining_does_nothing(shared: SharedLimits) -> None:
    """It lay in a buffer of a Redis that hung, and this server has given it up since."""
    await shared.servers(1)
    ((replica, number),) = shared.joined().items()
    link = PatientLink(shared.redis.url, with_clock_of_tests(redis_script()))
    await link.connect()
    for name, joining in (("early", str(int(number) - 1)), ("now", number)):
        caller = Caller(replica, joining, -1.0, 0)
        late = Reserve(
            caller,
            name,
            rates_of(request_plan(tenant())),
            seats_of(request_plan(tenant())),
            request_plan(tenant()).held,
        )
        reply = msgspec.msgpack.decode(
            await link.call("reserve", msgspec.msgpack.encode(late), 10.0), type=Reply
        )
        assert reply.status == ("unknown" if name == "early" else "ok")
        assert shared.running() == (name == "now")
    await link.close()


async def test_scripts_that_somebody_flushed_are_brought_again(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    await one.reserve("a", request_plan(tenant()))
    shared.redis.client.script_flush()
    await asyncio.gather(*(one.reserve(f"b{i}", request_plan(tenant())) for i in range(5)))
    assert shared.running() == 6
    assert shared.watches[0].apart == []


async def test_a_cancelled_request_holds_nothing(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    task = asyncio.create_task(one.reserve("a", request_plan(tenant(max_concurrency=1))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await one.beat()
    await one.reserve("b", request_plan(tenant(max_concurrency=1)))


async def test_server_does_not_start_without_redis(shared: SharedLimits) -> None:
    shared.redis.kill()
    limiter = RedisLimiter(RedisLink(shared.redis.url, redis_script()), Watch())
    with pytest.raises(LimitsNotShared, match="the Redis of the limits cannot be used"):
        await limiter.start()
    await limiter.close()
