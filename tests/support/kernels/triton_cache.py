"""Keys and values written into a cache in Triton's order. Without numba, which a machine for GPUs may lack."""

from __future__ import annotations

import torch

from loraplex.kernels.attention.kv_codes import to_codes


def write_for_triton(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """kv: [T, 2, Hkv, D], K before V; slots: [T], -1 for nowhere."""
    there = slots >= 0
    kv, slots = kv[there], slots[there].long()
    num_blocks, positions, _, heads, _ = cache.shape
    block, position = slots // positions, slots % positions
    if cache.dtype is not torch.int8:
        cache[block, position] = kv
        return
    codes, scales = to_codes(kv)
    flat, size = cache.view(num_blocks, -1), codes.shape[1:].numel() * positions
    flat[:, :size].view(num_blocks, positions, *codes.shape[1:])[block, position] = codes
    of_scales = flat[:, size:].view(torch.float16).view(num_blocks, 2, heads, positions)
    of_scales[block, :, :, position] = scales
