"""What a limiter on Redis tells of itself, for tests."""

from __future__ import annotations


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
