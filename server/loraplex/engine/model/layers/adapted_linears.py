"""The linears of a decoder's layers, each with its adapters and with the operation that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import Activation
from loraplex.kernels.attention.kv_codes import head_dim_of
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.lora.dispatch import GatingPass
from loraplex.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight [N, K] and bias [N] or None: the linears of a site group of a layer, stacked by rows."""

    weight: PackedLinear
    bias: torch.Tensor | None
    layer: int
    group: str


class AdaptedLinears:
    """Operations on a linear and x [T, K]."""

    def __init__(self, ops: Ops, eps: float, expert_starts: Mapping[int, torch.Tensor]) -> None:
        """`eps`: of all norms. `expert_starts`: [E + 1] int64 of each layer with a mixture, which its steps leave."""
        self.eps = self._eps = eps
        self.expert_starts = expert_starts
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self._rotate_and_write = ops.rotate_and_write
        self.act_and_mul, self.squared_relu = ops.act_and_mul, ops.squared_relu
        self.add, self.times = ops.add, ops.times
        self._norm_in_place = ops.norm_in_place or (lambda x, *norm: x.copy_(ops.rms_norm(x, *norm)))
        self.recurrent, self.short_conv, self.experts = ops.recurrent, ops.short_conv, ops.experts
        self.to_float32 = ops.to_float32

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, C]: see `loraplex.kernels.layers.norm`."""
        return self._rms_norm(x, weight, self._eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, scale: float = 1.0
    ) -> torch.Tensor:
        """[T, C]: residual = (residual + x) · scale, in place, and its norm. Without a weight, the sum itself, which is
        not scaled."""
        if weight is None:
            self.add(residual, x)
            return residual
        return self._add_rms_norm(x, residual, weight, self._eps, scale)

    def apply(self, linear: Linear, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, N]"""
        y = linear.weight(x, linear.bias)
        if batch.lora is not None:
            batch.lora.apply(linear.layer, linear.group, x, y)
        return y

    def apply_and_rotate(
        self,
        linear: Linear,
        x: torch.Tensor,
        batch: ForwardBatch,
        cache: torch.Tensor,
        num_heads: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        v_norm: torch.Tensor | None,
        gated: bool,
    ) -> torch.Tensor:
        """[T, num_heads, D]: the rotated queries; `gated`: [T, 2·num_heads, D], with a gate behind each. Keys and
        values are in the layer's cache afterwards. Norms of queries and keys are by head, or over all heads."""
        y = self.apply(linear, x, batch)
        head_dim, attention = head_dim_of(cache), batch.attention_of(linear.layer)
        if q_norm is not None and k_norm is not None and len(q_norm) > head_dim:
            queries, keys = y[:, : len(q_norm)], y[:, len(q_norm) : len(q_norm) + len(k_norm)]
            self._norm_in_place(queries, q_norm, self._eps)
            self._norm_in_place(keys, k_norm, self._eps)
            q_norm = k_norm = None
        heads = y.view(y.shape[0], y.shape[1] // head_dim, head_dim)
        norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm, "eps": self._eps}
        self._rotate_and_write(heads, num_heads, *cos_sin, cache, attention, **norms, gated=gated)
        return heads[:, : num_heads * (1 + gated)]

    def scale_queries(
        self,
        queries: torch.Tensor,
        scaling: tuple[torch.Tensor, torch.Tensor],
        unwritten: torch.Tensor,
        batch: Any,
    ) -> None:
        """queries [T, Hq, D], in place, by `scaling` of `kernels.layers.rope.scaling_by_position`. `unwritten`: a cache
        of the queries' dtype, which stays as it is."""
        norms: dict[str, Any] = {"q_norm": None, "k_norm": None, "v_norm": None, "eps": self._eps}
        self._rotate_and_write(queries, queries.shape[1], *scaling, unwritten, batch, **norms)

    def gate(
        self,
        linear: Linear,
        x: torch.Tensor,
        batch: ForwardBatch,
        activation: Activation,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, N ÷ 2]: the activation of gate, times up; or [T, N], with `up` [T, N] that is not the linear's."""
        y, gelu = linear.weight(x, linear.bias), activation == "gelu_tanh"
        if isinstance(batch.lora, GatingPass) and up is None:
            gated = batch.lora.gate(linear.layer, linear.group, x, y, gelu=gelu)
            if gated is not None:
                return gated
        if batch.lora is not None:
            batch.lora.apply(linear.layer, linear.group, x, y)
        return self.act_and_mul(y, gelu, up)

    def apply_and_norm(
        self, linear: Linear, x: torch.Tensor, batch: ForwardBatch, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, N]: the linear's result, normed where there is a weight."""
        return self.norm(self.apply(linear, x, batch), weight)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """[T, C]: normed where there is a weight."""
        return x if weight is None else self.rms_norm(x, weight)
