"""The inputs of a decoder's layers, which may be recorded and repeated at later steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of the layers of a step: `residual` [T, C], which they change, cos and sin [T, 1, R/2] of each kind of
    rotation, the sequences as the `AttentionKernel` laid them out for each group of layers, the step's adapters or
    None. `own_inputs` [T, L·P]: of layers that have inputs of their own.
    `recurrent`: the sequences of layers with a state, a `RecurrentRows`. `expert_lora`: the step's adapters on routed
    experts, or None. `enter_layer` is to be called with the number
    of each layer."""

    residual: torch.Tensor
    cos_sin: Sequence[CosSin]
    attention: tuple[Any, ...]
    lora: Any
    own_inputs: torch.Tensor | None = None
    recurrent: Any = None
    expert_lora: Any = None
    enter_layer: Callable[[int], None] = lambda layer: None
