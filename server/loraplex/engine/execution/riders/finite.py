"""Checks of slices that nothing is sampled or scored of."""

from __future__ import annotations

import torch

from loraplex.engine.execution.riders.rider import Copy, Forward, Rider
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.host_to_device import HostToDevice


class FiniteChecks(Rider):
    """Whether the logits of such slices' last rows are finite. KV that is not finite shows there, before it could be
    found as a prefix."""

    def __init__(self) -> None:
        self._slices: list[int] = []
        self._rows: list[int] = []
        self._on_device: torch.Tensor
        self._ok: torch.Tensor

    def want(self, index: int, row: int) -> None:
        """Check the slice with this index in the plan. `row`: its number among the logits' rows."""
        self._slices.append(index)
        self._rows.append(row)

    def send(self, inputs: HostToDevice) -> None:
        self._on_device = inputs.ints(self._rows)

    def compute(self, forward: Forward) -> None:
        sampler = forward.sampler
        self._ok = sampler.are_finite(sampler.take(forward.logits, self._on_device))

    def to_host(self, copy: Copy) -> None:
        self._ok = copy(self._ok)

    def collect(self, result: StepResult) -> None:
        for index, ok in zip(self._slices, self._ok.tolist(), strict=True):
            if not ok:
                result.rows[index].fail("what was computed of its prompt is not finite")
