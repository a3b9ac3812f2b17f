"""Attention over a paged KV cache, for a flat batch of ragged sequences.

For the query row t at position p of its sequence, query head h and KV head g = h // (Hq / Hkv):

    s_j = scale · q[t, h] · K[j, g]                        j = 0 … p  (with a window w: j > p - w)
    s_j = softcap · tanh(s_j / softcap)                    if a softcap is given
    out[t, h] = Σ_j softmax(s)_j · V[j, g]

Legend of the shapes: T rows of the flat batch, Hq query heads, Hkv KV heads, D head size, N blocks of the cache,
P positions in a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loraplex.kernels.attention import reference as attention_torch
from loraplex.kernels.attention.types import AttentionBatch, DecodeGroup, PrefillSlice

__all__ = [
    "AttentionBatch",
    "build_attention_batch",
    "paged_attention",
    "write_kv",
]

_SMALL_GATHER_BLOCKS = 8
"""Below this many blocks a row, reading padding costs less than another launch."""


def build_attention_batch(
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int,
    max_gather_blocks: int,
    device: torch.device,
) -> AttentionBatch:
    """Lay out a step: sequence i has the next num_rows[i] rows of the flat batch, seq_lens[i] positions at its end
    (those rows included) and the blocks block_tables[i]. No gather of several sequences exceeds
    `max_gather_blocks`; one sequence alone always gets through. Raises ValueError where a table is too short.
    """
    slots: list[int] = []
    single: list[tuple[int, int, Sequence[int]]] = []  # (seq_len, row, blocks)
    prefill: list[PrefillSlice] = []
    row = 0
    for count, seq_len, table in zip(num_rows, seq_lens, block_tables, strict=True):
        needed = -(-seq_len // block_size)
        if not 1 <= count <= seq_len or len(table) < needed:
            raise ValueError(f"{count} rows of {seq_len} positions do not fit a table of {len(table)} blocks")
        for position in range(seq_len - count, seq_len):
            slots.append(table[position // block_size] * block_size + position % block_size)
        if count == 1:
            single.append((seq_len, row, table[:needed]))
        else:
            blocks = torch.tensor(table[:needed], dtype=torch.int64, device=device)
            prefill.append(PrefillSlice(row, count, seq_len, blocks))
        row += count
    return AttentionBatch(
        num_rows=row,
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        decode=tuple(_decode_group(group, device) for group in _group_by_length(single, max_gather_blocks)),
        prefill=tuple(prefill),
    )


def write_kv(kv: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
    """Store this step's K and V in one layer's cache, in place.

    kv: [T, 2, Hkv, D], K before V; cache: [N, P, 2, Hkv, D]; same dtype.
    """
    attention_torch.write_kv(kv, cache, batch.slots)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The formula above, after `write_kv` of the same step.

    q: [T, Hq, D]; cache: [N, P, 2, Hkv, D]; the same floating dtype. Returns [T, Hq, D] in that dtype, contiguous.
    """
    return attention_torch.paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap)


def _group_by_length(
    single: list[tuple[int, int, Sequence[int]]], max_gather_blocks: int
) -> list[list[tuple[int, int, Sequence[int]]]]:
    """Longest first, so that a group's first row says how far the others are padded: to less than twice their
    own length, except short ones."""
    groups: list[list[tuple[int, int, Sequence[int]]]] = []
    for entry in sorted(single, key=lambda e: -e[0]):
        if groups:
            longest = len(groups[-1][0][2])
            fits = (len(groups[-1]) + 1) * longest <= max_gather_blocks
            if fits and (2 * len(entry[2]) > longest or longest <= _SMALL_GATHER_BLOCKS):
                groups[-1].append(entry)
                continue
        groups.append([entry])
    return groups


def _decode_group(group: list[tuple[int, int, Sequence[int]]], device: torch.device) -> DecodeGroup:
    longest = len(group[0][2])
    blocks: list[int] = []
    for _, _, table in group:
        blocks += table
        blocks += [table[0]] * (longest - len(table))
    return DecodeGroup(
        rows=torch.tensor([row for _, row, _ in group], dtype=torch.int64, device=device),
        blocks=torch.tensor(blocks, dtype=torch.int64, device=device),
        num_blocks=longest,
        seq_lens=torch.tensor([seq_len for seq_len, _, _ in group], dtype=torch.int64, device=device),
        max_seq_len=group[0][0],
    )
