"""Chunks of prompts by torch's own attention, all other rows by Triton, as one `AttentionKernel`.

Recorded steps, and those that decode alone, are Triton's: their lists of work are what a recording replays. What torch
cannot compute is no mistake: `obstacle_to_torch` says which property of a model stands in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from loraplex.kernels.attention.kernel import AttentionNeeds
from loraplex.kernels.attention.triton_attention import TritonAttentionBatch
from loraplex.kernels.attention.triton_kernel import MixedBatch, TritonAttention, TritonLayout
from loraplex.kernels.attention.triton_plan import AttentionCapacity

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows first_row … first_row+num_rows-1 of the flat batch are the last positions of seq_len, in `blocks` [B] int32
    on the device."""

    first_row: int
    num_rows: int
    seq_len: int
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunksBatch(TritonAttentionBatch):
    """A step whose `chunks` are torch's; its lists have no work for them."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class _Layout(TritonLayout):
    def lay_out(
        self,
        host: NDArray[np.int32],
        device: torch.Tensor,
        num_rows: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        recorded: bool,
    ) -> tuple[TritonAttentionBatch, int]:
        plan = self.plan
        apart = [count > plan.decode_rows for count in num_rows]
        if recorded or not any(apart):
            return TritonLayout.lay_out(
                self, host, device, num_rows, seq_lens, block_tables, recorded=recorded
            )
        counts = plan.write(host, num_rows, seq_lens, block_tables, apart=apart)
        chunks = []
        row, table = 0, plan.tables_offset
        for count, length, is_chunk in zip(num_rows, seq_lens, apart, strict=True):
            blocks = -(-length // plan.shape.block_size)
            if is_chunk:
                chunks.append(Chunk(row, count, length, device[table : table + blocks]))
            row, table = row + count, table + blocks
        batch = ChunksBatch(plan, device, self.scratch, counts.num_rows, counts.windows, tuple(chunks))
        return batch, counts.num_ints


class TorchPrompts(TritonAttention):
    """See `RecordableAttention`. Each chunk's K and V are gathered, then torch's scaled_dot_product_attention runs: by
    cuDNN where that takes the chunk, else by FlashAttention 2. Gathering reads and writes K and V once: at 2,048 rows
    of Llama-3.1-8B it moves 16 MB for 34 GFLOP of attention, about 4 µs beside 55 µs on an H200, and less for longer
    chunks."""

    name = "torch"
    reads_codes = False

    def layouts(
        self, capacities: Sequence[AttentionCapacity], groups: Sequence[int] | None = None
    ) -> tuple[TritonLayout, ...]:
        return tuple(
            _Layout(each.plan, each.scratch)
            for each in super().layouts(capacities, groups)
            if isinstance(each, TritonLayout)  # heads of several sizes are an obstacle
        )

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: TritonAttentionBatch | MixedBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = super().run(q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
        if isinstance(batch, ChunksBatch):
            # Never the one that keeps all scores in memory.
            fast = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
            with sdpa_kernel(fast, set_priority=True) if q.device.type == "cuda" else nullcontext():
                for chunk in batch.chunks:
                    rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
                    out[rows] = _attend(q[rows], cache, chunk, scale)
        return out


def _attend(q: torch.Tensor, cache: torch.Tensor, chunk: Chunk, scale: float) -> torch.Tensor:
    _, _, _, num_kv_heads, head_dim = cache.shape
    kv = cache.index_select(0, chunk.blocks).view(-1, 2, num_kv_heads, head_dim)[: chunk.seq_len]
    k, v = (kv[:, kind].transpose(0, 1)[None] for kind in range(2))
    has_past = chunk.seq_len > chunk.num_rows
    answer = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=causal_lower_right(chunk.num_rows, chunk.seq_len) if has_past else None,
        is_causal=not has_past,
        scale=scale,
        enable_gqa=True,
    )
    return answer[0].transpose(0, 1)


def obstacle_to_torch(
    needs: AttentionNeeds, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> str | None:
    """Why torch's attention cannot compute a model's prompts beside Triton; None where it can."""
    if any(window is not None for window in needs.windows):
        return "torch's attention has no sliding windows, and the model has"
    if needs.has_softcap:
        return "torch's attention has no softcap, and the model has"
    if needs.has_sinks:
        return "torch's attention has no sinks, and the model has"
    if batch_invariant:
        return "with --batch-invariant, torch's attention cannot promise the same bits"
    if len(needs.windows_of(None)) > 1:
        return "torch's attention takes heads of one size, and the model has several"
    head_dim = needs.shape.head_dim
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"torch's attention takes heads of multiples of 8 up to {_MAX_HEAD_DIM}, not of {head_dim}"
    if dtype not in (torch.bfloat16, torch.float16) and device.type == "cuda":
        return (
            f"torch's attention computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
        )
    return None
