"""Limits in a Redis cluster: they lie in one slot, and a server follows it from node to node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from loraplex.control.errors import RateLimited
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import TAG
from loraplex.control.types import NO_LIMITS
from support.control.limit_watch import PatientLink, Watch, patient_script
from support.control.limiters import tenant, whole_plan
from support.servers.redis_server import RedisServer
from support.waiting import eventually

pytestmark = pytest.mark.slow
SLOTS = 16384


@pytest.fixture
def nodes() -> Iterator[list[RedisServer]]:
    """Two; the first one has all slots."""
    made = [RedisServer(cluster=True) for _ in range(2)]
    try:
        made[0].client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", str(SLOTS - 1))
        made[0].meet(made[1])
        for node in made:
            eventually(
                lambda node=node: b"cluster_state:ok" in _info(node) and b"known_nodes:2" in _info(node)
            )
        yield made
    finally:
        for node in made:
            node.close()


def _info(node: RedisServer) -> bytes:
    told = node.client.execute_command("CLUSTER", "INFO")
    return told if isinstance(told, bytes) else "\n".join(f"{k}:{v}" for k, v in told.items()).encode()


def _move_slot(source: RedisServer, target: RedisServer) -> None:
    """The slot of the limits with all its keys, as an operator moves it."""
    slot = source.client.execute_command("CLUSTER", "KEYSLOT", TAG)
    ids = [node.client.execute_command("CLUSTER", "MYID") for node in (source, target)]
    target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    keys = source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    assert keys, "the limits are in this slot"
    source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for node in (target, source):
        node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def _plan() -> LimitPlan:
    who = tenant(requests_per_minute=4, max_concurrency=10)
    return whole_plan(who, NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=1)


async def test_a_server_follows_the_slot_wherever_it_is(nodes: list[RedisServer]) -> None:
    watches = [Watch(), Watch()]
    limiters = []
    for node, watch in zip(nodes, watches, strict=True):
        limiters.append(RedisLimiter(PatientLink(node.url, patient_script()), watch))
        await limiters[-1].start()
    for number, limiter in enumerate(limiters):
        await limiter.reserve(f"before{number}", _plan())
    _move_slot(*nodes)
    for number, limiter in enumerate(limiters):
        await limiter.reserve(f"moved{number}", _plan())  # decided apart, as the slot is elsewhere
    await _together(limiters, watches)
    with pytest.raises(RateLimited, match="4 requests a minute"):
        await limiters[0].reserve("after", _plan())
    for number, limiter in enumerate(limiters):
        await limiter.settle(f"before{number}", used_tokens=1)
        await limiter.settle(f"moved{number}", used_tokens=1)
    assert nodes[1].client.execute_command("EXISTS", f"{TAG}:busy:server:") == 0
    for limiter in limiters:
        await limiter.close()


async def _together(limiters: list[RedisLimiter], watches: list[Watch]) -> None:
    async with asyncio.timeout(60):
        while not all(watch.up for watch in watches):
            await asyncio.sleep(0.01)
