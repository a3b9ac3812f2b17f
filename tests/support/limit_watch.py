"""What tests put around a limiter on Redis: what it tells of itself, and a link with more patience."""

from __future__ import annotations

from loraplex.control.limits.redis_link import RedisLink


class Watch:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.up = False
        self.replicas = 0
        self.apart: list[bool] = []

    def redis_answered(self, seconds: float) -> None: ...

    def decided_apart(self, passed: bool) -> None:
        self.apart.append(passed)

    def redis_up(self, up: bool, replicas: int) -> None:
        self.up, self.replicas = up, replicas


class PatientLink(RedisLink):
    """Waits longer than a server would, so that a busy machine is no fault; until a test makes Redis hang."""

    patience_s = 10.0

    async def call(self, operation: str, given: bytes, timeout_s: float) -> bytes:
        return await super().call(operation, given, max(timeout_s, self.patience_s))
