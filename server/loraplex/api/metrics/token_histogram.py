"""A histogram for what is observed with every token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenHistogram(Collector):
    """Like `prometheus_client.Histogram`, whose observation takes ten times as long: a lock for each number, and a loop
    over the bounds. One thread observes. `bounds` ascend; a value that equals one is counted with it."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """May run in another thread."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        names = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        return [family]
