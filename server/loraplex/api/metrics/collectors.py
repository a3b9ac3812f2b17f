"""Metrics that are read at a scrape: background tasks, and the disks that a server writes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

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


class DiskCollector(Collector):
    """Asked at a scrape, outside of the event loop: a network's file system may take its time."""

    def __init__(self, directories: Mapping[str, Path]) -> None:
        """Directories by what they hold."""
        self._directories = directories

    def collect(self) -> Iterable[Metric]:
        free = GaugeMetricFamily(
            "loraplex_disk_free_bytes",
            "Left for the server on the disk that holds this directory.",
            labels=["directory"],
        )
        size = GaugeMetricFamily("loraplex_disk_bytes", "Size of that disk.", labels=["directory"])
        for name, path in self._directories.items():
            try:
                usage = shutil.disk_usage(path)
            except OSError:
                continue  # not made yet, or out of reach: no figure is better than a false one
            free.add_metric([name], usage.free)
            size.add_metric([name], usage.total)
        return [free, size]
