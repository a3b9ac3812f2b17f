"""Some servers cannot reach Redis, or hear its answers too late, while others go on: together they never let pass more
than the limits. And a Redis that lost its data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits import redis_limiter
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_limiter import DRIFT_S, SILENCE_S
from loraplex.control.limits.redis_link import TAG, RedisLink, redis_script
from loraplex.control.limits.redis_messages import Beat
from loraplex.control.types import NO_LIMITS, Limits
from support.control import caller
from support.limiters import START_US, SharedLimits, whole_plan, with_clock_of_tests
from support.redis_server import redis_server

SERVERS = 3
LEASE_S = 15.0
LONGEST_S = 12.0
"""A server that is cut off alone for a lease's time is forgotten, and its share is the others' again."""
LIMITS = Limits(requests_per_minute=30, tokens_per_minute=3000)


@pytest.fixture
async def shared() -> AsyncIterator[SharedLimits]:
    async with SharedLimits() as limits:
        yield limits


def plan(tokens: int = 1, limits: Limits = LIMITS) -> LimitPlan:
    who = caller("acme", tenant_limits=limits)
    return whole_plan(who, NO_LIMITS, prompt_tokens=0, asked_tokens=tokens, default_tokens=1, n=1)


@dataclass
class History:
    """Servers whose ways to Redis fail and heal, and every request that passed: when, and what it used."""

    shared: SharedLimits
    passed: list[tuple[float, int]] = field(default_factory=list)
    faulty_since: dict[int, float] = field(default_factory=dict)
    number: int = 0

    async def ask(self, server: int, tokens: int, used: int | None) -> bool:
        self.number += 1
        name = f"r{self.number}"
        limiter = self.shared.limiters[server]
        try:
            await limiter.reserve(name, plan(tokens))
        except (RateLimited, LimitsUnavailable):
            return False
        if used is not None:
            self.passed.append((self.shared.clock.seconds, min(used, tokens)))
        await limiter.settle(name, used_tokens=used)
        return True

    async def fail(self, server: int, how: Any) -> None:
        """`how`: as `PatientLink.reach`. One that can be reached again is, in the next moment or a later one."""
        self.shared.links[server].reach = how
        if how == "answers":
            self.faulty_since.pop(server, None)
            await asyncio.sleep(0.002)
        else:
            self.faulty_since.setdefault(server, self.shared.clock.seconds)

    async def looked_for_redis(self, server: int) -> None:
        """In vain: what it said there was heard, and it did not hear the answer."""
        link = self.shared.links[server]
        before = link.num_late
        async with asyncio.timeout(5):
            while link.num_late == before:
                await asyncio.sleep(0.002)

    async def pass_time(self, seconds: float) -> None:
        for server, since in list(self.faulty_since.items()):
            if self.shared.clock.seconds + seconds - since > LONGEST_S:
                await self.fail(server, "answers")
                async with asyncio.timeout(10):
                    while not self.shared.watches[server].up:
                        await asyncio.sleep(0.002)
        await self.shared.pass_time(seconds)

    def overshoot(self) -> tuple[float, float]:
        """Requests and tokens by which the worst stretch of time exceeds the limits and what flowed back in it."""
        requests = tokens = 0.0
        assert LIMITS.requests_per_minute is not None
        assert LIMITS.tokens_per_minute is not None
        for first, (begin, _) in enumerate(self.passed):
            used = 0
            for count, (end, cost) in enumerate(self.passed[first:], 1):
                used += cost
                room = 1 + (end - begin) / 60
                requests = max(requests, count - LIMITS.requests_per_minute * room)
                tokens = max(tokens, used - LIMITS.tokens_per_minute * room)
        return requests, tokens


async def test_who_hears_answers_too_late_spends_nothing_that_others_may_spend(shared: SharedLimits) -> None:
    """One server's answers are late for ten seconds. The others spend all that there is, as they may; it then has what
    flows back to its share from a second after, and no more."""
    history = History(shared)
    await shared.servers(SERVERS)
    await history.fail(0, "late")
    for turn in range(20):
        for server in range(0 if turn < 3 else 1, SERVERS):
            await history.ask(server, 100, 100)
    assert len(history.passed) == 30  # of which Redis may have done one for nobody, and given it back
    assert history.overshoot() == (0, 0)
    assert shared.watches[0].apart.count(True) == 0
    for turn in range(20):
        await history.pass_time(0.5)
        if turn % 4 == 0:
            await history.looked_for_redis(0)
        for server in range(SERVERS):
            await history.ask(server, 100, 100)
    requests, tokens = history.overshoot()
    assert requests <= 1e-6
    assert tokens <= 1e-6
    assert shared.watches[0].apart.count(True) == 1  # ten a minute, for not quite nine seconds
    await history.fail(0, "answers")
    await shared.together()
    for _ in range(20):
        await history.pass_time(0.5)
        for server in range(SERVERS):
            await history.ask(server, 100, 100)
    requests, tokens = history.overshoot()
    assert requests <= 1e-6
    assert tokens <= 1e-6
    # Nothing is lost either: all that flowed back in twenty seconds has passed, but for what was kept back.
    assert len(history.passed) >= 30 + 10 - 1


async def test_a_server_that_is_cut_off_takes_its_share_from_the_others_and_gives_it_back(
    shared: SharedLimits,
) -> None:
    history = History(shared)
    one, other = await shared.servers(2)
    await one.beat()  # by which it has told that it knows of the other
    await history.fail(0, "away")
    await history.pass_time(SILENCE_S + 10)
    # 15 requests a minute may be spent there since then: two and a half in 10 s.
    limited = Limits(requests_per_minute=30)
    passed = 0
    for number in range(30):
        try:
            await other.reserve(f"o{number}", plan(1, limited))
            passed += 1
        except RateLimited:
            break
    assert passed == 27
    assert await history.ask(0, 1, 1)
    await history.fail(0, "answers")
    await shared.together()
    for number in range(5):
        try:
            await one.reserve(f"i{number}", plan(1, limited))
            passed += 1
        except RateLimited:
            pass
    assert passed == 29  # and the one that was spent apart


async def test_a_heartbeat_that_lay_about_tells_of_the_time_when_it_was_sent(shared: SharedLimits) -> None:
    """Its server has given it up long since, and spends its share."""
    await shared.servers(1)
    ((replica, number),) = shared.redis.client.hgetall(f"{TAG}:joined").items()
    (other,) = await shared.servers(1)
    await shared.limiters[0].beat()
    sent = START_US + shared.clock.seconds * 1e6
    shared.links[0].reach = "away"
    await shared.limiters[0].beat()
    await shared.pass_time(SILENCE_S + 4)
    link = RedisLink(shared.redis.url, with_clock_of_tests(redis_script()))
    await link.connect()
    late = Beat(replica.decode(), number.decode(), sent, 2)
    assert await link.call("heartbeat", msgspec.msgpack.encode(late), 10.0)
    await link.close()
    for name in range(58):
        await other.reserve(f"o{name}", plan(1, Limits(requests_per_minute=60)))
    with pytest.raises(RateLimited):
        await other.reserve("late", plan(1, Limits(requests_per_minute=60)))


async def test_a_dead_servers_share_is_the_others_again_after_its_lease(shared: SharedLimits) -> None:
    history = History(shared)
    _, other = await shared.servers(2)
    await history.fail(0, "away")
    await shared.pass_time(LEASE_S + 1)
    limited = Limits(requests_per_minute=30)
    for number in range(30):
        await other.reserve(f"o{number}", plan(1, limited))
    await history.fail(0, "answers")


_TOKENS = st.integers(1, 900)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, SERVERS - 1), _TOKENS, st.one_of(st.none(), _TOKENS)),
        st.tuples(st.just("flood"), st.integers(0, SERVERS - 1), _TOKENS),
        st.tuples(
            st.just("fail"), st.integers(0, SERVERS - 1), st.sampled_from(["late", "away", "answers", "late"])
        ),
        st.tuples(st.just("time"), st.sampled_from([0.25, 1.0, 3.0, 9.0])),
    ),
    min_size=5,
    max_size=30,
)


def _check(events: list[Any]) -> None:
    asyncio.run(_check_in(events))


async def _check_in(events: list[Any]) -> None:
    async with SharedLimits() as shared:
        await shared.servers(SERVERS)
        history = History(shared)
        for kind, *about in events:
            if kind == "ask":
                await history.ask(*about)
            elif kind == "flood":
                while await history.ask(about[0], about[1], about[1]):
                    pass
            elif kind == "fail":
                await history.fail(*about)
            else:
                await history.pass_time(*about)
        for server in range(SERVERS):
            await history.fail(server, "answers")
        await shared.together()
        while await history.ask(0, 100, 100):
            pass
        requests, tokens = history.overshoot()
        assert requests <= 1e-3
        assert tokens <= 1e-3
        assert shared.running() == 0


@pytest.mark.slow
def test_whoever_is_cut_off_and_whenever_nothing_passes_over_the_limits() -> None:
    redis_server()
    settings(max_examples=25, deadline=None)(given(_EVENTS)(_check))()


@pytest.mark.soak
def test_whoever_is_cut_off_and_whenever_nothing_passes_over_the_limits_at_length() -> None:
    redis_server()
    settings(max_examples=2000, deadline=None)(given(_EVENTS)(_check))()


async def test_before_a_share_begins_a_request_waits_no_longer_than_for_an_answer(
    shared: SharedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where Redis was only late, it is decided there."""
    (one,) = await shared.servers(1)
    shared.hang()
    await shared.noticed()
    loop = asyncio.get_running_loop()
    begin = loop.time()
    with pytest.raises(LimitsUnavailable):
        await one.reserve("a", plan())
    assert loop.time() - begin < 0.15  # 50 ms, on a machine that has other things to do
    with monkeypatch.context() as patience:
        patience.setattr(redis_limiter, "TIMEOUT_S", 10.0)  # so that a busy machine is no fault
        waiting = asyncio.create_task(one.reserve("b", plan()))
        await asyncio.sleep(0)
        shared.go_on()
        await waiting
    assert shared.watches[0].apart.count(True) == 1  # the request that noticed
    await shared.hang_for(0)
    begin = loop.time()
    for number in range(20):
        with pytest.raises(LimitsUnavailable):
            await one.reserve(f"c{number}", plan(100))
    assert loop.time() - begin < 0.2  # nobody waits any more


async def test_after_a_long_outage_nobody_decides_before_all_have_told_what_they_spent(
    shared: SharedLimits,
) -> None:
    """All of them were silent for longer than a dead server is waited for, and none was dead."""
    limited = Limits(requests_per_minute=30)
    servers = await shared.servers(SERVERS)
    await shared.pass_time(1)
    await shared.hang_for(60)
    for server in servers:
        for number in range(10):
            await server.reserve(f"apart{number}", plan(1, limited))
    for link in shared.links[1:]:
        link.reach = "away"
    shared.go_on()
    async with asyncio.timeout(5):
        while not shared.redis.client.exists(f"{TAG}:awaited"):
            await asyncio.sleep(0.005)
    with pytest.raises(LimitsUnavailable):
        await servers[0].reserve("early", plan(1, limited))
    for link in shared.links[1:]:
        link.reach = "answers"
    await shared.together()
    for server in servers:
        with pytest.raises(RateLimited):
            await server.reserve("late", plan(1, limited))


# A Redis that lost its data.


async def test_nobody_decides_before_all_have_told_what_they_knew(shared: SharedLimits) -> None:
    """A tenant that only one server knows would have its limit once more on the others."""
    one, other = await shared.servers(2)
    await one.reserve("known", plan(2000))
    await one.settle("known", used_tokens=2000)
    shared.links[0].reach = "away"
    shared.redis.client.flushall()
    shared.tell_time()
    with pytest.raises(LimitsUnavailable):
        await other.reserve("a", plan(2000))
    assert not shared.watches[1].up
    shared.links[0].reach = "answers"
    await one.beat()
    await shared.together()
    assert [watch.losses for watch in shared.watches] == [1, 1]
    with pytest.raises(RateLimited, match="3000 tokens"):
        await other.reserve("a", plan(1100))
    held = await other.reserve("a", plan(900))
    assert held.tokens is not None
    assert held.tokens.remaining == 100


async def test_a_server_that_does_not_come_back_is_not_waited_for_for_ever(shared: SharedLimits) -> None:
    _, other = await shared.servers(2)
    shared.links[0].reach = "away"
    shared.redis.client.flushall()
    shared.tell_time()
    await other.beat()
    async with asyncio.timeout(5):
        while not shared.redis.client.exists(f"{TAG}:awaited"):
            await asyncio.sleep(0.005)
    assert 10 <= shared.redis.client.ttl(f"{TAG}:awaited") <= LEASE_S
    assert not shared.watches[1].up
    shared.redis.client.pexpire(f"{TAG}:awaited", 1)
    async with asyncio.timeout(5):
        while not shared.watches[1].up:
            await asyncio.sleep(0.005)
    shared.links[0].reach = "answers"


async def test_a_server_that_starts_meanwhile_waits_with_the_others(shared: SharedLimits) -> None:
    await shared.servers(2)
    shared.links[0].reach = "away"
    shared.redis.client.flushall()
    shared.tell_time()
    await shared.limiters[1].beat()
    async with asyncio.timeout(5):
        while not shared.redis.client.exists(f"{TAG}:awaited"):
            await asyncio.sleep(0.005)
    await shared.servers(1)
    assert not shared.watches[2].up
    with pytest.raises(LimitsUnavailable):
        await shared.limiters[2].reserve("a", plan())
    shared.clock.advance(SILENCE_S + DRIFT_S + 6)
    shared.tell_time()
    shared.links[0].reach = "answers"
    await shared.limiters[0].beat()
    await shared.together()
    await shared.limiters[2].reserve("a", plan())
