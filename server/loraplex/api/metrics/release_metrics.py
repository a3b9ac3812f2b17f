"""Metrics of releases that are watched."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from loraplex.lifecycle.release_guard.rules import MetricName


class ReleaseMeter:
    """The `ReleaseWatch` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        rollbacks = Counter(
            "loraplex_release_rollbacks",
            "Releases that this server rolled back by itself, by the metric that broke its margin, or unusable.",
            ["reason"],
            registry=registry,
        )
        causes = (*get_args(MetricName), "unusable")
        self._rollbacks = {cause: rollbacks.labels(cause) for cause in causes}
        self._running = Gauge(
            "loraplex_releases_running", "Releases with a guard or a schedule that runs.", registry=registry
        )
        self._leader = Gauge(
            "loraplex_release_leader",
            "1 while this server decides for watched releases; 0 for all where there are none.",
            registry=registry,
        )

    def rolled_back(self, cause: str) -> None:
        self._rollbacks[cause].inc()

    def round_ended(self, *, num_running: int, leads: bool) -> None:
        self._running.set(num_running)
        self._leader.set(leads)
