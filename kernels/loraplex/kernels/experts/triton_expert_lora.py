"""LoRA on routed experts in Triton: `loraplex.kernels.experts.lora_types.ExpertLoraPass`, two launches for a group.

A program has a run: up to 16 adjacent places of one expert whose rows have one adapter. Each place's program looks
whether a run begins there, and ends if none does; so grids follow from shapes alone, nothing is listed, and launches
can be recorded. Tables stay on the device; a row's slot is read from memory. A row's sums have one order, since a run's
rows are multiplied by the same instructions however many there are (ADR 0040).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.experts.lora_types import ExpertLoraWeights, check_operands, sites_of_group
from loraplex.kernels.experts.triton_rows import TritonExpertRows, group
from loraplex.kernels.experts.types import ExpertRows, Routes
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES

RUN_ROWS = 16
"""Places of a run, and ranks at a time: the fewest that tensor cores multiply."""
_ROWS = tl.constexpr(RUN_ROWS)
_CHUNK = tl.constexpr(CHUNK)
_BLOCK_K, _BLOCK_N = 128, 128


class TritonExpertLora:
    """The adapters of `weights` as programs find them."""

    def __init__(self, weights: ExpertLoraWeights) -> None:
        device = weights.storage.device
        self._weights = weights
        self._tables = torch.zeros(weights.tables.shape, dtype=torch.int32, device=device)
        self._heights = torch.zeros(weights.heights.shape, dtype=torch.int32, device=device)
        for slot in range(len(weights.heights)):
            self.write(slot)
        self._columns = {
            each.key: torch.tensor(each.columns, dtype=torch.int32, device=device) for each in weights.groups
        }

    def write(self, slot: int) -> None:
        """Take over what the tables of `weights` say of a slot. While no step that uses it is in flight."""
        heights = torch.from_numpy(self._weights.heights[slot])
        self._heights[slot].copy_(heights)
        # No program reads tables behind a height of 0.
        if heights.any():
            self._tables[slot].copy_(torch.from_numpy(self._weights.tables[slot]))

    def begin(self, slot_of_row: torch.Tensor) -> TritonExpertPass:
        """A pass over rows whose slots, int32, -1 for the base model, are read when it runs."""
        return TritonExpertPass(self._weights, self._tables, self._heights, self._columns, slot_of_row)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what a step may launch, for x and y of this dtype. Launches everything once for a row of the base."""
        device = self._weights.storage.device
        lora = self.begin(torch.full((1,), -1, dtype=torch.int32, device=device))
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for of in self._weights.groups:
            rows = group(Routes(ids, torch.ones(ids.shape, device=device)), of.num_experts, RUN_ROWS)
            x = torch.empty(1, of.in_features, dtype=dtype, device=device)
            y = torch.empty(1, of.out_features, dtype=dtype, device=device)
            lora.apply(of.layers[0], of.key, x, y, rows)


class TritonExpertPass:
    """Made by `TritonExpertLora.begin`."""

    def __init__(
        self,
        weights: ExpertLoraWeights,
        tables: torch.Tensor,
        heights: torch.Tensor,
        columns: dict[str, torch.Tensor],
        slot_of_row: torch.Tensor,
    ) -> None:
        """`columns` [sites, 2] int32 of each group."""
        self._weights, self._slots = weights, slot_of_row
        self._tables, self._heights, self._columns = tables, heights, columns

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, rows: ExpertRows) -> None:
        """See `ExpertLoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        found, first_site = sites_of_group(self._weights, group)
        check_operands(found, len(self._slots), x, y, rows)
        if not (isinstance(rows, TritonExpertRows) and x.is_contiguous() and y.is_contiguous()):
            raise ValueError(f"group '{group}': rows of another backend, or operands that are not contiguous")
        places, sites = len(x), len(found.sites)
        if not places or layer not in found.layers:
            return
        _, layers, all_sites, experts, chunks, _ = self._tables.shape
        ranks = -(-(chunks - 1) * CHUNK // RUN_ROWS) * RUN_ROWS
        # Not of memory that grows: what a recorded step computes in stays its own.
        hidden = torch.empty(places, sites, ranks, dtype=torch.float32, device=x.device)
        storage = self._weights.storage
        where = (rows.expert_of, rows.row_of, rows.starts, self._slots)
        tables = (self._tables, self._heights, storage)
        sizes = {
            "LAYERS": layers, "ALL_SITES": all_sites, "EXPERTS": experts, "CHUNKS": chunks,
            "GRANULE": GRANULE_BYTES // storage.itemsize, "SITES": sites, "RANKS": ranks,
        }  # fmt: skip
        at = (layer, first_site)
        shrink_program[(places, sites)](
            x, hidden, *where, *tables, *at, found.in_features, BLOCK_K=_BLOCK_K, **sizes, num_warps=2
        )
        widest = max(end - begin for begin, end in found.columns)
        expand_program[(places, triton.cdiv(widest, _BLOCK_N), sites)](
            y, hidden, *where, *tables, *at, self._columns[group], found.out_features,
            BLOCK_N=_BLOCK_N, ALIGNED=all(edge % 16 == 0 for edges in found.columns for edge in edges),
            **sizes, num_warps=4, num_stages=1,
        )  # fmt: skip


@triton.jit
def _run_at(first, slot, begin, end, row_of_ptr, slots_ptr):
    """Which places from the first on are of the run that begins there: a vector, all false where none does."""
    m = tl.arange(0, _ROWS)
    inside = (first - begin) % _ROWS
    before = tl.load(slots_ptr + tl.load(row_of_ptr + first - 1, inside > 0, 0), inside > 0, -1)
    there = (inside + m < _ROWS) & (first + m < end)
    rows = tl.load(row_of_ptr + first + m, there, 0)
    others = there & (tl.load(slots_ptr + rows, there, -1) == slot)
    unbroken = tl.cumsum((~others).to(tl.int32), 0) == 0
    return unbroken & (before != slot)


@triton.jit(do_not_specialize=["layer", "first_site"])
def shrink_program(
    x_ptr,
    hidden_ptr,
    expert_of_ptr,
    row_of_ptr,
    starts_ptr,
    slots_ptr,
    tables_ptr,
    heights_ptr,
    storage_ptr,
    layer,
    first_site,
    inputs,
    LAYERS: tl.constexpr,
    ALL_SITES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    SITES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden[p, site, rank] = Σ_k x[p, k] · A[rank, k] of a run, in float32. Grid: places, sites."""
    first = tl.program_id(0)
    slot = tl.load(slots_ptr + tl.load(row_of_ptr + first))
    if slot < 0:
        return
    site = (slot.to(tl.int64) * LAYERS + layer) * ALL_SITES + first_site + tl.program_id(1)
    height = tl.load(heights_ptr + site)
    if height == 0:
        return
    expert = tl.load(expert_of_ptr + first)
    begin = tl.load(starts_ptr + expert)
    of_run = _run_at(first, slot, begin, tl.load(starts_ptr + expert + 1), row_of_ptr, slots_ptr)
    if tl.max(of_run.to(tl.int32), 0) == 0:
        return
    m = tl.arange(0, _ROWS)
    k = tl.arange(0, BLOCK_K)
    place = (first + m).to(tl.int64)
    tiles_ptr = tables_ptr + (site * EXPERTS + expert) * CHUNKS * 2
    for first_rank in range(0, RANKS, _ROWS):
        if tl.load(tiles_ptr + first_rank // height * 2, first_rank // height < CHUNKS, 0) > 0:
            rank = first_rank + m
            tile = tl.load(tiles_ptr + rank // height * 2, rank // height < CHUNKS, 0)
            a_rows = tile.to(tl.int64) * GRANULE + rank % height * inputs
            total = tl.zeros((_ROWS, _ROWS), tl.float32)
            for start in range(0, inputs, BLOCK_K):
                there = start + k < inputs
                x = tl.load(
                    x_ptr + place[:, None] * inputs + (start + k)[None, :],
                    of_run[:, None] & there[None, :],
                    0.0,
                )
                a = tl.load(
                    storage_ptr + a_rows[None, :] + (start + k)[:, None],
                    (tile > 0)[None, :] & there[:, None],
                    0.0,
                )
                if x.dtype == a.dtype and x.dtype != tl.float32:
                    total = tl.dot(x, a, total)
                else:
                    total = tl.dot(x.to(tl.float32), a.to(tl.float32), total, input_precision="ieee")
            at = hidden_ptr + (place[:, None] * SITES + tl.program_id(1)) * RANKS + rank[None, :]
            tl.store(at, total, of_run[:, None] & (tile > 0)[None, :])


@triton.jit(do_not_specialize=["layer", "first_site"])
def expand_program(
    y_ptr,
    hidden_ptr,
    expert_of_ptr,
    row_of_ptr,
    starts_ptr,
    slots_ptr,
    tables_ptr,
    heights_ptr,
    storage_ptr,
    layer,
    first_site,
    columns_ptr,
    outputs,
    LAYERS: tl.constexpr,
    ALL_SITES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    SITES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """y[p, n] += Σ_rank hidden[p, site, rank] · B[rank, n] of a run, in float32, rounded once. Grid: places, columns of
    the widest site ÷ BLOCK_N, sites. An adapter has no two sites that write the same columns. ALIGNED: sites begin and
    end at multiples of 16, so that loads may be wide."""
    first = tl.program_id(0)
    slot = tl.load(slots_ptr + tl.load(row_of_ptr + first))
    if slot < 0:
        return
    number = tl.program_id(2)
    site = (slot.to(tl.int64) * LAYERS + layer) * ALL_SITES + first_site + number
    height = tl.load(heights_ptr + site)
    left = tl.load(columns_ptr + number * 2)
    width = tl.load(columns_ptr + number * 2 + 1) - left
    if ALIGNED:
        left, width = tl.multiple_of(left, 16), tl.multiple_of(width, 16)
    if (height == 0) | (tl.program_id(1) * BLOCK_N >= width):
        return
    expert = tl.load(expert_of_ptr + first)
    tiles_ptr = tables_ptr + (site * EXPERTS + expert) * CHUNKS * 2
    if tl.load(tiles_ptr) == 0:
        return
    begin = tl.load(starts_ptr + expert)
    of_run = _run_at(first, slot, begin, tl.load(starts_ptr + expert + 1), row_of_ptr, slots_ptr)
    if tl.max(of_run.to(tl.int32), 0) == 0:
        return
    m = tl.arange(0, _ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = (first + m).to(tl.int64)
    total = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for first_rank in range(0, RANKS, _ROWS):
        if tl.load(tiles_ptr + first_rank // height * 2, first_rank // height < CHUNKS, 0) > 0:
            rank = first_rank + m
            tile = tl.load(tiles_ptr + rank // height * 2 + 1, rank // height < CHUNKS, 0)
            has_rank = tile > 0
            at = hidden_ptr + (place[:, None] * SITES + number) * RANKS + rank[None, :]
            hidden = tl.load(at, of_run[:, None] & has_rank[None, :], 0.0)
            b_rows = tile.to(tl.int64) * GRANULE + rank % height * width
            b = tl.load(
                storage_ptr + b_rows[:, None] + n[None, :], has_rank[:, None] & (n < width)[None, :], 0.0
            )
            total = tl.dot(hidden, b.to(tl.float32), total, input_precision="ieee")
    y_at = y_ptr + place[:, None] * outputs + (left + n)[None, :]
    there = of_run[:, None] & (n < width)[None, :]
    y = tl.load(y_at, there, 0.0).to(tl.float32)
    tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), there)
