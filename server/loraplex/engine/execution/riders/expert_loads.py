"""The numbers of rows that the routers of a mixture sent to each expert."""

from __future__ import annotations

import torch

from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import ExpertLoads, StepResult
from loraplex.engine.model.base import ExpertStarts


class StepExperts(Rider):
    """Those of one step. Recorded layers leave them too."""

    def __init__(self, kept: ExpertStarts) -> None:
        self._kept = kept
        self._loads: torch.Tensor

    def compute(self, forward: Forward) -> None:
        self._loads = self._kept.starts.diff(dim=1)

    def to_host(self, copy: Copy) -> None:
        self._loads = copy(self._loads)

    def collect(self, result: StepResult) -> None:
        result.experts = ExpertLoads(self._kept.layers, self._loads.numpy())
