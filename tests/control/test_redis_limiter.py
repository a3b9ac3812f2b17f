"""Limits that several servers share in one Redis: who gives back what a dead one held, and what each does by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from loraplex.control.errors import LimitsNotShared, LimitsUnavailable, RateLimited
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_limiter import UNDECIDED_RETRY_S, RedisLimiter
from loraplex.control.limits.redis_link import TAG, RedisLink, redis_script
from loraplex.control.limits.redis_messages import Caller, Reply, Reserve, rates_of, seats_of
from loraplex.control.types import NO_LIMITS, Limits, Principal
from support.limit_watch import Watch
from support.limiters import SharedLimits, tenant, whole_plan, with_clock_of_tests
from support.tcp_proxy import TcpProxy


def plan(who: Principal, tokens: int = 1, server: Limits = NO_LIMITS) -> LimitPlan:
    """A request of one prompt token and an answer; `tokens` in all."""
    return whole_plan(who, server, prompt_tokens=1, asked_tokens=tokens - 1, default_tokens=1, n=1)


async def passing(limiter: RedisLimiter, who: Principal, most: int, name: str, tokens: int = 1) -> list[str]:
    """Those of `most` requests that pass."""
    passed = []
    for number in range(most):
        try:
            await limiter.reserve(f"{name}{number}", plan(who, tokens))
        except (RateLimited, LimitsUnavailable):
            continue
        passed.append(f"{name}{number}")
    return passed


@pytest.fixture
async def shared() -> AsyncIterator[SharedLimits]:
    async with SharedLimits() as limits:
        yield limits


async def test_servers_share_every_limit(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(requests_per_minute=10, tokens_per_minute=1000, max_concurrency=3)
    await one.reserve("a", plan(acme, 400))
    held = await other.reserve("b", plan(acme, 500))
    assert held.requests is not None
    assert held.tokens is not None
    assert (held.requests.remaining, held.tokens.remaining) == (8, 100)
    with pytest.raises(RateLimited, match="1000 tokens"):
        await one.reserve("c", plan(acme, 101))
    await one.reserve("c", plan(acme, 100))
    with pytest.raises(RateLimited, match="at a time"):
        await other.reserve("d", plan(acme))
    await one.settle("a", used_tokens=0)
    await other.reserve("d", plan(acme, 400))


async def test_what_a_silent_server_held_comes_back_and_is_charged_again_when_it_returns(
    shared: SharedLimits,
) -> None:
    with TcpProxy(shared.redis.port) as proxy:
        (cut_off,) = await shared.servers(1, port=proxy.port)
        (one,) = await shared.servers(1)
        acme = tenant(tokens_per_minute=1000, max_concurrency=2)
        await cut_off.reserve("a", plan(acme, 600))
        await cut_off.reserve("b", plan(acme, 200))
        proxy.hang()
        shared.lose_patience()
        shared.advance(14)
        await one.beat()
        with pytest.raises(RateLimited):
            await one.reserve("c", plan(acme))
        shared.advance(2)
        await one.beat()
        held = await one.reserve("c", plan(acme, 100))
        assert held.tokens is not None
        assert held.tokens.remaining == 900
        # It was not dead, and what it runs counts again.
        await cut_off.beat()
        proxy.carry()
        shared.go_on()
        await shared.together()
        assert shared.running() == 3
        with pytest.raises(RateLimited, match="at a time"):
            await one.reserve("d", plan(acme))
        await cut_off.settle("a", used_tokens=100)
        await cut_off.settle("b", used_tokens=100)
        await one.settle("c", used_tokens=100)
        assert shared.running() == 0
        held = await one.reserve("d", plan(acme, 100))
        assert held.tokens is not None
        assert held.tokens.remaining == 600  # the first two count as if they had come now


async def test_the_sequences_of_a_silent_server_come_back_and_count_again_when_it_returns(
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
        shared.lose_patience()
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


async def test_apart_all_servers_together_have_the_sequences_that_there_are(shared: SharedLimits) -> None:
    """But for a request of more than a share, which passes where nothing else of its tenant runs."""
    servers = await shared.servers(3)
    acme = tenant(max_sequences=9)
    fan_out = whole_plan(acme, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=4)
    await shared.hang_for(0)
    passed = [await passing(server, acme, 8, f"s{i}-") for i, server in enumerate(servers)]
    assert [len(names) for names in passed] == [3] * 3
    for name in passed[0][:2]:
        await servers[0].settle(name, used_tokens=1)
    with pytest.raises(LimitsUnavailable, match="9 sequences at a time"):
        await servers[0].reserve("beside another", fan_out)
    await servers[0].settle(passed[0][2], used_tokens=1)
    await servers[0].reserve("alone", fan_out)
    shared.go_on()
    await shared.together()
    assert int(shared.redis.client.get(f"{TAG}:sequences:tenant:acme") or 0) == 6 + 4


async def test_what_was_used_after_a_charge_that_is_given_back_stays_used(shared: SharedLimits) -> None:
    """It began when it came, and not when the one before it would have ended."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await one.reserve("first", plan(acme, 500))
    shared.advance(20)
    await one.reserve("second", plan(acme, 100))
    await one.settle("second", used_tokens=100)
    await one.settle("first", used_tokens=None)
    held = await one.reserve("third", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == 800


async def test_a_clock_that_is_set_back_gives_nothing_away(shared: SharedLimits) -> None:
    """The limit is spent then; and still is, but for what flows back, when a request ends that came later."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await one.reserve("a", plan(acme, 1000))
    shared.advance(-10)
    with pytest.raises(RateLimited):
        await one.reserve("b", plan(acme, 1))
    shared.advance(6)
    await one.reserve("b", plan(acme, 100))
    await one.settle("b", used_tokens=100)
    with pytest.raises(RateLimited):
        await one.reserve("c", plan(acme, 1))


async def test_what_was_spent_apart_is_charged_once_however_often_it_was_told(shared: SharedLimits) -> None:
    """Redis hears it, and its answers come too late."""
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("a", plan(acme, 100))
    await one.settle("a", used_tokens=100)
    shared.links[0].reach = "late"
    shared.go_on()
    for number in range(3):
        before = shared.links[0].num_late
        async with asyncio.timeout(10):
            while shared.links[0].num_late < before + 2:
                await asyncio.sleep(0.005)
        await one.reserve(f"b{number}", plan(acme, 10))
        await one.settle(f"b{number}", used_tokens=10)
    shared.links[0].reach = "answers"
    await shared.together()
    held = await other.reserve("c", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == 1000 - 100 - 30 - 100


async def test_a_server_that_ends_leaves_nothing(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000, max_concurrency=1)
    await one.reserve("a", plan(acme, 1000))
    await one.close()
    await other.reserve("b", plan(acme, 1000))
    await other.beat()
    assert shared.watches[1].replicas == 1


async def test_a_redis_that_lost_its_data_is_told_what_it_knew(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000, requests_per_minute=10, max_concurrency=3)
    await one.reserve("a", plan(acme, 300))
    await other.reserve("b", plan(acme, 300))
    await other.settle("b", used_tokens=200)
    shared.redis.kill()
    for limiter in (one, other):
        await limiter.beat()
    shared.redis.start()
    shared.tell_time()
    await shared.together()
    held = await one.reserve("c", plan(acme, 100))
    assert held.requests is not None
    assert held.tokens is not None
    assert (held.requests.remaining, held.tokens.remaining) == (7, 400)
    await other.reserve("d", plan(acme, 100))
    with pytest.raises(RateLimited, match="at a time"):
        await one.reserve("e", plan(acme, 100))
    # What was seen stays spent until it flows back: nobody can say any more what of it was whose.
    await one.settle("a", used_tokens=0)
    held = await one.reserve("e", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == 200


@pytest.mark.parametrize("fault", ["killed", "hung", "full"])
async def test_apart_each_server_spends_its_share_at_once(shared: SharedLimits, fault: str) -> None:
    """Of what it saw to be left, and of what flows back."""
    servers = await shared.servers(3)
    acme = tenant(requests_per_minute=30)
    for number in range(12):
        await servers[0].reserve(f"before{number}", plan(acme))
    _break(shared, fault)
    await shared.noticed()
    passed = [len(await passing(server, acme, 20, f"s{i}-")) for i, server in enumerate(servers)]
    assert passed == [6, 10, 10]  # two did not see the twelve
    with pytest.raises(LimitsUnavailable, match="30 requests a minute is reached") as refused:
        await servers[1].reserve("late", plan(acme))
    assert refused.value.retry_after_s == pytest.approx(6)
    later = []
    for second in range(18):
        shared.clock.advance(1)
        for i, server in enumerate(servers):
            later += await passing(server, acme, 2, f"s{i}-{second}-")
    assert len(later) == 9  # every six seconds one of each
    await servers[1].reserve("free", plan(tenant("unlimited")))
    assert all(not watch.up for watch in shared.watches)
    _mend(shared, fault)
    await shared.together()
    with pytest.raises(RateLimited, match="30 requests a minute"):
        await servers[2].reserve("after", plan(acme))
    assert shared.running() == 12 + sum(passed) + 9 + 1


async def test_apart_a_request_larger_than_a_share_passes_when_the_share_is_whole(
    shared: SharedLimits,
) -> None:
    """And is paid for before the next one: a rate is what it is. The figures of issue 13."""
    servers = await shared.servers(4)
    acme = tenant(tokens_per_minute=10_000)
    await shared.hang_for(0)
    await servers[0].reserve("small", plan(acme, 320))
    for server, tokens in zip(servers[1:], (2500, 2501, 10_000), strict=True):
        await server.reserve("large", plan(acme, tokens))
    with pytest.raises(LimitsUnavailable) as refused:
        await servers[3].reserve("next", plan(acme, 2500))
    assert refused.value.retry_after_s == pytest.approx(240)
    shared.clock.advance(239)
    with pytest.raises(LimitsUnavailable):
        await servers[3].reserve("next", plan(acme, 2500))
    shared.clock.advance(1)
    await servers[3].reserve("next", plan(acme, 2500))
    with pytest.raises(LimitsUnavailable) as refused:  # a share that is begun
        await servers[0].reserve("begun", plan(tenant(requests_per_minute=1)))
        await servers[0].reserve("begun again", plan(tenant(requests_per_minute=1)))
    assert refused.value.retry_after_s == pytest.approx(240)


async def test_apart_what_a_request_did_not_use_is_the_shares_again(shared: SharedLimits) -> None:
    servers = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(0)
    for turn in range(5):
        held = await servers[0].reserve(f"a{turn}", plan(acme, 400))
        assert held.tokens is not None
        assert held.tokens.remaining == 500 - 400 - 20 * turn
        await servers[0].settle(f"a{turn}", used_tokens=20)


async def test_strict_decides_nothing_that_is_limited_without_redis(shared: SharedLimits) -> None:
    one, other = await shared.servers(2, when_apart="strict")
    await shared.hang_for(3600)
    for limited in (
        tenant(requests_per_minute=30),
        tenant(tokens_per_minute=30),
        tenant(max_concurrency=1),
        tenant(max_sequences=1),
    ):
        with pytest.raises(LimitsUnavailable) as refused:
            await one.reserve("limited", plan(limited))
        assert refused.value.retry_after_s == UNDECIDED_RETRY_S
        assert str(refused.value) == (
            "The limits of all servers together cannot be looked up now. Try again later."
        )
    await other.reserve("free", plan(tenant()))
    shared.go_on()
    await shared.together()
    await one.reserve("limited", plan(tenant("other", max_concurrency=1)))


async def test_open_lets_each_server_spend_each_whole_limit(shared: SharedLimits) -> None:
    servers = await shared.servers(3, when_apart="open")
    acme = tenant(requests_per_minute=30, max_concurrency=20)
    await servers[0].reserve("before", plan(acme))
    await shared.hang_for(0)
    assert [len(await passing(server, acme, 40, "n")) for server in servers] == [19, 20, 20]
    for server in servers:
        for number in range(20):
            await server.settle(f"n{number}", used_tokens=1)
    assert [len(await passing(server, acme, 40, "m")) for server in servers] == [10, 10, 10]
    shared.go_on()
    await shared.together()
    with pytest.raises(RateLimited) as refused:
        await servers[0].reserve("after", plan(acme))
    assert refused.value.retry_after_s == pytest.approx(2), "what was spent beyond a minute is not owed"


async def test_apart_all_servers_together_have_the_places_that_there_are(shared: SharedLimits) -> None:
    servers = await shared.servers(3)
    acme = tenant(max_concurrency=9)
    await servers[0].reserve("before", plan(acme))
    await shared.hang_for(0)
    passed = [await passing(server, acme, 8, f"s{i}-") for i, server in enumerate(servers)]
    assert sum(len(names) for names in passed) == 8
    for server, names in zip(servers, passed, strict=True):
        for name in names:
            await server.settle(name, used_tokens=1)
    await servers[0].settle("before", used_tokens=1)
    assert sum([len(await passing(server, acme, 8, "t")) for server in servers]) == 9
    # A limit smaller than the number of servers is one for each.
    assert [len(await passing(server, tenant("small", max_concurrency=2), 3, "u")) for server in servers] == [
        1
    ] * 3
    shared.go_on()
    await shared.together()
    assert shared.running() == 9 + 3


def _break(shared: SharedLimits, fault: str) -> None:
    if fault == "killed":
        shared.redis.kill()
    elif fault == "hung":
        shared.hang()
    else:
        shared.redis.fill_memory()


def _mend(shared: SharedLimits, fault: str) -> None:
    if fault == "killed":
        shared.redis.start()
    elif fault == "hung":
        shared.go_on()
    else:
        shared.redis.free_memory()
    shared.tell_time()


async def test_what_was_spent_apart_and_runs_on_is_settled_in_redis(shared: SharedLimits) -> None:
    one, other = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("runs", plan(acme, 300))
    await one.reserve("ended", plan(acme, 200))
    await one.settle("ended", used_tokens=50)
    await one.reserve("nothing", plan(acme, 100))
    await one.settle("nothing", used_tokens=None)
    shared.go_on()
    await shared.together()
    held = await other.reserve("a", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == 1000 - 300 - 50 - 100
    await one.settle("runs", used_tokens=100)
    held = await other.reserve("b", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == 1000 - 100 - 50 - 200


@pytest.mark.parametrize("loses_data", [False, True])
async def test_what_was_spent_apart_counts_in_the_next_outage_too(
    shared: SharedLimits, loses_data: bool
) -> None:
    """Or each would bring a whole share anew. Nobody asked Redis for this tenant in between."""
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(60)
    await one.reserve("ended", plan(acme, 500))
    await one.settle("ended", used_tokens=500)
    await one.reserve("runs", plan(acme, 400))
    shared.go_on()
    await shared.together()
    if loses_data:
        shared.redis.kill()
        await one.beat()
        shared.redis.start()
        shared.tell_time()
        await shared.together()
        with pytest.raises(RateLimited, match="1000 tokens a minute"):
            await one.reserve("late", plan(acme, 101))
    else:
        await shared.hang_for(0)
        with pytest.raises(LimitsUnavailable, match="1000 tokens a minute"):
            await one.reserve("late", plan(acme, 101))
    await one.reserve("fits", plan(acme, 100))


async def test_an_outage_longer_than_a_minute_forgets_what_has_flowed_back(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=600)
    await one.reserve("before", plan(acme, 600))
    await shared.hang_for(0)
    with pytest.raises(LimitsUnavailable):
        await one.reserve("now", plan(acme, 1))
    for minute in range(3):
        shared.clock.advance(60)
        await one.reserve(f"m{minute}", plan(acme, 600))
        await one.settle(f"m{minute}", used_tokens=600)
    shared.clock.advance(30)
    shared.go_on()
    await shared.together()
    held = await one.reserve("after", plan(acme, 1))
    assert held.tokens is not None
    assert held.tokens.remaining == 299


@pytest.mark.parametrize("used", [None, 100])
async def test_a_request_that_redis_took_too_late_leaves_what_it_used(
    shared: SharedLimits, used: int | None
) -> None:
    (one,) = await shared.servers(1)
    acme = tenant(tokens_per_minute=1000, max_concurrency=1)
    shared.hang()
    await one.reserve("late", plan(acme, 500))  # is in Redis' buffer, too
    await one.settle("late", used_tokens=used)
    shared.go_on()
    await shared.together()
    held = await one.reserve("next", plan(acme, 100))
    assert held.tokens is not None
    assert held.tokens.remaining == (900 if used is None else 800)
    assert shared.running() == 1


async def test_a_call_of_an_earlier_joining_does_nothing(shared: SharedLimits) -> None:
    """It lay in a buffer of a Redis that hung, and this server has given it up since."""
    await shared.servers(1)
    ((replica, number),) = shared.joined().items()
    link = RedisLink(shared.redis.url, with_clock_of_tests(redis_script()))
    await link.connect()
    for name, joining in (("early", str(int(number) - 1)), ("now", number)):
        caller = Caller(replica, joining, -1.0, 0)
        late = Reserve(caller, name, rates_of(plan(tenant())), seats_of(plan(tenant())), 1)
        reply = msgspec.msgpack.decode(
            await link.call("reserve", msgspec.msgpack.encode(late), 10.0), type=Reply
        )
        assert reply.status == ("unknown" if name == "early" else "ok")
        assert shared.running() == (name == "now")
    await link.close()


async def test_scripts_that_somebody_flushed_are_brought_again(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    await one.reserve("a", plan(tenant()))
    shared.redis.client.script_flush()
    await asyncio.gather(*(one.reserve(f"b{i}", plan(tenant())) for i in range(5)))
    assert shared.running() == 6
    assert shared.watches[0].apart == []


async def test_a_cancelled_request_holds_nothing(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    task = asyncio.create_task(one.reserve("a", plan(tenant(max_concurrency=1))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await one.beat()
    await one.reserve("b", plan(tenant(max_concurrency=1)))


async def test_without_redis_a_server_does_not_start(shared: SharedLimits) -> None:
    shared.redis.kill()
    limiter = RedisLimiter(RedisLink(shared.redis.url, redis_script()), Watch())
    with pytest.raises(LimitsNotShared, match="the Redis of the limits cannot be used"):
        await limiter.start()
    await limiter.close()


async def test_no_request_waits_for_a_redis_that_hangs(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    waits = []

    async def request(name: str) -> None:
        begin = time.perf_counter()
        await one.reserve(name, plan(tenant()))
        waits.append(time.perf_counter() - begin)

    shared.hang()
    await asyncio.gather(*(request(f"first{i}") for i in range(20)))
    assert max(waits) < 0.15  # 50 ms, on a machine that has other things to do
    waits.clear()
    for number in range(100):
        await request(f"then{number}")
    assert sorted(waits)[95] < 0.01
