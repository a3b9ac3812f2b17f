"""Types that the implementations of paged attention share: a step's sequences, laid out once for all layers.

Shapes as in `loraplex.kernels.attention.torch_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query row each, of about the same length, attended to together.

    `rows` [B] int64: their rows of the flat batch. `blocks` [B·num_blocks] int64: their block tables, padded to
    `num_blocks` each with the sequence's own first block. `seq_lens` [B] int64, the new position included, the
    longest of them `max_seq_len`.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    num_blocks: int
    seq_lens: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Several adjacent positions of one sequence: rows first_row … first_row+num_rows-1 of the flat batch are its
    positions seq_len-num_rows … seq_len-1. `blocks` [ceil(seq_len/P)] int64."""

    first_row: int
    num_rows: int
    seq_len: int
    blocks: torch.Tensor

    @property
    def num_past(self) -> int:
        return self.seq_len - self.num_rows


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode group as seen by layers with one window: `num_blocks` blocks a sequence, `blocks` [B·num_blocks]
    int64, and the first `length` positions of those. `mask` [B, 1, 1, length] is added to the scores."""

    blocks: torch.Tensor
    num_blocks: int
    length: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill slice as seen by layers with one window: `length` positions in `blocks` [ceil(length/P)] int64;
    `num_past` of them come before the first query. `mask` [num_rows, length] is added to the scores; None where it is
    too large to be kept, or nothing is hidden but the future."""

    blocks: torch.Tensor
    length: int
    num_past: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step as attention needs them, built once for all layers.

    `slots` [T] int64: where each row's K and V go, block·P + offset. The views, by number of the group or slice and
    by window, are what the layers share. Where the rows' K and V are written and read, each block's positions beyond
    its sequence must hold finite values (see `KVCache.begin`): they are masked, but 0·NaN is NaN.
    """

    num_rows: int
    slots: torch.Tensor
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillSlice, ...]
    decode_views: dict[tuple[int, int | None], DecodeView] = field(default_factory=dict)
    prefill_views: dict[tuple[int, int | None], PrefillView] = field(default_factory=dict)
    sequences: tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]] = ((), (), ())
    """Rows, lengths and tables, as `build_attention_batch` was given them."""
    previous: dict[int, torch.Tensor] = field(default_factory=dict)
    """The slots of that many positions before each row."""
