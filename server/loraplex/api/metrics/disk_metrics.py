"""Metrics of the free space on the disks that a server writes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


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
