"""Keys and values written into a cache in each kernel's order, to begin a test with."""

from __future__ import annotations

from typing import Any

import torch

from loraplex.kernels.attention import torch_attention
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.attention.kv_codes import SCALE_BYTES, to_codes
from loraplex.kernels.attention.numba_attention import key_value_offsets, scale_offsets
from loraplex.kernels.attention.numba_kernel import NumbaAttention
from loraplex.kernels.attention.torch_attention import TorchAttention
from support.kernels.triton_cache import write_for_triton


def write_kv(kernel: AttentionKernel, kv: torch.Tensor, cache: torch.Tensor, batch: Any) -> None:
    """Store K and V of a batch's `slots` in one layer's cache, in place. kv: [T, 2, Hkv, D], K before V; cache: [N, P,
    2, Hkv, D] of the same dtype, or [N, P, 2, Hkv, D + 2] of codes."""
    if isinstance(kernel, TorchAttention):
        torch_attention.write_kv(kv, cache, batch)
    elif isinstance(kernel, NumbaAttention):
        write_for_numba(kv, cache, batch.slots)
    else:
        write_for_triton(kv, cache, batch.slots)


def write_for_numba(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """slots: [T]."""
    block_size, heads, dim = cache.shape[1], cache.shape[3], kv.shape[3]
    head = torch.arange(heads)[:, None]
    at = torch.arange(dim)
    position = (slots % block_size)[:, None, None]
    of_keys, of_values = key_value_offsets(head, position, at, dim, cache.element_size())
    blocks = (slots // block_size)[:, None, None] * cache.stride(0)
    flat = cache.as_strided((cache.stride(0) * (len(cache) - 1) + cache[0].numel(),), (1,))
    if cache.dtype is torch.int8:
        kv, scales = to_codes(kv)
        pair = torch.arange(SCALE_BYTES)
        for kind, places in enumerate(scale_offsets(head, position, dim)):
            flat[blocks + places + pair] = scales[:, kind, :, None].contiguous().view(torch.int8)
    flat[blocks + of_keys] = kv[:, 0]
    flat[blocks + of_values] = kv[:, 1]
