"""Paged attention in torch as an `AttentionKernel`: any device, any size, any window, any softcap."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.attention import dispatch
from loraplex.kernels.attention.kernel import BLOCK_SIZE
from loraplex.kernels.attention.types import AttentionBatch

MAX_GATHER_BYTES = 64 << 20
"""Bound of a decode gather's K and V of one layer, unless one sequence alone needs more."""


class TorchAttention:
    """See `AttentionKernel`. `num_kv_heads`, `head_dim` and `dtype` are those of the KV cache."""

    name = "torch"
    reads_unwritten = True

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        block_bytes = BLOCK_SIZE * 2 * num_kv_heads * head_dim * dtype.itemsize
        self._max_gather_blocks = max(1, MAX_GATHER_BYTES // block_bytes)
        self._device = device

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> AttentionBatch:
        return dispatch.build_attention_batch(
            num_rows,
            seq_lens,
            block_tables,
            block_size=BLOCK_SIZE,
            max_gather_blocks=self._max_gather_blocks,
            device=self._device,
        )

    def write_kv(self, kv: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
        dispatch.write_kv(kv, cache, batch)

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        return dispatch.paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)
