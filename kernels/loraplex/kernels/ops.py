"""The kernels that a decoder's layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from loraplex.kernels.experts.types import ExpertOps
from loraplex.kernels.layers.activation import squared_relu
from loraplex.kernels.layers.short_conv import short_conv
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.recurrent.kernel import RecurrentOps
from loraplex.kernels.weight_form import WeightForm

if TYPE_CHECKING:  # numba need not be there where it does not run.
    from loraplex.kernels.numba_layers import NumbaRecordedLayers

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class AddNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
    ) -> torch.Tensor: ...


class ActAndMul(Protocol):
    def __call__(self, gate_up: torch.Tensor, gelu: bool, up: torch.Tensor | None = None) -> torch.Tensor: ...


class ShortConv(Protocol):
    def __call__(
        self,
        gates: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        previous: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `loraplex.kernels.layers.short_conv`. `previous` is that of the backend's `AttentionKernel`."""
        ...


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
        v_norm: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        """Norm the queries, keys and values of `heads` [T, Hq + 2·Hkv, D] by head where there are weights [D] for it,
        rotate queries and keys by cos and sin [T, 1, R/2], and write keys and values into one layer's cache
        [N, P, 2, Hkv, D], or of codes, for which queries and keys are transformed
        (`loraplex.kernels.attention.kv_codes`). Of `heads` [T, Hq + Hkv, D] the values are the keys, normed by
        `v_norm` alone; with [T, Hq, D] nothing is written. `gated`: a gate of D numbers lies behind each query, as one
        head more, and stays as it is. Queries are changed in place; what `heads` holds of keys
        and values afterwards is not said. `batch` is what the backend's `AttentionKernel` laid out."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each, with the shapes and the rounding of `loraplex.kernels.layers.norm`, `.activation` and
    `.rope`. Attention itself is an `AttentionKernel` (`loraplex.kernels.attention.choice`)."""

    rms_norm: Norm
    add_rms_norm: AddNorm
    add: Callable[[torch.Tensor, torch.Tensor], object]
    """residual += x, in place: (residual, x), [T, C] of one dtype."""
    act_and_mul: ActAndMul
    rotate_and_write: RotateAndWrite
    pack: Callable[[Any, WeightForm, torch.dtype], PackedLinear]
    """Packs the weight [N, K] of a linear for x and y of a dtype. `WeightForm.codes` says what the weight is: a tensor
    in that dtype on its device, or a `GroupedWeight` or a `FloatWeight` on the CPU."""
    to_float32: Callable[[torch.Tensor], torch.Tensor]
    recurrent: RecurrentOps
    experts: ExpertOps
    short_conv: ShortConv = short_conv
    squared_relu: Callable[[torch.Tensor], torch.Tensor] = squared_relu
    times: Callable[[torch.Tensor, float], torch.Tensor] = torch.Tensor.mul_
    """x · factor, of x [T, C]; x may be overwritten."""
    norm_in_place: Callable[[torch.Tensor, torch.Tensor, float], object] | None = None
    """Puts `rms_norm` of x [T, C] into x, whose rows may lie apart; None: by a copy."""
    record_layers: Callable[[], NumbaRecordedLayers] | None = None
    """Begins with a decoder whose layers call these functions; None: steps are not recorded."""
