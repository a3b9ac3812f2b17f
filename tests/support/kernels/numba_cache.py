"""The order that `loraplex.kernels.attention.numba_attention` keeps a KV cache in."""

from __future__ import annotations

from functools import lru_cache

import torch

from loraplex.kernels.attention.kv_codes import from_codes, head_width
from loraplex.kernels.attention.numba_attention import key_value_offsets, scale_offsets
from support.kernels.kv_write import write_for_numba


def packed_cache(cache: torch.Tensor) -> torch.Tensor:
    """A cache [N, 16, 2, Hkv, D], K before V by position, put into that order: the same shape and numbers."""
    packed = torch.empty_like(cache.reshape(len(cache), -1))
    packed[:, _order(*cache.shape[1:], cache.element_size())] = cache.reshape(len(cache), -1)
    return packed.view(cache.shape)


def packed_codes(cache: torch.Tensor) -> torch.Tensor:
    """The same as codes, each position for itself: [N, 16, 2, Hkv, D + 2] int8."""
    num_blocks, positions, _, kv_heads, dim = cache.shape
    packed = torch.empty(num_blocks, positions, 2, kv_heads, head_width(dim, torch.int8), dtype=torch.int8)
    write_for_numba(cache.flatten(0, 1), packed, torch.arange(num_blocks * positions))
    return packed


def unpacked_codes(packed: torch.Tensor) -> torch.Tensor:
    """[N, 16, 2, Hkv, D] float32: the numbers of a cache of codes in that order."""
    num_blocks, positions, _, kv_heads, width = packed.shape
    dim = width - 2
    flat = packed.view(num_blocks, -1)
    codes = flat[:, _order(positions, 2, kv_heads, dim, 1)].view(num_blocks, positions, 2, kv_heads, dim)
    places = [
        [[scale_offsets(h, p, dim)[kind] for h in range(kv_heads)] for kind in range(2)]
        for p in range(positions)
    ]
    at = torch.tensor(places)[..., None] + torch.arange(2)
    return from_codes(codes, flat[:, at].view(torch.float16)[..., 0], torch.float32)


@lru_cache
def _order(positions: int, _: int, kv_heads: int, dim: int, element_size: int) -> torch.Tensor:
    offsets = [
        [[key_value_offsets(h, p, d, dim, element_size) for d in range(dim)] for h in range(kv_heads)]
        for p in range(positions)
    ]
    return torch.tensor(offsets).permute(0, 3, 1, 2).flatten()  # [16, Hkv, D, 2], K before V by position
