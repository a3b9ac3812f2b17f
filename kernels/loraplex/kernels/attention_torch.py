"""Paged attention in torch: the reference, and the path of processors without a kernel of their own.

Blocks are gathered into dense K and V, then torch's scaled_dot_product_attention runs with the query heads of a
group taken as its query positions (decode) or as its heads over one shared K (prefill), so that K and V are never
repeated for grouped-query attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from loraplex.kernels.attention import AttentionBatch, DecodeGroup, PrefillSlice

_MAX_MASK_ELEMENTS = 1 << 22
"""A mask up to this size is made once and kept for all layers; a larger one is made tile by tile in each."""


def write_kv(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, kv)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for number, group in enumerate(batch.decode):
        _decode(q, cache, batch, number, group, out, scale, window, softcap)
    for number, piece in enumerate(batch.prefill):
        _prefill(q, cache, batch, number, piece, out, scale, window, softcap)
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
) -> None:
    _, block_size, _, num_kv_heads, head_dim = cache.shape
    size = group.rows.shape[0]
    kv = cache.index_select(0, group.blocks)
    kv = kv.view(size, group.num_blocks * block_size, 2, num_kv_heads, head_dim)[:, : group.max_seq_len]
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [B, Hkv, L, D]
    grouped = q.index_select(0, group.rows).view(size, num_kv_heads, -1, head_dim)  # [B, Hkv, Hq/Hkv, D]
    mask = batch.masks.get((number, window))
    if mask is None:
        mask = batch.masks[number, window] = _decode_mask(group, window, q.dtype)
    answer = _attend(grouped, k, v, mask, scale, softcap)
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
) -> None:
    num_kv_heads, head_dim = cache.shape[3:]
    num_rows, seq_len = piece.num_rows, piece.seq_len
    kv = cache.index_select(0, piece.blocks).view(-1, 2, num_kv_heads, head_dim)[:seq_len]
    # KV heads as the batch, the query heads of a group as heads over one K: [Hkv, Hq/Hkv, L, D] without a copy.
    group = q.shape[1] // num_kv_heads
    k = kv[:, 0].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    v = kv[:, 1].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    rows = slice(piece.first_row, piece.first_row + num_rows)
    grouped = q[rows].view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    result = out[rows].view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if piece.num_past == 0 and softcap is None and (window is None or window >= seq_len):
        result.copy_(scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale))
        return
    # With a softcap the scores of all heads are there at once, in float32.
    columns = seq_len if softcap is None else seq_len * q.shape[1]
    tile = min(num_rows, max(1, _MAX_MASK_ELEMENTS // columns))
    shared = None
    if num_rows * seq_len <= _MAX_MASK_ELEMENTS:
        key = (len(batch.decode) + number, window)
        shared = batch.masks.get(key)
        if shared is None:
            shared = _causal_mask(piece.num_past, num_rows, seq_len, window, q.dtype, q.device)
            batch.masks[key] = shared
    for first in range(0, num_rows, tile):
        last = min(first + tile, num_rows)
        if shared is not None:
            mask = shared if tile == num_rows else shared[first:last]
        else:
            mask = _causal_mask(piece.num_past + first, last - first, seq_len, window, q.dtype, q.device)
        result[:, :, first:last] = _attend(grouped[:, :, first:last], k, v, mask, scale, softcap)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float()
    scores.mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)
    return scores.softmax(dim=-1).to(q.dtype) @ v


def _decode_mask(group: DecodeGroup, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, 1, L]: 0 where position j is seen, -inf elsewhere."""
    j = torch.arange(group.max_seq_len, device=group.seq_lens.device)
    ends = group.seq_lens[:, None]
    hidden = j >= ends
    if window is not None:
        hidden |= j < ends - window
    return _additive(hidden, dtype)[:, None, None, :]


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
