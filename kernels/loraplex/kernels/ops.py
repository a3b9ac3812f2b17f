"""The kernels that a decoder's layers are made of, chosen once for a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from loraplex.kernels.attention import dispatch as attention
from loraplex.kernels.backend import Backend
from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.layers import activation, dense, norm, rope
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
        them by cos and sin [T, 1, R/2], and write keys and values into one layer's cache [N, P, 2, Hkv, D]. Queries
        are changed in place; what `heads` holds of keys afterwards is not said. `batch` is what the backend's
        `AttentionKernel` laid out."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each, with the shapes and the rounding of `loraplex.kernels.layers.norm`, `.activation`,
    `.rope` and `.dense`. What `pack_weight` returns is for `linear` alone. Attention itself is an `AttentionKernel`
    (`loraplex.kernels.attention.choice`). `record_layers` begins with a decoder whose layers call these functions."""

    rms_norm: Norm
    add_rms_norm: AddNorm
    rms_norm_float32: Norm
    add_rms_norm_float32: AddNorm
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_tanh_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rotate_and_write: RotateAndWrite
    pack_weight: Callable[[torch.Tensor], Any]
    linear: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    to_float32: Callable[[torch.Tensor], torch.Tensor]
    record_layers: Callable[[], RecordedLayers] | None = None


def resolve_ops(backend: Backend, *, batch_invariant: bool = False) -> Ops:
    """The implementations of a backend that `resolve_backend` returned. `batch_invariant`: those whose rows have the
    same bits in every step (ADR 0039); on a CPU nearly all have them anyway."""
    if backend == "triton":
        return _triton_ops(batch_invariant)
    if backend == "numba":
        return _numba_ops(batch_invariant)
    return _torch_ops()


def _torch_ops() -> Ops:
    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        rms_norm_float32=norm.rms_norm_float32,
        add_rms_norm_float32=norm.add_rms_norm_float32,
        silu_and_mul=activation.silu_and_mul,
        gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
        rotate_and_write=_rotate_and_write,
        pack_weight=dense.pack_weight,
        linear=dense.linear,
        to_float32=torch.Tensor.float,
    )


def _triton_ops(batch_invariant: bool) -> Ops:
    # Triton need not be there where it does not run.
    from loraplex.kernels.attention import triton_attention
    from loraplex.kernels.layers import triton_activation, triton_dense, triton_norm, triton_rope

    def rotate_and_write(
        heads: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        batch: triton_attention.TritonAttentionBatch,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> None:
        triton_rope.rope_and_write_kv(
            heads, num_heads, cos, sin, cache, batch.slots, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

    return Ops(
        rms_norm=triton_norm.rms_norm,
        add_rms_norm=triton_norm.add_rms_norm,
        rms_norm_float32=triton_norm.rms_norm_float32,
        add_rms_norm_float32=triton_norm.add_rms_norm_float32,
        silu_and_mul=triton_activation.silu_and_mul,
        gelu_tanh_and_mul=triton_activation.gelu_tanh_and_mul,
        rotate_and_write=rotate_and_write,
        pack_weight=dense.pack_weight,
        linear=triton_dense.linear if batch_invariant else dense.linear,
        to_float32=torch.Tensor.float,
    )


def _numba_ops(batch_invariant: bool) -> Ops:
    """For tensors on a CPU, of a dtype of `numba_runtime.vectors.LIKE`."""
    # numba takes a second to import.
    from loraplex.kernels import numba_layers
    from loraplex.kernels.layers import numba_activation, numba_dense, numba_norm, numba_rope, numba_widen

    return Ops(
        rms_norm=numba_norm.rms_norm,
        add_rms_norm=numba_norm.add_rms_norm,
        rms_norm_float32=numba_norm.rms_norm_float32,
        add_rms_norm_float32=numba_norm.add_rms_norm_float32,
        silu_and_mul=numba_activation.silu_and_mul,
        gelu_tanh_and_mul=numba_activation.gelu_tanh_and_mul,
        rotate_and_write=numba_rope.rotate_and_write,
        pack_weight=partial(numba_dense.pack_weight, batch_invariant=batch_invariant, pool=HugePagePool()),
        linear=numba_dense.linear,
        to_float32=numba_widen.to_float32,
        record_layers=numba_layers.NumbaRecordedLayers,
    )


def _rotate_and_write(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: attention.AttentionBatch,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    num_rows, _, head_dim = heads.shape
    num_kv_heads = cache.shape[3]
    if q_norm is not None and k_norm is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        # A weight in float32 is one that must not be rounded first.
        rms_norm = norm.rms_norm if q_norm.dtype is heads.dtype else norm.rms_norm_float32
        q.copy_(rms_norm(q, q_norm, eps))
        k.copy_(rms_norm(k, k_norm, eps))
    # q and k lie side by side: one rotation for both, and k beside v: one write for both.
    rope.apply_rope(heads[:, : num_heads + num_kv_heads], cos, sin)
    attention.write_kv(heads[:, num_heads:].view(num_rows, 2, num_kv_heads, head_dim), cache, batch)
