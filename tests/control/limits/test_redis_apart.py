"""Some servers cannot reach Redis, or hear its answers too late, while others go on: what they let pass together in
each mode. And a Redis that lost its data, or a part of it, or whose clock was set forward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.limiter import WhenApart
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_link import TAG, redis_script
from loraplex.control.limits.redis_messages import Caller, Reply, Reserve, rates_of, seats_of
from loraplex.control.types import NO_LIMITS, Limits
from support.control.limit_watch import PatientLink
from support.control.limiters import START_US, SharedLimits, whole_plan, with_clock_of_tests
from support.control.plane import caller
from support.faults.tcp_proxy import TcpProxy
from support.servers.redis_server import RedisServer, redis_server
from support.waiting import eventually

SERVERS = 3
LEASE_S = 15.0
LONGEST_S = 12.0
"""A server that is cut off alone for a lease's time is forgotten, and what it holds is the others' again."""
LIMITS = Limits(requests_per_minute=30, tokens_per_minute=3000)


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

    async def pass_time(self, seconds: float) -> None:
        for server, since in list(self.faulty_since.items()):
            if self.shared.clock.seconds + seconds - since > LONGEST_S:
                await self.fail(server, "answers")
                async with asyncio.timeout(60):
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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("when_apart", "most"), [("strict", 0), ("share", 10), ("open", 30)])
async def test_isolated_server_spends_what_its_mode_allows(
    shared: SharedLimits, when_apart: WhenApart, most: int
) -> None:
    """The others spend all that there is, then or before. Nobody is refused for longer than a minute for it."""
    history = History(shared)
    await shared.servers(SERVERS, when_apart=when_apart)
    await history.fail(0, "away")
    for _ in range(31):
        for server in range(SERVERS):
            await history.ask(server, 100, 100)
    assert len(history.passed) == 30 + most
    assert history.overshoot() == (most, 100 * most)
    await history.fail(0, "answers")
    await shared.together()
    assert not await history.ask(1, 100, 100)
    await history.pass_time(2)
    assert await history.ask(1, 100, 100)


async def test_a_call_that_lay_about_for_a_second_does_nothing(shared: SharedLimits) -> None:
    """Its server has given it up long since."""
    await shared.servers(1)
    ((replica, number),) = shared.joined().items()
    link = PatientLink(shared.redis.url, with_clock_of_tests(redis_script()))
    await link.connect()
    for seconds, status in ((1.1, "late"), (0.9, "ok")):
        sent = Caller(replica, number, START_US + shared.clock.seconds * 1e6, 0)
        await shared.pass_time(seconds)
        late = Reserve(sent, "a", rates_of(plan()), seats_of(plan()), plan().held)
        answer = await link.call("reserve", msgspec.msgpack.encode(late), 10.0)
        assert msgspec.msgpack.decode(answer, type=Reply).status == status
        assert shared.running() == (status == "ok")
    await link.close()


async def test_dead_servers_share_is_free_after_its_lease(shared: SharedLimits) -> None:
    history = History(shared)
    one, other = await shared.servers(2)
    limited = Limits(requests_per_minute=30)
    await one.reserve("held", plan(1, limited))
    await history.fail(0, "away")
    await shared.pass_time(LEASE_S + 1)
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


def _check(events: list[Any], when_apart: WhenApart) -> None:
    asyncio.run(_check_in(events, when_apart))


async def _check_in(events: list[Any], when_apart: WhenApart) -> None:
    async with SharedLimits() as shared:
        await shared.servers(SERVERS, when_apart=when_apart)
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
        if when_apart == "strict":
            requests, tokens = history.overshoot()
            assert requests <= 1e-3
            assert tokens <= 1e-3
        assert shared.running() == 0


@pytest.mark.slow
@pytest.mark.parametrize("when_apart", ["strict", "share"])
def test_strict_never_exceeds_the_limits_in_random_partitions(
    when_apart: WhenApart,
) -> None:
    """And in every mode nothing stays reserved."""
    redis_server()
    settings(max_examples=15, deadline=None)(given(_EVENTS, st.just(when_apart))(_check))()


@pytest.mark.soak
@pytest.mark.parametrize("when_apart", ["strict", "share"])
def test_strict_never_exceeds_the_limits_in_random_partitions_at_length(
    when_apart: WhenApart,
) -> None:
    redis_server()
    settings(max_examples=1000, deadline=None)(given(_EVENTS, st.just(when_apart))(_check))()


async def test_after_an_outage_of_all_only_what_others_spent_passes_once_more(shared: SharedLimits) -> None:
    """All of them were silent for longer than a dead server is waited for, and none was dead. The first that is back
    does not wait for the others."""
    limited = Limits(requests_per_minute=30)
    servers = await shared.servers(SERVERS)
    await shared.pass_time(1)
    # Not by a Redis that hangs: it would run what was sent meanwhile by a clock that had not gone on.
    for link in shared.links:
        link.reach = "away"
    await shared.noticed()
    shared.advance(60)
    for server in servers:
        for number in range(10):
            await server.reserve(f"apart{number}", plan(1, limited))
    shared.links[0].reach = "answers"
    await until(lambda: shared.watches[0].up)
    passed = 0
    with pytest.raises(RateLimited):
        while True:
            await servers[0].reserve(f"early{passed}", plan(1, limited))
            passed += 1
    assert 0 < passed <= 10 * (SERVERS - 1)
    for link in shared.links[1:]:
        link.reach = "answers"
    await shared.together()
    for server in servers:
        with pytest.raises(RateLimited):
            await server.reserve("late", plan(1, limited))


# A Redis that lost its data.


async def test_what_one_server_knows_is_missing_until_it_is_back(shared: SharedLimits) -> None:
    """Redis lost its data, and the only server that saw what a tenant spent cannot reach it: two faults at once."""
    one, other = await shared.servers(2)
    await one.reserve("known", plan(2000))
    await one.settle("known", used_tokens=2000)
    shared.links[0].reach = "away"
    shared.redis.client.flushall()
    shared.tell_time()
    await other.beat()
    await until(lambda: shared.watches[1].up)
    await other.reserve("early", plan(500))
    await other.settle("early", used_tokens=None)
    shared.links[0].reach = "answers"
    await one.beat()
    await shared.together()
    assert [watch.losses for watch in shared.watches] == [1, 1]
    with pytest.raises(RateLimited, match="3000 tokens"):
        await other.reserve("a", plan(1100))
    held = await other.reserve("a", plan(900))
    assert held.windows["tokens"].remaining == 100


# A Redis that lost the last of its data, or whose clock was set forward.


async def _spend_and_forget(
    shared: SharedLimits, keep: Callable[[], object], forget: Callable[[], object]
) -> None:
    """Two servers spend all of a limit but a fifth. After a tenth of it Redis is made to `keep` what it has."""
    one, other = await shared.servers(2)
    limited = Limits(tokens_per_minute=1000, max_concurrency=3)
    await one.reserve("first", plan(100, limited))
    await one.settle("first", used_tokens=100)
    keep()
    await one.reserve("second", plan(300, limited))
    await one.settle("second", used_tokens=300)
    await other.reserve("runs", plan(400, limited))
    for server in (one, other):
        await server.beat()
    forget()
    for server in (one, other):
        await server.beat()
    await shared.together()
    assert [watch.losses for watch in shared.watches] == [1, 1]
    for server in (one, other):
        with pytest.raises(RateLimited, match="1000 tokens"):
            await server.reserve("late", plan(201, limited))
    held = await one.reserve("fits", plan(200, limited))
    assert held.windows["tokens"].remaining == 0
    # What ran is known again, and its place; what of it is not used flows back.
    assert shared.running() == 2
    await other.settle("runs", used_tokens=0)
    assert shared.running() == 1
    with pytest.raises(RateLimited, match="1000 tokens"):
        await one.reserve("next", plan(1, limited))


async def test_a_redis_that_restarts_from_an_older_dump_gives_no_limits_again() -> None:
    redis = RedisServer()

    def restart() -> None:
        redis.kill()
        redis.start()

    try:
        async with SharedLimits(redis) as shared:
            await _spend_and_forget(shared, redis.client.save, restart)
    finally:
        redis.close()


async def test_a_replica_that_lagged_and_is_promoted_gives_no_limits_again() -> None:
    """It takes over the address, as a service's or a virtual one."""
    redis, replica = (RedisServer(**{"repl-diskless-sync-delay": "0"}) for _ in range(2))

    def lag() -> None:
        replica.client.replicaof("127.0.0.1", redis.port)
        redis.client.set("last", "1")
        eventually(lambda: bool(replica.client.exists("last")))
        replica.client.replicaof("127.0.0.1", replica.port)  # what comes now does not reach it

    try:
        with TcpProxy(redis.port) as proxy:

            def fail_over() -> None:
                redis.kill()
                replica.client.replicaof("NO", "ONE")
                proxy.target = replica.port
                shared.redis = replica

            async with SharedLimits(redis, port=proxy.port) as shared:
                await _spend_and_forget(shared, lag, fail_over)
    finally:
        redis.close()
        replica.close()


@pytest.mark.parametrize("has_expired", [False, True])
async def test_a_clock_that_is_set_forward_gives_no_limits_again(
    shared: SharedLimits, has_expired: bool
) -> None:
    """Neither what flows back with time, nor what expires by it: windows, and leases of servers that live."""

    def forward() -> None:
        shared.skew_s += 3600
        shared.tell_time()
        if has_expired:
            for key in shared.redis.client.keys(f"{TAG}:rate:*") + shared.redis.client.keys(f"{TAG}:held:*"):
                shared.redis.client.delete(key)

    await _spend_and_forget(shared, lambda: None, forward)


async def test_a_step_of_the_clock_of_less_than_a_second_gives_less_than_a_second(
    shared: SharedLimits,
) -> None:
    (one,) = await shared.servers(1)
    await one.reserve("all", plan(3000))
    shared.skew_s += 0.9
    shared.tell_time()
    await one.beat()
    assert shared.watches[0].losses == 0
    with pytest.raises(RateLimited):
        await one.reserve("late", plan(46))
    await one.reserve("fits", plan(45))
