"""Paged attention in Triton: the path of GPUs.

Two launches a layer, of the same program with different tiles: sequences with few rows (decode), and those with many
(prompt chunks, with or without a past); a third adds up what long contexts were split into. Which of them run, and over
how many programs, depends on the batch's capacity where it is recorded in a CUDA graph, and on the step where not.
Nothing waits for another program inside of a launch, and nothing is read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from loraplex.kernels.attention.kv_codes import has_whole_blocks, head_dim_of
from loraplex.kernels.attention.triton_plan import AttentionPlan, Int32, ListPlace, WindowCounts, WindowPlaces
from loraplex.kernels.attention.triton_programs import attention_program, merge_program
from loraplex.kernels.attention.triton_tiling import Tiling

_MERGED_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Parts of answers, `part` [R, Hq, D] and `lse` [R, Hq] float32, R at least the plan's `partial_rows`. All layers
    and steps of one stream share it; what it holds before means nothing."""

    part: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def allocate(cls, plan: AttentionPlan, device: torch.device) -> AttentionScratch:
        rows, shape = plan.partial_rows, plan.shape
        return cls(
            torch.empty(rows, shape.num_heads, shape.head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, shape.num_heads, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class TritonAttentionBatch:
    """The sequences of one step as attention needs them, on the device: takes the place of AttentionBatch.

    `array` [plan.num_ints] int32 holds what `AttentionPlan.write` writes. `counts`: the lengths of its lists, by
    window; None in a CUDA graph, which is recorded for all that there is room for.
    """

    plan: AttentionPlan
    array: torch.Tensor
    scratch: AttentionScratch
    num_rows: int
    counts: Mapping[int | None, WindowCounts] | None

    @property
    def slots(self) -> torch.Tensor:
        """[T] int32: where each row's K and V go, block·P + offset; -1 for padding."""
        first = self.plan.slots_offset
        return self.array[first : first + self.num_rows]

    def previous(self, count: int) -> torch.Tensor:
        """[T, count] int32: `previous.previous_slots` with the step's own rows; -1 for padding."""
        first, most = self.plan.previous_offset, self.plan.previous
        return self.array[first : first + self.num_rows * most].view(-1, most)[:, most - count :]


def graph_batch(plan: AttentionPlan, array: torch.Tensor, scratch: AttentionScratch) -> TritonAttentionBatch:
    """The batch to record a CUDA graph with: all rows of the capacity, whatever `array` holds at its replay, which is
    what `plan.write` gave with `padded_rows` = the capacity's rows."""
    return TritonAttentionBatch(plan, array, scratch, plan.capacity.num_rows, None)


def build_attention_batch(
    plan: AttentionPlan,
    scratch: AttentionScratch,
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int] | Int32],
    *,
    padded_rows: int | None = None,
) -> TritonAttentionBatch:
    """A step that runs without a graph, in an array of its own; arguments as of `AttentionPlan.write`."""
    host = np.empty(plan.num_ints, dtype=np.int32)
    step = plan.write(host, num_rows, seq_lens, block_tables, padded_rows=padded_rows)
    array = torch.from_numpy(host[: step.num_ints]).to(scratch.part.device, non_blocking=True)
    return TritonAttentionBatch(plan, array, scratch, step.num_rows, step.windows)


@dataclass(frozen=True, slots=True)
class CacheOperands:
    """One layer's cache [N, P, 2, Hkv, D] as programs take it. Strides in elements: of blocks, positions, K and V,
    heads.

    Of codes, a block has them first, [P, 2, Hkv, D], and then their scales [2, Hkv, P] float16. `scales` begins with
    those of block 0, and `scales_kind` is the stride of K and V there; of floats both stand for nothing."""

    cache: torch.Tensor
    scales: torch.Tensor
    strides: tuple[int, int, int, int]
    scales_kind: int
    is_codes: bool


def cache_operands(cache: torch.Tensor) -> CacheOperands:
    """Raises ValueError for a cache of codes whose blocks are not contiguous, or with heads of an odd size."""
    if cache.dtype is not torch.int8:
        block, position, kind, head, _ = cache.stride()
        return CacheOperands(cache, cache, (block, position, kind, head), 0, False)
    _, positions, _, heads, _ = cache.shape
    dim = head_dim_of(cache)
    if dim % 2 or not has_whole_blocks(cache):
        raise ValueError(
            f"blocks of codes are contiguous, with heads of an even size, not {list(cache.shape)}"
        )
    scales = cache.view(len(cache), -1).view(torch.float16)[:, positions * heads * dim :]
    strides = (cache.stride(0), 2 * heads * dim, heads * dim, dim)
    return CacheOperands(cache, scales, strides, heads * positions, True)


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: TritonAttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula of `loraplex.kernels.attention.torch_attention`, after this step's K and V were written.

    q: [T, Hq, D], last axis contiguous; cache: [N, P, 2, Hkv, D], last axis contiguous, of the same floating dtype, or
    [N, P, 2, Hkv, D + 2] of codes; sinks: [Hq] float32, contiguous, or None. Returns [T, Hq, D] in the dtype of q,
    contiguous; rows of padding are 0. Sums are made in float32; the probabilities are rounded to that dtype before they
    are multiplied with it. Blocks' positions that belong to no sequence may hold anything. Raises ValueError for a
    window that the plan was not made for, and for tensors of other shapes than the plan's.
    """
    plan = batch.plan
    shape = plan.shape
    places = plan.places.get(window)
    if places is None:
        raise ValueError(f"the plan has no lists for the window {window}, but for {list(plan.places)}")
    block_size, num_kv_heads, head_dim = cache.shape[1], cache.shape[3], head_dim_of(cache)
    if (
        q.shape != (batch.num_rows, shape.num_heads, shape.head_dim)
        or (block_size, num_kv_heads, head_dim) != (shape.block_size, shape.num_kv_heads, shape.head_dim)
        or cache.dtype not in (q.dtype, torch.int8)
        or q.stride(-1) != 1
        or cache.stride(-1) != 1
    ):
        raise ValueError(
            f"queries {list(q.shape)} {q.dtype} and a cache {list(cache.shape)} {cache.dtype} do not fit {shape}, "
            f"{batch.num_rows} rows"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    operands = cache_operands(cache)
    decode, prefill, merge = _lengths(places, None if batch.counts is None else batch.counts[window])
    _attend(
        q,
        operands,
        out,
        batch,
        places.decode,
        decode,
        plan.tilings.decode,
        False,
        scale,
        window,
        softcap,
        sinks,
    )
    if places.prefill is not None:
        _attend(
            q,
            operands,
            out,
            batch,
            places.prefill,
            prefill,
            plan.tilings.prefill,
            True,
            scale,
            window,
            softcap,
            sinks,
        )
    if merge:
        place = places.merge
        merge_program[(merge * shape.num_heads,)](
            batch.scratch.part,
            batch.scratch.lse,
            out,
            batch.array[place.offset :],
            batch.array[place.count :],
            batch.scratch.lse if sinks is None else sinks,
            NUM_HEADS=shape.num_heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_D=triton.next_power_of_2(shape.head_dim),
            HAS_SINKS=sinks is not None,
            BLOCK_PARTS=_MERGED_AT_A_TIME,
            num_warps=4,
        )
    return out


def _lengths(places: WindowPlaces, counts: WindowCounts | None) -> tuple[int, int, int]:
    if counts is not None:
        return counts.decode, counts.prefill, counts.merge
    prefill = 0 if places.prefill is None else places.prefill.capacity
    return places.decode.capacity, prefill, places.merge.capacity


def _attend(
    q: torch.Tensor,
    operands: CacheOperands,
    out: torch.Tensor,
    batch: TritonAttentionBatch,
    place: ListPlace,
    num_items: int,
    tiling: Tiling,
    interior: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    if not num_items:
        return
    shape = batch.plan.shape
    attention_program[(num_items * shape.units,)](
        q,
        operands.cache,
        operands.scales,
        out,
        batch.scratch.part,
        batch.scratch.lse,
        batch.array[place.offset :],
        batch.array[place.count :],
        batch.array[batch.plan.tables_offset :],
        batch.scratch.lse if sinks is None else sinks,
        q.stride(0),
        q.stride(1),
        *operands.strides,
        operands.scales_kind,
        scale,
        softcap or 1.0,
        window or 0,
        NUM_HEADS=shape.num_heads,
        GROUP=shape.group,
        TILE_HEADS=shape.heads_per_tile,
        PARTS=shape.parts_per_group,
        UNITS=shape.units,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_SIZE=shape.block_size,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        INTERIOR=interior,
        CODES=operands.is_codes,
        # TF32 would cost float32 half its digits.
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
