"""Metrics of shadow versions: how many requests they answered too, and how many wait."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

OUTCOMES = ("exact", "different", "dropped", "failed", "skipped")


class ShadowMeter:
    """Counts sampled requests of all tenants together: the comparison of a release has those of one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "loraplex_shadow_requests",
            "Sampled requests that a shadow version was to answer too, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._waiting = Gauge(
            "loraplex_shadow_waiting", "Sampled requests that wait for their turn.", registry=registry
        )
        self._running = Gauge(
            "loraplex_shadow_running", "Sampled requests that are in the engine.", registry=registry
        )

    def ended(self, outcome: str) -> None:
        self._requests[outcome].inc()

    def watch(self, waiting: Callable[[], float], running: Callable[[], float]) -> None:
        self._waiting.set_function(waiting)
        self._running.set_function(running)
