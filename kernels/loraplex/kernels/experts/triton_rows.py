"""Rows grouped by expert, in Triton: `group`, `gather`, `clamped`, `combine` and `add_gated` of
`loraplex.kernels.experts.torch_experts`.

Grids follow from shapes alone, and routes are read from memory: launches can be recorded. Nothing is added by two
programs to one place, so that all places and sums have one order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.experts.types import ExpertActivation, ExpertRows, Routes

PIECE_FIELDS = 3
_FIELDS = tl.constexpr(PIECE_FIELDS)
_BLOCK = 512
_FEW, _MANY = 128, 1024


@dataclass(frozen=True, slots=True)
class TritonExpertRows(ExpertRows):
    """`expert_of` [P] int32. `pieces` [n, 3] int32: the expert, the first place and the number of places, up to
    `piece_rows`, of every piece; 0 places of those that a step does not need."""

    expert_of: torch.Tensor
    pieces: torch.Tensor
    piece_rows: int


def group(routes: Routes, num_experts: int, piece_rows: int) -> TritonExpertRows:
    """Expert e's pieces have the numbers from `starts[e]` // piece_rows + e on: no two experts' are the same, and no
    expert need know how many the others have."""
    ids = routes.ids
    places, device = ids.numel(), ids.device
    made = TritonExpertRows(
        torch.empty(num_experts + 1, dtype=torch.int64, device=device),
        torch.empty(places, dtype=torch.int64, device=device),
        torch.empty_like(ids),
        torch.empty(places, dtype=torch.int32, device=device),
        torch.empty(places // piece_rows + num_experts, PIECE_FIELDS, dtype=torch.int32, device=device),
        piece_rows,
    )
    group_program[(num_experts,)](
        ids,
        places,
        made.starts,
        made.row_of,
        made.place_of,
        made.expert_of,
        made.pieces,
        TOP_K=ids.shape[1],
        ROWS=piece_rows,
        BLOCK=_FEW if places <= _FEW else _MANY,
        num_warps=4,
    )
    return made


# One machine code for all numbers of places.
@triton.jit(do_not_specialize=["places"])
def group_program(
    ids_ptr,
    places,
    starts_ptr,
    row_of_ptr,
    place_of_ptr,
    expert_of_ptr,
    pieces_ptr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The places and pieces of one expert. Grid: experts."""
    e = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for first in range(0, places, BLOCK):
        there = first + lane < places
        chosen = tl.load(ids_ptr + first + lane, mask=there, other=0)
        lower += (there & (chosen < e)).to(tl.int32)
        own += (there & (chosen == e)).to(tl.int32)
    start = tl.sum(lower, 0)
    end = start + tl.sum(own, 0)
    tl.store(starts_ptr + e, start.to(tl.int64))
    if e == tl.num_programs(0) - 1:
        tl.store(starts_ptr + e + 1, end.to(tl.int64))
    done = start
    for first in range(0, places, BLOCK):
        there = first + lane < places
        mine = there & (tl.load(ids_ptr + first + lane, mask=there, other=0) == e)
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(row_of_ptr + place, ((first + lane) // TOP_K).to(tl.int64), mask=mine)
        tl.store(place_of_ptr + first + lane, place.to(tl.int64), mask=mine)
        tl.store(expert_of_ptr + place, e, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    first_piece = start // ROWS + e
    for number in range(first_piece, end // ROWS + e + 1):
        begin = start + (number - first_piece) * ROWS
        tl.store(pieces_ptr + number * _FIELDS, e)
        tl.store(pieces_ptr + number * _FIELDS + 1, begin)
        tl.store(pieces_ptr + number * _FIELDS + 2, tl.maximum(tl.minimum(end - begin, ROWS), 0))


def gather(x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """Raises ValueError for rows that are not contiguous."""
    places, columns = len(rows.row_of), x.shape[1]
    if x.stride(1) != 1:
        raise ValueError(f"rows of x {list(x.shape)} are not contiguous")
    out = torch.empty(places, columns, dtype=x.dtype, device=x.device)
    if places:
        gather_program[(places, triton.cdiv(columns, _BLOCK))](
            x, x.stride(0), rows.row_of, out, columns, BLOCK=_BLOCK, num_warps=2
        )
    return out


@triton.jit
def gather_program(x_ptr, x_row, row_of_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """out[p, c] = x[row_of[p], c]. Grid: places, columns ÷ BLOCK."""
    place = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.load(row_of_ptr + place) * x_row + c, mask=c < columns)
    tl.store(out_ptr + place * columns + c, x, mask=c < columns)


def clamped(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
    """Raises ValueError where there are not as many columns of a gate as of what it is for, side by side."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"{list(gate_up.shape)} are not rows of a gate and what it is for")
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        clamped_program[(rows, triton.cdiv(inner, _BLOCK))](
            gate_up, out, inner, kind.alpha, kind.limit, BLOCK=_BLOCK, num_warps=2
        )
    return out


@triton.jit
def clamped_program(gate_up_ptr, out_ptr, inner, alpha, limit, BLOCK: tl.constexpr):
    """Grid: rows, columns of out ÷ BLOCK. A NaN stays one."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_ptr = gate_up_ptr + row * 2 * inner + c
    gate = tl.load(gate_ptr, mask=c < inner, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + inner, mask=c < inner, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = (up + 1) * (gate / (1 + tl.exp(-alpha * gate)))
    tl.store(out_ptr + row * inner + c, value.to(out_ptr.dtype.element_ty), mask=c < inner)


def combine(y: torch.Tensor, routes: Routes, rows: ExpertRows) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    count, top_k = routes.ids.shape
    places, columns = y.shape
    if places != count * top_k or rows.place_of.shape != routes.ids.shape or not y.is_contiguous():
        raise ValueError(f"y {list(y.shape)} does not fit {count} rows of {top_k} experts")
    out = torch.empty(count, columns, dtype=y.dtype, device=y.device)
    if count:
        combine_program[(count, triton.cdiv(columns, _BLOCK))](
            y, routes.weights, rows.place_of, out, columns, TOP_K=top_k, BLOCK=_BLOCK, num_warps=2
        )
    return out


@triton.jit
def combine_program(
    y_ptr, weights_ptr, place_of_ptr, out_ptr, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t, c] = Σⱼ weights[t, j] · y[place_of[t, j], c], in the order of j. Grid: rows, columns ÷ BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        place = tl.load(place_of_ptr + row * TOP_K + j)
        value = tl.load(y_ptr + place * columns + c, mask=c < columns, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * TOP_K + j) * value
    tl.store(out_ptr + row * columns + c, total.to(out_ptr.dtype.element_ty), mask=c < columns)


def add_gated(out: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
    """Raises ValueError where they do not fit."""
    rows, columns = out.shape
    fits = y.shape == out.shape and gate.shape == (rows, 1) and out.dtype is y.dtype is gate.dtype
    if not (fits and out.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"y {list(y.shape)} and its gate {list(gate.shape)} do not fit {list(out.shape)}")
    if rows:
        add_program[(rows, triton.cdiv(columns, _BLOCK))](
            out, y, gate, gate.stride(0), columns, BLOCK=_BLOCK, num_warps=2
        )


@triton.jit
def add_program(out_ptr, y_ptr, gate_ptr, gate_row, columns, BLOCK: tl.constexpr):
    """out[t, c] += sigmoid(gate[t]) · y[t, c], each step rounded. Grid: rows, columns ÷ BLOCK."""
    kept = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row).to(tl.float32)
    opened = (1 / (1 + tl.exp(-gate))).to(kept).to(tl.float32)
    at = row * columns + c
    added = (tl.load(y_ptr + at, mask=c < columns, other=0.0).to(tl.float32) * opened).to(kept)
    total = tl.load(out_ptr + at, mask=c < columns, other=0.0).to(tl.float32) + added.to(tl.float32)
    tl.store(out_ptr + at, total.to(kept), mask=c < columns)
