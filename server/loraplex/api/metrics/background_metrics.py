"""Metrics of a server's background tasks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.control.background import BackgroundTasks


class BackgroundCollector(Collector):
    """Read at a scrape: the tasks begin before the metrics of the server that runs."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            "loraplex_background_task_up",
            "1 while the task runs, 0 while it waits to be started again.",
            labels=["task"],
        )
        restarts = CounterMetricFamily(
            "loraplex_background_task_restarts", "Times the task was started again.", labels=["task"]
        )
        for state in self._tasks.states:
            up.add_metric([state.name], float(state.up))
            restarts.add_metric([state.name], state.restarts)
        return [up, restarts]
