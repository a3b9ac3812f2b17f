"""What tests put around a limiter on Redis: what it tells of itself, and a link with more patience, or with faults."""

from __future__ import annotations

import asyncio
from typing import Literal

from loraplex.control.limits import redis_link
from loraplex.control.limits.redis_link import LinkDown, RedisLink, redis_script

# A server gives up after 1 s. A Redis that is busy for so long is no fault; one that never answers fails at 60 s.
redis_link.CONNECT_TIMEOUT_S = 60.0


def patient_script() -> str:
    """The same script, on the real clock, which still takes calls that lay about for a minute: a second is no fault of
    a busy machine's."""
    changed = redis_script().replace("local STEP = 1e6\n", "local STEP = 60e6\n")
    assert changed != redis_script()
    return changed


class Watch:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.up = False
        self.replicas = 0
        self.losses = 0
        self.apart: list[bool] = []

    def redis_answered(self, seconds: float) -> None: ...

    def decided_apart(self, passed: bool) -> None:
        self.apart.append(passed)

    def redis_up(self, up: bool, replicas: int) -> None:
        self.up, self.replicas = up, replicas

    def redis_lost_data(self) -> None:
        self.losses += 1


class PatientLink(RedisLink):
    """Waits longer than a server would, so that a busy machine is no fault; until a test makes Redis hang. `reach`:
    what becomes of a call: it is answered; it is done, and the answer comes too late; it does not get there. `permits`:
    answers to these operations wait until they have one each."""

    patience_s = 60.0
    reach: Literal["answers", "late", "away"] = "answers"
    num_late = 0

    def __init__(self, url: str, script: str) -> None:
        super().__init__(url, script)
        self.permits: dict[str, asyncio.Semaphore] = {}

    async def connect(self) -> None:
        if self.reach == "away":
            raise LinkDown("no way there")
        await super().connect()

    async def call(self, operation: str, given: bytes, timeout_s: float) -> bytes:
        if self.reach == "away":
            raise LinkDown("no way there")
        answer = await super().call(operation, given, max(timeout_s, self.patience_s))
        if self.reach != "answers":
            self.num_late += 1
            raise LinkDown("the answer came too late")
        if operation in self.permits:
            await self.permits[operation].acquire()
        return answer
