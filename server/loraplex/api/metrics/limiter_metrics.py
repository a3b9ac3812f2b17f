"""Metrics of limits that several servers share."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class LimiterMeter:
    """The `LimiterWatch` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._apart = Gauge(
            "loraplex_limiter_apart",
            "1 while Redis is away and this server decides by itself.",
            registry=registry,
        )
        self._replicas = Gauge(
            "loraplex_limiter_replicas", "Servers that share the limits, as last heard.", registry=registry
        )
        self._replicas.set(1)
        self._seconds = Histogram(
            "loraplex_limiter_redis_seconds",
            "Time of a decision that Redis made.",
            buckets=SECONDS,
            registry=registry,
        )
        self._losses = Counter(
            "loraplex_limiter_redis_data_losses",
            "Times that Redis had lost its data and was told again what this server knew.",
            registry=registry,
        )
        decisions = Counter(
            "loraplex_limiter_apart_decisions",
            "Decisions without Redis, by result: passed, refused.",
            ["result"],
            registry=registry,
        )
        self._passed, self._refused = decisions.labels("passed"), decisions.labels("refused")

    def redis_answered(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def decided_apart(self, passed: bool) -> None:
        (self._passed if passed else self._refused).inc()

    def redis_lost_data(self) -> None:
        self._losses.inc()

    def redis_up(self, up: bool, replicas: int) -> None:
        self._apart.set(0 if up else 1)
        self._replicas.set(replicas)
