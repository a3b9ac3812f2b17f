"""Paged attention compiled by numba as an `AttentionKernel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.attention.numba_attention import (
    NumbaAttentionBatch,
    build_attention_batch,
    paged_attention,
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
