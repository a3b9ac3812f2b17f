"""Metric families of a mixture's routers. None has a label of experts: there may be hundreds in each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from loraplex.engine.reports import EXPERT_IMBALANCE, EXPERTS_TOUCHED, ExpertStats


def expert_families(stats: ExpertStats, grown: Callable[[str, float], float]) -> Iterable[Metric]:
    """`grown` makes a counter of an engine process, by its name, monotonic over restarts."""

    def histogram(
        name: str, text: str, bounds: Sequence[float], steps: Sequence[int], total: float
    ) -> Metric:
        name = f"loraplex_engine_{name}"
        labels = [*map(floatToGoString, bounds), "+Inf"]
        counts = steps or (0,) * len(labels)
        up_to = accumulate(
            grown(f"{name} {bound}", count) for bound, count in zip(labels, counts, strict=True)
        )
        family = HistogramMetricFamily(name, text)
        family.add_metric([], list(zip(labels, up_to, strict=True)), grown(name, total))
        return family

    yield histogram(
        "experts_touched",
        "Experts of a layer that a step sent rows to, as the mean over the layers of a mixture.",
        EXPERTS_TOUCHED,
        stats.touched,
        stats.touched_sum,
    )
    yield histogram(
        "expert_imbalance",
        "Rows of the busiest expert over the mean of those that got any, as the mean over the layers of a mixture.",
        EXPERT_IMBALANCE,
        stats.imbalance,
        stats.imbalance_sum,
    )
