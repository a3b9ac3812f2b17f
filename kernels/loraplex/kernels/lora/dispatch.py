"""Batched LoRA: every row of a batch gets the low-rank update of its own adapter, all in one go.

For a group of sites (linears that read the same x and write adjacent columns of y), for each row t with adapter a and
each site i of the group that a has:

    y[t, cols_i] += (x[t] · A_{a,i}ᵀ) · B_{a,i}        A [R, K], B [R, N_i] (transposed, scaling folded in)

    T rows of the batch · K in_features · N_i out_features of site i · R the site's own rank in a

A site may have vectors g and c [N_i] besides, as DoRA does (Liu et al., ICML 2024); then y, as the base left it, is
scaled column by column and moved, in the same step:

    y[t, cols_i] ← g_{a,i} ⊙ y[t, cols_i] + c_{a,i} + (x[t] · A_{a,i}ᵀ) · B_{a,i}

Rows of the base model and sites that an adapter lacks stay as they are. The weights lie in tiles of CHUNK ranks, an A
tile [CHUNK, K] and a B tile [CHUNK, N_i] for each chunk, anywhere in one flat storage; tables hold the offsets. This is
the segmented gather matrix-vector product of Punica (Chen et al., MLSys 2024), with ranks cut into equal chunks.

`begin_pass` prepares a step on the CPU's kernels and torch's, `LoraPass.apply` runs a group of a layer. In Triton, a
step is prepared by `loraplex.kernels.lora.triton_lora.TritonLora`, over tables that stay on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from loraplex.kernels.lora.types import (
    CHUNK,
    GRANULE_BYTES,
    LoraPass,
    LoraWeights,
    Scratch,
    Segment,
    segments_by_slot,
)

__all__ = [
    "CHUNK",
    "GRANULE_BYTES",
    "GatingPass",
    "LoraPass",
    "LoraWeights",
    "Scratch",
    "Segment",
    "begin_pass",
]


class GatingPass(LoraPass, ABC):
    """A `LoraPass` that has operations for gate and up which compute the activation too."""

    @abstractmethod
    def gate(
        self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, *, gelu: bool
    ) -> torch.Tensor | None:
        """Return f(gate) · up [T, N ÷ 2] of what `apply` would make of y [T, N], gate before up, where f is silu or,
        with `gelu`, the tanh approximation of gelu. y is undefined then. Return None, and do nothing, for a batch for
        which `apply` and an activation of its own are better. Raises as `apply` does."""


def begin_pass(
    make: Callable[[LoraWeights, Scratch, Mapping[int, Sequence[Segment]], int], LoraPass],
    weights: LoraWeights,
    scratch: Scratch,
    segments: Sequence[Segment],
    num_rows: int,
) -> LoraPass | None:
    """Prepare a step of `num_rows` rows; None if no row has an adapter. Rows that no segment names are the base
    model's. Segments must not overlap; one adapter may have several. `make`: a backend's (`Kernels.lora_pass`).

    Raises ValueError for a segment outside the rows, an overlap, or an empty slot.
    """
    by_slot = segments_by_slot(segments, weights.num_chunks, num_rows)
    return make(weights, scratch, by_slot, num_rows) if by_slot else None
