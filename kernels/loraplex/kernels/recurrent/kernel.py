"""The seam of recurrent layers: what a decoder needs of an implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentMemory, RecurrentRows


class Convolve(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        rows: RecurrentRows,
        memory: RecurrentMemory,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class DeltaGates(Protocol):
    def __call__(
        self, b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Rule(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        rows: RecurrentRows,
        memory: RecurrentMemory,
        heads: RecurrentHeads,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class StepGates(Protocol):
    def __call__(
        self, dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class RecurrentOps:
    """The kernels of layers with a state, as `loraplex.kernels.recurrent.torch_recurrent` has them."""

    convolve: Convolve
    delta_gates: DeltaGates
    rule: Rule
    gated_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    output_gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    by_part: Callable[[torch.Tensor, int, tuple[int, ...]], torch.Tensor]
    step_gates: StepGates
