"""Paged attention compiled by numba as an `AttentionKernel`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.attention.numba_attention import (
    NumbaAttentionBatch,
    build_attention_batch,
    paged_attention,
)
from loraplex.kernels.attention.previous import previous_slots
from loraplex.kernels.numba_runtime.recording import NotRecordable


class NumbaAttention:
    """See `AttentionKernel`. The cache is in the order of `loraplex.kernels.attention.numba_attention`."""

    name = "numba"
    reads_unwritten = False
    reads_codes = True

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> NumbaAttentionBatch:
        return build_attention_batch(num_rows, seq_lens, block_tables)

    def previous_slots(self, batch: NumbaAttentionBatch, count: int) -> torch.Tensor:
        if not isinstance(batch, NumbaAttentionBatch):
            raise NotRecordable("the slots before a row differ from step to step")
        if count not in batch.previous:
            found = previous_slots(batch.counts, batch.seq_lens, batch.starts, batch.tables, count)
            batch.previous[count] = torch.from_numpy(found)
        return batch.previous[count]

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: NumbaAttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
