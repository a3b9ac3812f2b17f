"""Linears by expert in Triton, over weights in floats that lie one behind the other.

A program multiplies a piece, up to 16 or 64 places of one expert, with some columns of the expert's weight. What the
pieces are is read from memory (`triton_rows.group`), so a recorded launch serves any routes. A row's sums are made in
one order, from the first column of x to the last, whichever rows are in its piece. Pieces of 64 rows multiply by other
instructions than those of 16: where a row's bits must not depend on its step, all have 16 (ADR 0040).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.kernels.experts import triton_route, triton_rows
from loraplex.kernels.experts.torch_experts import Pack, expert_ops
from loraplex.kernels.experts.triton_rows import PIECE_FIELDS, TritonExpertRows
from loraplex.kernels.experts.types import ExpertActivation, ExpertOps, ExpertRows, PackedExperts, Routes
from loraplex.kernels.layers.triton_activation import act_and_mul
from loraplex.kernels.linear.triton_dense import LinearTiling
from loraplex.kernels.weight_form import WeightForm

FEW_ROWS, MANY_ROWS = 16, 64
"""Places of a piece: the fewest that tensor cores multiply, and those of Hopper's own instruction."""
_LARGE_FROM = 32
"""Places for each expert, on average, from which pieces have MANY_ROWS."""
_FIELDS = tl.constexpr(PIECE_FIELDS)


def triton_expert_ops(pack: Pack, *, batch_invariant: bool) -> ExpertOps:
    """`pack`: of one linear in codes. Experts in codes are multiplied one by one, which is not recorded."""
    reference = expert_ops(pack)

    def group(routes: Routes, num_experts: int) -> ExpertRows:
        large = not batch_invariant and routes.ids.numel() >= _LARGE_FROM * num_experts
        return triton_rows.group(routes, num_experts, MANY_ROWS if large else FEW_ROWS)

    def pack_all(weights: Iterable[Any], form: WeightForm, dtype: torch.dtype) -> PackedExperts:
        return pack_floats(weights) if form.codes == "floats" else reference.pack(weights, form, dtype)

    def act(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
        if kind.name == "clamped":
            return triton_rows.clamped(gate_up, kind)
        return act_and_mul(gate_up, kind.name == "gelu_tanh")

    return replace(
        reference,
        route=triton_route.route,
        group=group,
        gather=triton_rows.gather,
        pack=pack_all,
        act=act,
        combine=triton_rows.combine,
        add_gated=triton_rows.add_gated,
    )


def pack_floats(weights: Iterable[torch.Tensor]) -> StackedExperts:
    """Weights [N, K] of one dtype, one for each expert. Raises ValueError for several shapes, and for none."""
    found = list(weights)
    shapes = {tuple(weight.shape) for weight in found}
    if len(shapes) != 1:
        raise ValueError(f"experts have one shape, and these have {sorted(shapes)}")
    stack = torch.stack(found)
    experts, columns, inputs = stack.shape
    return StackedExperts((experts, columns, inputs), stack.dtype, stack)


@dataclass(frozen=True, slots=True)
class StackedExperts(PackedExperts):
    """`weight` [E, N, K]"""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, rows: ExpertRows, bias: torch.Tensor | None = None) -> torch.Tensor:
        experts, columns, inputs = self.shape
        fits = x.shape == (len(rows.row_of), inputs) and x.dtype is self.dtype and x.is_contiguous()
        if bias is not None:
            fits = fits and bias.shape == (experts, columns) and bias.dtype is self.dtype
            fits = fits and bias.is_contiguous()
        if not fits or not isinstance(rows, TritonExpertRows) or len(rows.starts) != experts + 1:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not fit weights {list(self.shape)} in {self.dtype}"
            )
        y = torch.empty(len(x), columns, dtype=x.dtype, device=x.device)
        tiling = choose_tiling(rows.piece_rows, self.weight.element_size())
        linear_program[(len(rows.pieces), triton.cdiv(columns, tiling.block_n))](
            x,
            self.weight,
            self.weight if bias is None else bias,
            y,
            rows.pieces,
            columns,
            inputs,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            HAS_BIAS=bias is not None,
            # TF32 would cost float32 half its digits.
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        return y


def choose_tiling(piece_rows: int, itemsize: int) -> LinearTiling:
    if itemsize > 2:  # float32 goes without tensor cores
        return LinearTiling(piece_rows, 32, 32, num_warps=4, num_stages=3)
    if piece_rows == FEW_ROWS:
        return LinearTiling(piece_rows, 64, 128, num_warps=4, num_stages=4)
    return LinearTiling(piece_rows, 128, 64, num_warps=4, num_stages=4)


@triton.jit
def linear_program(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    pieces_ptr,
    columns,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[p, n] = Σ_k x[p, k] · weight[e, n, k] + bias[e, n] of a piece's places p. Grid: pieces, columns ÷ BLOCK_N; a
    weight's columns are read by adjacent programs, so that they come from memory once."""
    piece_ptr = pieces_ptr + tl.program_id(0) * _FIELDS
    rows = tl.load(piece_ptr + 2)
    if rows == 0:
        return
    expert = tl.load(piece_ptr).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    place = (tl.load(piece_ptr + 1) + m).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_row = m < rows
    has_column = n < columns
    x_at = x_ptr + place[:, None] * inputs + k[None, :]
    weight_at = weight_ptr + (expert * columns + n)[None, :] * inputs + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inputs, BLOCK_K):
        there = first + k < inputs
        x = tl.load(x_at + first, has_row[:, None] & there[None, :], 0.0)
        weight = tl.load(weight_at + first, has_column[None, :] & there[:, None], 0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * columns + n, has_column, 0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + place[:, None] * columns + n[None, :],
        total.to(y_ptr.dtype.element_ty),
        has_row[:, None] & has_column[None, :],
    )
