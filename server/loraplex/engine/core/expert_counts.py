"""Counts of where the routers of a mixture send rows. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loraplex.engine.execution.step_results import ExpertLoads
from loraplex.engine.reports import EXPERT_IMBALANCE, EXPERTS_TOUCHED, ExpertStats


class ExpertCounts:
    """The counts of all steps since the start. They take as many numbers as the model has experts in all layers."""

    def __init__(self) -> None:
        self._layers: tuple[int, ...] = ()
        self._rows: NDArray[np.int64] | None = None
        self._touched = _Histogram(EXPERTS_TOUCHED)
        self._imbalance = _Histogram(EXPERT_IMBALANCE)

    def computed(self, step: ExpertLoads | None) -> None:
        """Count a step; None is one of a model without routers."""
        if step is None or not step.loads.any():
            return
        loads = step.loads
        if self._rows is None:
            self._layers, self._rows = step.layers, np.zeros_like(loads)
        self._rows += loads
        touched = np.count_nonzero(loads, axis=1)
        self._touched.add(float(touched.mean()))
        self._imbalance.add(float((loads.max(axis=1) * touched / loads.sum(axis=1)).mean()))

    @property
    def stats(self) -> ExpertStats:
        touched, imbalance = self._touched, self._imbalance
        return ExpertStats(tuple(touched.counts), touched.total, tuple(imbalance.counts), imbalance.total)

    def rows(self) -> dict[int, tuple[int, ...]]:
        """The rows that went to each expert, by layer."""
        if self._rows is None:
            return {}
        return {layer: tuple(own) for layer, own in zip(self._layers, self._rows.tolist(), strict=True)}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value
