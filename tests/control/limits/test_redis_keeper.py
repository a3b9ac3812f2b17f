"""What keeps a server's tie to the limits' Redis outlives whatever it meets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loraplex.control.background import BackgroundTasks
from loraplex.control.limits.redis_limiter import RedisLimiter
from support.control.limit_watch import PatientLink, Watch, patient_script
from support.servers.redis_server import redis_server


async def soon(_: float) -> None:
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("where", ["beat", "reader"])
async def test_a_failure_that_nobody_foresaw(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    redis = redis_server()
    redis.client.flushall()
    tasks, watch = BackgroundTasks(sleep=soon), Watch()
    link = PatientLink(redis.url, patient_script())
    limiter = RedisLimiter(link, watch, background=tasks)
    await limiter.start()
    asked: list[str] = []
    real = link.call

    async def broken(operation: str, *given: Any) -> bytes:
        asked.append(operation)
        if len(asked) == 1:
            if where == "beat":
                raise RuntimeError("a bug")
            assert link._wire is not None
            link._wire.waiting.appendleft("no future")  # type: ignore[arg-type]
        return await real(operation, *given)

    monkeypatch.setattr(link, "call", broken)
    async with asyncio.timeout(60):
        while asked.count("heartbeat") < 3 or not watch.up:
            await asyncio.sleep(0.01)
    (state,) = tasks.states
    assert (state.name, state.up, state.restarts) == ("limiter-redis", True, int(where == "beat"))
    await limiter.close()
    assert not state.up
