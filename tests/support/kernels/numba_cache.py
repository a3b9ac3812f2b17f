"""The order that `loraplex.kernels.attention.numba_attention` keeps a KV cache in."""

from __future__ import annotations

from functools import lru_cache

import torch

from loraplex.kernels.attention.numba_attention import key_value_offsets


def packed_cache(cache: torch.Tensor) -> torch.Tensor:
    """A cache [N, 16, 2, Hkv, D], K before V by position, put into that order: the same shape and numbers."""
    packed = torch.empty_like(cache.reshape(len(cache), -1))
    packed[:, _order(*cache.shape[1:], cache.element_size())] = cache.reshape(len(cache), -1)
    return packed.view(cache.shape)


@lru_cache
def _order(positions: int, _: int, kv_heads: int, dim: int, element_size: int) -> torch.Tensor:
    offsets = [
        [[key_value_offsets(h, p, d, dim, element_size) for d in range(dim)] for h in range(kv_heads)]
        for p in range(positions)
    ]
    return torch.tensor(offsets).permute(0, 3, 1, 2).flatten()  # [16, Hkv, D, 2], K before V by position
