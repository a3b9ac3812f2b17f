"""Redis is away: what each server decides by itself, in each mode."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.redis_limiter import UNDECIDED_RETRY_S
from loraplex.control.limits.redis_link import TAG
from loraplex.control.types import NO_LIMITS
from support.control.limiters import SharedLimits, passing_requests, request_plan, tenant, whole_plan
from support.waiting import LoopTime


@pytest.mark.parametrize("fault", ["killed", "hung", "full"])
async def test_apart_each_server_spends_its_share_at_once(shared: SharedLimits, fault: str) -> None:
    """Of what it saw to be left, and of what flows back."""
    servers = await shared.servers(3)
    acme = tenant(requests_per_minute=30)
    for number in range(12):
        await servers[0].reserve(f"before{number}", request_plan(acme))
    _break(shared, fault)
    await shared.noticed()
    passed = [len(await passing_requests(server, acme, 20, f"s{i}-")) for i, server in enumerate(servers)]
    assert passed == [6, 10, 10]  # two did not see the twelve
    with pytest.raises(LimitsUnavailable, match="30 requests a minute is reached") as refused:
        await servers[1].reserve("late", request_plan(acme))
    assert refused.value.retry_after_s == pytest.approx(6)
    later = []
    for second in range(18):
        shared.clock.advance(1)
        for i, server in enumerate(servers):
            later += await passing_requests(server, acme, 2, f"s{i}-{second}-")
    assert len(later) == 9  # every six seconds one of each
    await servers[1].reserve("free", request_plan(tenant("unlimited")))
    assert all(not watch.up for watch in shared.watches)
    for server in servers:
        assert server.warning() is not None
        assert "the Redis of the limits has not been reached for " in server.warning()
        assert "--limits-when-apart share" in server.warning()
    _mend(shared, fault)
    await shared.together()
    assert [server.warning() for server in servers] == [None] * 3
    with pytest.raises(RateLimited, match="30 requests a minute"):
        await servers[2].reserve("after", request_plan(acme))
    assert shared.running() == 12 + sum(passed) + 9 + 1


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


async def test_apart_a_request_larger_than_a_share_passes_when_the_share_is_whole(
    shared: SharedLimits,
) -> None:
    """And is paid for before the next one: a rate is what it is. The figures of issue 13."""
    servers = await shared.servers(4)
    acme = tenant(tokens_per_minute=10_000)
    await shared.hang_for(0)
    await servers[0].reserve("small", request_plan(acme, 320))
    for server, tokens in zip(servers[1:], (2500, 2501, 10_000), strict=True):
        await server.reserve("large", request_plan(acme, tokens))
    with pytest.raises(LimitsUnavailable) as refused:
        await servers[3].reserve("next", request_plan(acme, 2500))
    assert refused.value.retry_after_s == pytest.approx(240)
    shared.clock.advance(239)
    with pytest.raises(LimitsUnavailable):
        await servers[3].reserve("next", request_plan(acme, 2500))
    shared.clock.advance(1)
    await servers[3].reserve("next", request_plan(acme, 2500))
    with pytest.raises(LimitsUnavailable) as refused:  # a share that is begun
        await servers[0].reserve("begun", request_plan(tenant(requests_per_minute=1)))
        await servers[0].reserve("begun again", request_plan(tenant(requests_per_minute=1)))
    assert refused.value.retry_after_s == pytest.approx(240)


async def test_apart_what_a_request_did_not_use_is_the_shares_again(shared: SharedLimits) -> None:
    servers = await shared.servers(2)
    acme = tenant(tokens_per_minute=1000)
    await shared.hang_for(0)
    for turn in range(5):
        held = await servers[0].reserve(f"a{turn}", request_plan(acme, 400))
        assert held.windows["tokens"].remaining == 500 - 400 - 20 * turn
        await servers[0].settle(f"a{turn}", used_tokens=20)


async def test_apart_all_servers_together_have_the_places_that_there_are(shared: SharedLimits) -> None:
    servers = await shared.servers(3)
    acme = tenant(max_concurrency=9)
    await servers[0].reserve("before", request_plan(acme))
    await shared.hang_for(0)
    passed = [await passing_requests(server, acme, 8, f"s{i}-") for i, server in enumerate(servers)]
    assert sum(len(names) for names in passed) == 8
    for server, names in zip(servers, passed, strict=True):
        for name in names:
            await server.settle(name, used_tokens=1)
    await servers[0].settle("before", used_tokens=1)
    assert sum([len(await passing_requests(server, acme, 8, "t")) for server in servers]) == 9
    # A limit smaller than the number of servers is one for each.
    assert [
        len(await passing_requests(server, tenant("small", max_concurrency=2), 3, "u")) for server in servers
    ] == [1] * 3
    shared.go_on()
    await shared.together()
    assert shared.running() == 9 + 3


async def test_apart_all_servers_together_have_the_sequences_that_there_are(shared: SharedLimits) -> None:
    """Except a request of more than a share, which passes where nothing else of its tenant runs."""
    servers = await shared.servers(3)
    acme = tenant(max_sequences=9)
    fan_out = whole_plan(acme, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=4)
    await shared.hang_for(0)
    passed = [await passing_requests(server, acme, 8, f"s{i}-") for i, server in enumerate(servers)]
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
            await one.reserve("limited", request_plan(limited))
        assert refused.value.retry_after_s == UNDECIDED_RETRY_S
        assert str(refused.value) == (
            "The limits of all servers together cannot be looked up now. Try again later."
        )
    await other.reserve("free", request_plan(tenant()))
    shared.go_on()
    await shared.together()
    await one.reserve("limited", request_plan(tenant("other", max_concurrency=1)))


async def test_open_lets_each_server_spend_each_whole_limit(shared: SharedLimits) -> None:
    servers = await shared.servers(3, when_apart="open")
    acme = tenant(requests_per_minute=30, max_concurrency=20)
    await servers[0].reserve("before", request_plan(acme))
    await shared.hang_for(0)
    assert [len(await passing_requests(server, acme, 40, "n")) for server in servers] == [19, 20, 20]
    for server in servers:
        for number in range(20):
            await server.settle(f"n{number}", used_tokens=1)
    assert [len(await passing_requests(server, acme, 40, "m")) for server in servers] == [10, 10, 10]
    shared.go_on()
    await shared.together()
    with pytest.raises(RateLimited) as refused:
        await servers[0].reserve("after", request_plan(acme))
    assert refused.value.retry_after_s == pytest.approx(2), "what was spent beyond a minute is not owed"


async def test_no_request_waits_for_a_redis_that_hangs(shared: SharedLimits) -> None:
    (one,) = await shared.servers(1)
    waits = []

    async def request(name: str) -> None:
        begin = now.seconds
        await one.reserve(name, request_plan(tenant()))
        waits.append(now.seconds - begin)

    shared.hang()
    async with LoopTime().running() as now:
        await asyncio.gather(*(request(f"first{i}") for i in range(20)))
    assert max(waits) < 0.15  # 50 ms, on a machine that has other things to do
    for number in range(100):
        with pytest.raises(StopIteration):  # decided at once: it waits for nothing at all
            one.reserve(f"then{number}", request_plan(tenant())).send(None)
