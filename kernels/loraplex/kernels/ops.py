"""The kernels that a decoder's layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loraplex.kernels.linear.floats import FloatWeight
from loraplex.kernels.linear.groups import GroupedWeight
from loraplex.kernels.recorded_layers import RecordedLayers

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class RotateAndWrite(Protocol):
    def __call__(
        self,
        heads: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        batch: Any,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        """Norm the queries and keys of `heads` [T, Hq + 2·Hkv, D] by head where there are weights [D] for it, rotate
        them by cos and sin [T, 1, R/2], and write keys and values into one layer's cache [N, P, 2, Hkv, D], or of
        codes, for which queries and keys are transformed (`loraplex.kernels.attention.kv_codes`). Queries are
        changed in place; what `heads` holds of keys afterwards is not said. `batch` is what the backend's
        `AttentionKernel` laid out."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each, with the shapes and the rounding of `loraplex.kernels.layers.norm`, `.activation` and
    `.rope`, and of `loraplex.kernels.linear.dense`. What `pack_weight` and `pack_groups` return is for `linear` alone;
    `pack_groups` takes a weight on the CPU and the dtype of x and y; so does `pack_integers`, and the most bits, 4 or
    8, of codes that `linear` multiplies as whole numbers, with x in codes of 8 bits too
    (`loraplex.kernels.linear.numba_int8`); what has more bits is packed as by `pack_groups`. None: there are no such
    products. `pack_floats` gives None for a weight that must be in the dtype that it takes;
    all must where it is None itself. Attention itself is an `AttentionKernel`
    (`loraplex.kernels.attention.choice`). `record_layers` begins with a decoder whose layers call these functions."""

    rms_norm: Norm
    add_rms_norm: AddNorm
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rotate_and_write: RotateAndWrite
    pack_weight: Callable[[torch.Tensor], Any]
    pack_groups: Callable[[GroupedWeight, torch.dtype], Any]
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    to_float32: Callable[[torch.Tensor], torch.Tensor]
    pack_integers: Callable[[GroupedWeight, torch.dtype, int], Any] | None = None
    record_layers: Callable[[], RecordedLayers] | None = None
    pack_floats: Callable[[FloatWeight, torch.dtype], Any | None] | None = None
