"""Which kernel computes a model's attention, chosen once when the model is loaded."""

from __future__ import annotations

import torch

from loraplex.kernels.attention.kernel import AttentionKernel, AttentionNeeds
from loraplex.kernels.attention.torch_kernel import TorchAttention
from loraplex.kernels.backend import Backend


def choose_attention(
    backend: Backend,
    needs: AttentionNeeds,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool = False,
) -> AttentionKernel:
    """The kernel that goes with the other kernels of a `backend` that `resolve_backend` returned. `batch_invariant`: a
    row gets the same bits in every step, where that is a choice."""
    if backend == "triton":
        # Triton need not be there where it does not run.
        from loraplex.kernels.attention.triton_kernel import TritonAttention

        return TritonAttention(needs, dtype, device, batch_invariant=batch_invariant)
    if backend == "numba":
        # numba takes a second to import.
        from loraplex.kernels.attention.numba_kernel import NumbaAttention

        return NumbaAttention()
    return TorchAttention(needs.shape.num_kv_heads, needs.shape.head_dim, dtype, device)
