"""The linears of a decoder's layers, each with its adapters and with the operation that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.kernels.attention.kv_codes import head_dim_of
from loraplex.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """The weight [N, K], as `Ops.pack_weight` made it, and bias [N] or None: the linears of a site group, stacked by
    rows."""

    weight: Any
    bias: torch.Tensor | None


class _Norms(TypedDict):
    """Norms of queries and keys."""

    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


class AdaptedLinears:
    """Each method takes a linear, x [T, K], the layer's number and the site group's name. Where the batch's
    `lora_readers` compute the adapters in what follows the linear, they do. `eps`: of all norms; `gemma`: norms in
    float32, and GELU."""

    def __init__(self, ops: Ops, *, eps: float, gemma: bool) -> None:
        self._linear = ops.linear
        self._eps = eps
        self._gemma = gemma
        self._rms_norm = ops.rms_norm_float32 if gemma else ops.rms_norm
        self._add_rms_norm = ops.add_rms_norm_float32 if gemma else ops.add_rms_norm
        self._rotate_and_write = ops.rotate_and_write
        self._activation = ops.gelu_tanh_and_mul if gemma else ops.silu_and_mul

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, C]: see `loraplex.kernels.layers.norm`."""
        return self._rms_norm(x, weight, self._eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, C]: residual += x, in place, and its norm."""
        return self._add_rms_norm(x, residual, weight, self._eps)

    def apply(
        self, linear: Linear, x: torch.Tensor, layer: int, group: str, batch: ForwardBatch
    ) -> torch.Tensor:
        """[T, N]"""
        y = self._product(linear, x, layer, group, batch)
        if batch.lora is not None:
            batch.lora.apply(layer, group, x, y)
        return y

    def apply_and_rotate(
        self,
        linear: Linear,
        x: torch.Tensor,
        layer: int,
        group: str,
        batch: ForwardBatch,
        num_heads: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, num_heads, D]: the rotated queries. Keys and values are in the batch's cache afterwards."""
        y = self._product(linear, x, layer, group, batch)
        cache = batch.kv.layer(layer)
        head_dim = head_dim_of(cache)
        heads = y.view(y.shape[0], y.shape[1] // head_dim, head_dim)
        norms: _Norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": self._eps}
        readers = batch.lora_readers
        if readers is None or not readers.rotary(
            layer, group, x, y, num_heads, *cos_sin, cache, batch.attention.slots, **norms
        ):
            if batch.lora is not None:
                batch.lora.apply(layer, group, x, y)
            self._rotate_and_write(heads, num_heads, *cos_sin, cache, batch.attention, **norms)
        return heads[:, :num_heads]

    def gate(
        self, linear: Linear, x: torch.Tensor, layer: int, group: str, batch: ForwardBatch
    ) -> torch.Tensor:
        """[T, N ÷ 2]: the activation of gate and up."""
        y = self._product(linear, x, layer, group, batch)
        if batch.lora_readers is not None:
            found = batch.lora_readers.gated(layer, group, x, y, gelu=self._gemma)
            if found is not None:
                return found
        if batch.lora is not None:
            batch.lora.apply(layer, group, x, y)
        return self._activation(y)

    def apply_and_norm(
        self,
        linear: Linear,
        x: torch.Tensor,
        layer: int,
        group: str,
        batch: ForwardBatch,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, N]: the norm of the result, or of `residual` += the result where there is one."""
        y = self._product(linear, x, layer, group, batch)
        if batch.lora_readers is not None:
            found = batch.lora_readers.norm(layer, group, x, y, weight, self._eps, residual)
            if found is not None:
                return found
        if batch.lora is not None:
            batch.lora.apply(layer, group, x, y)
        if residual is None:
            return self._rms_norm(y, weight, self._eps)
        return self._add_rms_norm(y, residual, weight, self._eps)

    def _product(
        self, linear: Linear, x: torch.Tensor, layer: int, group: str, batch: ForwardBatch
    ) -> torch.Tensor:
        """The base's alone."""
        if batch.begin_lora is not None:
            batch.begin_lora(layer, group, x)
        return self._linear(x, linear.weight, linear.bias)
