"""Paged attention compiled by numba as an `AttentionKernel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.attention.kv_codes import SCALE_BYTES, to_codes
from loraplex.kernels.attention.numba_attention import (
    NumbaAttentionBatch,
    build_attention_batch,
    key_value_offsets,
    paged_attention,
    scale_offsets,
)


class NumbaAttention:
    """See `AttentionKernel`. The cache is in the order of `loraplex.kernels.attention.numba_attention`."""

    name = "numba"
    reads_unwritten = False
    reads_codes = True

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> NumbaAttentionBatch:
        return build_attention_batch(num_rows, seq_lens, block_tables)

    def write_kv(self, kv: torch.Tensor, cache: torch.Tensor, batch: NumbaAttentionBatch) -> None:
        block_size, heads, dim = cache.shape[1], cache.shape[3], kv.shape[3]
        head = torch.arange(heads)[:, None]
        at = torch.arange(dim)
        position = (batch.slots % block_size)[:, None, None]
        of_keys, of_values = key_value_offsets(head, position, at, dim, cache.element_size())
        blocks = (batch.slots // block_size)[:, None, None] * cache.stride(0)
        flat = cache.as_strided((cache.stride(0) * (len(cache) - 1) + cache[0].numel(),), (1,))
        if cache.dtype is torch.int8:
            kv, scales = to_codes(kv)
            pair = torch.arange(SCALE_BYTES)
            for kind, places in enumerate(scale_offsets(head, position, dim)):
                flat[blocks + places + pair] = scales[:, kind, :, None].contiguous().view(torch.int8)
        flat[blocks + of_keys] = kv[:, 0]
        flat[blocks + of_values] = kv[:, 1]

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: NumbaAttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
