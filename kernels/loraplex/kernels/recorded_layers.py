"""The interface of a decoder whose layers are recorded and repeated at later steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of the layers of a step: `residual` [T, C], which they change, cos and sin [T, 1, R/2] of each kind of
    rotation, the sequences as the `AttentionKernel` laid them out, the step's adapters or None. `enter_layer` is to be
    called with the number of each layer."""

    residual: torch.Tensor
    cos_sin: Sequence[CosSin]
    attention: Any
    lora: Any
    enter_layer: Callable[[int], None] = lambda layer: None


class RecordedLayers(Protocol):
    """Repeats a decoder's layers without the Python code around their kernels. For one thread at a time."""

    def run(
        self, given: LayerInputs, kv: object, run_layers: Callable[[LayerInputs], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The result of `run_layers` for these inputs, and the residual that it leaves; both are overwritten by the
        next call. `kv` owns the memory that layers keep keys and values in. None where such a step can't be recorded;
        then nothing was computed."""
        ...
