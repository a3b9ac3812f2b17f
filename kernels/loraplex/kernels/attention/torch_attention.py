"""Attention over a paged KV cache in torch, for a flat batch of ragged sequences: the reference, and the way of
processors without a kernel of their own.

For the query row t at position p of its sequence, query head h and KV head g = h // (Hq / Hkv):

    s_j = scale · q[t, h] · K[j, g]                        j = 0 … p  (with a window w: j > p - w)
    s_j = softcap · tanh(s_j / softcap)                    if a softcap is given
    out[t, h] = Σ_j softmax(s)_j · V[j, g]                 with a sink: softmax over s and sink[h], which has no value

Legend of the shapes: T rows of the flat batch, Hq query heads, Hkv KV heads, D head size, N blocks of the cache,
P positions in a block.

Blocks are gathered into dense K and V, then torch's scaled_dot_product_attention runs with the query heads of a
group taken as its query positions (decode) or as its heads over one shared K (prefill), so that K and V are never
repeated for grouped-query attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch.nn.functional import scaled_dot_product_attention

from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import pack_rows, unpack_rows
from loraplex.kernels.attention.previous import previous_slots
from loraplex.kernels.attention.types import (
    AttentionBatch,
    DecodeGroup,
    DecodeView,
    PrefillSlice,
    PrefillView,
)

MAX_GATHER_BYTES = 64 << 20
"""Bound of a decode gather's K and V of one layer, unless one sequence alone needs more."""
_SMALL_GATHER_BLOCKS = 8
"""Below this many blocks a row, reading padding costs less than another launch."""
_MAX_MASK_ELEMENTS = 1 << 22
"""A mask up to this size is made once and kept for all layers; a larger one is made tile by tile in each."""


class TorchAttention:
    """An `AttentionKernel` of any device, size, window and softcap. `num_kv_heads`, `head_dim` and `dtype` are those of
    a KV cache that is not of codes."""

    name = "torch"
    reads_unwritten = True
    reads_codes = True

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        block_bytes = BLOCK_SIZE * 2 * num_kv_heads * head_dim * dtype.itemsize
        self._max_gather_blocks = max(1, MAX_GATHER_BYTES // block_bytes)
        self._device = device

    def lay_out(
        self, num_rows: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> AttentionBatch:
        return build_attention_batch(
            num_rows,
            seq_lens,
            block_tables,
            block_size=BLOCK_SIZE,
            max_gather_blocks=self._max_gather_blocks,
            device=self._device,
        )

    def previous_slots(self, batch: AttentionBatch, count: int) -> torch.Tensor:
        if count not in batch.previous:
            num_rows, seq_lens, tables = batch.sequences
            starts = [*accumulate(map(len, tables[:-1]), initial=0)]
            found = previous_slots(num_rows, seq_lens, starts, [*chain.from_iterable(tables)], count)
            batch.previous[count] = torch.from_numpy(found).to(self._device)
        return batch.previous[count]

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return paged_attention(q, cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)


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
        sequences=(num_rows, seq_lens, block_tables),
    )


def write_kv(kv: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch) -> None:
    """Store this step's K and V in one layer's cache, in place.

    kv: [T, 2, Hkv, D], K before V; cache: [N, P, 2, Hkv, D] of the same dtype, or [N, P, 2, Hkv, D + 2] of codes.
    """
    rows = pack_rows(kv) if cache.dtype is torch.int8 else kv
    if cache.is_contiguous():
        cache.view(-1, *cache.shape[2:]).index_copy_(0, batch.slots, rows)
    else:
        cache[batch.slots // cache.shape[1], batch.slots % cache.shape[1]] = rows


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula above, after `write_kv` of the same step.

    q: [T, Hq, D]; cache: [N, P, 2, Hkv, D] of the same floating dtype, or [N, P, 2, Hkv, D + 2] of codes, whose numbers
    are rounded to that dtype. Returns [T, Hq, D] in that dtype, contiguous.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for number, group in enumerate(batch.decode):
        _decode(q, cache, batch, number, group, out, scale, window, softcap, sinks)
    for number, piece in enumerate(batch.prefill):
        _prefill(q, cache, batch, number, piece, out, scale, window, softcap, sinks)
    return out


def _decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    number: int,
    group: DecodeGroup,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    block_size, num_kv_heads, head_dim = cache.shape[1], cache.shape[3], q.shape[2]
    size = group.rows.shape[0]
    view = batch.decode_views.get((number, window))
    if view is None:
        view = batch.decode_views[number, window] = _decode_view(group, window, block_size, q.dtype)
    kv = _gather(cache, view.blocks, q.dtype)
    kv = kv.view(size, view.num_blocks * block_size, 2, num_kv_heads, head_dim)[:, : view.length]
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [B, Hkv, L, D]
    grouped = q.index_select(0, group.rows).view(size, num_kv_heads, -1, head_dim)  # [B, Hkv, Hq/Hkv, D]
    of_heads = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    answer = _attend(grouped, k, v, view.mask, scale, softcap, of_heads)
    out.index_copy_(0, group.rows, answer.reshape(size, -1, head_dim))


def _prefill(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    number: int,
    piece: PrefillSlice,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    block_size, num_kv_heads, head_dim = cache.shape[1], cache.shape[3], q.shape[2]
    num_rows = piece.num_rows
    view = batch.prefill_views.get((number, window))
    if view is None:
        view = batch.prefill_views[number, window] = _prefill_view(
            piece, window, block_size, q.dtype, plain=softcap is None
        )
    kv = _gather(cache, view.blocks, q.dtype).view(-1, 2, num_kv_heads, head_dim)[: view.length]
    # KV heads as the batch, the query heads of a group as heads over one K: [Hkv, Hq/Hkv, L, D] without a copy.
    group = q.shape[1] // num_kv_heads
    k = kv[:, 0].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    v = kv[:, 1].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    rows = slice(piece.first_row, piece.first_row + num_rows)
    grouped = q[rows].view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    result = out[rows].view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if softcap is None and sinks is None and _only_causal(piece, window):
        result.copy_(scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale))
        return
    # With a softcap or sinks the scores of all heads are there at once, in float32.
    columns = view.length if softcap is None and sinks is None else view.length * q.shape[1]
    of_heads = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
    tile = min(num_rows, max(1, _MAX_MASK_ELEMENTS // columns))
    for first in range(0, num_rows, tile):
        last = min(first + tile, num_rows)
        if view.mask is not None:
            mask = view.mask if tile == num_rows else view.mask[first:last]
        else:
            mask = _causal_mask(view.num_past + first, last - first, view.length, window, q.dtype, q.device)
        result[:, :, first:last] = _attend(grouped[:, :, first:last], k, v, mask, scale, softcap, of_heads)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n, P, 2, Hkv, D]"""
    found = cache.index_select(0, blocks)
    return unpack_rows(found, dtype) if found.dtype is torch.int8 else found


def _only_causal(piece: PrefillSlice, window: int | None) -> bool:
    """Nothing is hidden but the future, and the queries begin with the sequence."""
    return piece.num_past == 0 and (window is None or window >= piece.seq_len)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`sinks`: one for each row of scores, or to be repeated for them."""
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float()
    if softcap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
    scores.add_(mask)
    if sinks is None:
        return scores.softmax(dim=-1).to(q.dtype) @ v
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(dim=-1)[..., : k.shape[-2]].to(q.dtype) @ v


def _decode_view(group: DecodeGroup, window: int | None, block_size: int, dtype: torch.dtype) -> DecodeView:
    """Its mask is 0 where a position is seen, -inf elsewhere."""
    device = group.seq_lens.device
    ends = group.seq_lens[:, None]
    # A window that begins at any position of a block reaches into one block more than it fills.
    reached = group.num_blocks if window is None else (window + block_size - 2) // block_size + 1
    if reached >= group.num_blocks:
        positions = torch.arange(group.max_seq_len, device=device)
        blocks, num_blocks, length = group.blocks, group.num_blocks, group.max_seq_len
    else:
        assert window is not None
        num_blocks, length = reached, reached * block_size
        first = (ends - window).clamp_min_(0).div_(block_size, rounding_mode="floor")
        # Beyond the table there is only what the mask hides: any block of the sequence will do.
        index = (first + torch.arange(num_blocks, device=device)).clamp_max_(group.num_blocks - 1)
        blocks = group.blocks.view(-1, group.num_blocks).gather(1, index).flatten()
        positions = first * block_size + torch.arange(length, device=device)
    hidden = positions >= ends
    if window is not None:
        hidden |= positions < ends - window
    return DecodeView(blocks, num_blocks, length, _additive(hidden, dtype)[:, None, None, :])


def _prefill_view(
    piece: PrefillSlice, window: int | None, block_size: int, dtype: torch.dtype, *, plain: bool
) -> PrefillView:
    """`plain`: without a softcap, so that torch's own causal attention may serve."""
    first = 0 if window is None else max(0, piece.num_past - window + 1) // block_size
    blocks = piece.blocks[first:] if first else piece.blocks
    length, num_past = piece.seq_len - first * block_size, piece.num_past - first * block_size
    mask = None
    if not (plain and _only_causal(piece, window)) and piece.num_rows * length <= _MAX_MASK_ELEMENTS:
        mask = _causal_mask(num_past, piece.num_rows, length, window, dtype, blocks.device)
    return PrefillView(blocks, length, num_past, mask)


def _causal_mask(
    start: int, num_rows: int, seq_len: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_rows, L] for queries at positions start … start+num_rows-1: 0 where j is seen, -inf elsewhere."""
    i = torch.arange(start, start + num_rows, device=device)[:, None]
    j = torch.arange(seq_len, device=device)
    hidden = j > i
    if window is not None:
        hidden |= j <= i - window
    return _additive(hidden, dtype)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


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
