"""The shared parts of Triton's products over codes and small floats, whose K is cut into splits: the launch, the places
of a tile, and the end, where the splits' sums are added in their order.

A split is a program of its own, for few rows, or one program computes all of them: the numbers are the same.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear.packed import PackedLinear

_LEAST_SPLIT = 512
"""Inputs of a split, at least: a shorter one is done before it pays for its sums."""
_MOST_SPLIT_COLUMNS = 16384
"""Outputs below which K is split: more of them give every multiprocessor a tile."""
_LEAST_COLUMNS = 16
"""Columns of a tile, at least."""
_MOST_PLANE_BYTES = 32 << 20
"""Memory for the sums of splits that are programs of their own, at most."""
_HOPPER = (9, 0)


Launch = tuple[Any, tuple[torch.Tensor, ...], dict[str, int | bool]]
"""A program, the weight's operands, and constants of its own. It takes x, the operands, bias, y [rows, N], planes,
arrived, and the sizes."""


@dataclass(frozen=True, slots=True)
class SplitTiling:
    """A program computes `block_n` columns of `block_m` rows, `block_k` of K at a time: powers of two, 16 or more.
    `apart`: each of the `splits` of K is a program of its own. All rows lie in one tile then."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    apart: bool
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class SplitLinear(PackedLinear):
    """A weight in groups of `group` inputs on its device.

    `arrived` [column tiles] int32: how many splits of a tile have been summed. All are 0 between launches, for the last
    split of a tile sets its own back. A product of one weight must therefore be done before the next one of it begins:
    launches of one stream are, and so are recordings that are replayed on one."""

    group: int
    arrived: torch.Tensor

    @abstractmethod
    def choose_tiling(self, rows: int) -> SplitTiling:
        """The tiling for x of that many rows."""

    @abstractmethod
    def launch(self, x: torch.Tensor, tiling: SplitTiling) -> Launch:
        """The program for x."""

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, tiling: SplitTiling | None = None
    ) -> torch.Tensor:
        """Sums are float32, rounded once, behind the bias. `tiling` is for tests and benches."""
        check_operands(self, x, bias)
        columns, inputs = self.shape
        y = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
        rows = y.numel() // columns
        if not rows:
            return y
        tiling = tiling or self.choose_tiling(rows)
        program, operands, constants = self.launch(x, tiling)
        tiles = triton.cdiv(rows, tiling.block_m) * triton.cdiv(columns, tiling.block_n)
        planes = x
        if tiling.apart:
            planes = torch.empty(tiling.splits, rows, columns, dtype=torch.float32, device=x.device)
        program[tiles, tiling.splits if tiling.apart else 1](
            x,
            *operands,
            x if bias is None else bias,
            y,
            planes,
            self.arrived,
            rows,
            columns,
            inputs,
            GROUP=self.group,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            SPLITS=tiling.splits,
            APART=tiling.apart,
            HAS_BIAS=bias is not None,
            # TF32 would cost float32 half its digits.
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            AWAIT=x.is_cuda,  # the interpreter knows no assembler
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **constants,
        )
        return y


def check_operands(weight: PackedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError for x [..., K] and bias [N] of other shapes, strides and dtypes than go with a weight."""
    columns, inputs = weight.shape
    if (
        x.shape[-1] != inputs
        or x.dtype is not weight.dtype
        or not x.is_contiguous()
        or (bias is not None and (bias.shape != (columns,) or bias.dtype is not weight.dtype))
    ):
        raise ValueError(
            f"no product of {list(x.shape)} {x.dtype} with a weight {list(weight.shape)} for {weight.dtype}"
        )


def new_counts(columns: int, device: torch.device) -> torch.Tensor:
    """`Packed.arrived` of a weight with that many columns."""
    return torch.zeros(triton.cdiv(columns, _LEAST_COLUMNS), dtype=torch.int32, device=device)


def most_rows(device: torch.device) -> int:
    """Rows of a tile on a device, at most. Compiled for an A100, 256 rows spill registers."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
    return 256 if is_hopper else 128


def num_splits(shape: tuple[int, int]) -> int:
    """Splits of K for a weight of `shape` [N, K]: by the weight alone."""
    columns, inputs = shape
    if columns >= _MOST_SPLIT_COLUMNS:
        return 1
    return max(1, min(8 if inputs >= 8192 else 4, inputs // _LEAST_SPLIT))


def are_apart(splits: int, rows: int, columns: int, block_m: int) -> bool:
    """Whether splits are programs of their own, for x of `rows` rows in tiles of `block_m`."""
    return splits > 1 and rows <= block_m and splits * rows * columns * 4 <= _MOST_PLANE_BYTES


@triton.jit
def tile_places(num_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows and columns of a program's tile, and whether there are such. Tiles of the same columns lie beside each
    other in the grid, so that a weight comes from memory once."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    m = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n, m < num_rows, n < N


@triton.jit
def awaited(total, AWAIT: tl.constexpr):
    """A use of a product's sums, of no instruction: the product is awaited here. Triton would leave it in flight, and
    ptxas 12.8 lets the next weights overwrite the registers that Hopper still reads (triton #9433)."""
    if AWAIT:
        total = tl.inline_asm_elementwise("", "=f,0", [total], tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def store_sums(
    total,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    m,
    n,
    has_row,
    has_column,
    num_rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store `total` [BLOCK_N, BLOCK_M] float32, the sums of one split where APART, else of all, as the rows `m` and the
    columns `n` of y [num_rows, N]. Where APART, a program of the grid's first axis is a tile and one of its second a
    split; planes [SPLITS, num_rows, N] float32 holds their sums, and arrived [tiles] int32 how many of a tile are
    there. The last one of a tile adds them up, and sets its number back to 0."""
    y_at = m.to(tl.int64)[None, :] * N + n[:, None]
    here = has_column[:, None] & has_row[None, :]
    is_last = True
    if APART:
        plane = num_rows.to(tl.int64) * N
        tl.store(planes_ptr + tl.program_id(1) * plane + y_at, total, here)
        # All threads have stored before one of them tells the other programs, and none reads before that one knows.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for split in range(SPLITS):
                total += tl.load(planes_ptr + split * plane + y_at, here, 0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, has_column, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + y_at, total.to(y_ptr.dtype.element_ty), here)
