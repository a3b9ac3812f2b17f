"""The common parts of linears that numba compiles: weights in blocks of outputs, the division into units, code for each
number of rows of a tile, and the end of a tile."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import host_features, jit, read_int64

UNIT_BYTES = 768
"""Bytes of a column of x that one reading of a block's weights serves, at most: more rows would not stay in a core's
own cache beside it."""

PIECE_BYTES = 32
"""Bytes of a record of rows of one expert, and of the head of their list: how many there are. A record has the expert,
the first row and the number of rows, as int64."""
PIECE_ROWS = UNIT_BYTES // 4
"""Rows of a record, at most."""
_PIECE_BYTES = PIECE_BYTES

_OWN_ROWS = 48
"""Rows for each thread from which on a thread computes rows of its own, and reads all weights for them. What other
kernels leave of these rows is in its core's cache."""


@dataclass(frozen=True, slots=True)
class BlockedLinear(PackedLinear):
    """A weight in blocks of B outputs. It takes x [T, K] whose rows may lie apart, and a contiguous bias."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        places = [0 if part is None else part.data_ptr() for part in self.parts]
        return self.multiply(self.rows_of(x, bias), 0 if bias is None else bias.data_ptr(), places)

    @property
    @abstractmethod
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """Codes or numbers, and what else the kernel reads of the weight."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, bias: int, places: Sequence[int], pieces: int = 0) -> torch.Tensor:
        """x·Wᵀ + b, for the addresses of the bias, or 0, and of the `parts`. With the address of `pieces`, rows of x of
        several experts (`PIECE_BYTES`), those are of the biases [E, N] and of addresses [E] of each expert's parts;
        these weights differ from this one in nothing but the numbers in their parts."""

    def rows_of(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x with the numbers of a row side by side. Raises ValueError where x or the bias do not fit."""
        columns, inputs = self.shape
        if (
            x.dtype is not self.dtype
            or x.dim() != 2
            or x.shape[1] != inputs
            or (
                bias is not None
                and (bias.dtype is not self.dtype or bias.shape != (columns,) or not bias.is_contiguous())
            )
        ):
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not fit a weight {list(self.shape)} in {self.dtype}"
            )
        return x if x.stride(1) == 1 else x.contiguous()


def block_size() -> int:
    """B: outputs whose sums a tile of rows holds in registers."""
    return 32 if "avx512f" in host_features() else 16


def in_blocks(columns: torch.Tensor, pool: HugePagePool | None) -> torch.Tensor:
    """[N, C, …] → [⌈N/B⌉, C, B, …], zeros behind the N outputs, in memory of the `pool`, if one is given."""
    rows, count, *rest = columns.shape
    width = block_size()
    sizes = (-(-rows // width), count, width, *rest)
    blocks = torch.zeros(sizes, dtype=columns.dtype) if pool is None else pool.zeros(sizes, columns.dtype)
    for block, part in enumerate(columns.split(width)):
        blocks[block, :, : len(part)] = part.transpose(0, 1)
    return blocks


@jit
def rows_of_piece(number, rows, spans, pieces):
    """The expert, the first and the last row of one of the pieces, if there are any, else of one of the `spans`."""
    if pieces != 0:
        at = pieces + (number + 1) * _PIECE_BYTES
        first = read_int64(at + 8)
        return read_int64(at), first, first + read_int64(at + 16)
    return 0, rows * number // spans, rows * (number + 1) // spans


@jit
def part_of(place, expert, pieces):
    """The address of an expert's part, whose table is at `place`, or of the only one's."""
    return read_int64(place + expert * 8) if pieces != 0 and place != 0 else place


def unit_spans(column_bytes: int, rows: int, blocks: int, threads: int) -> tuple[int, int]:
    """How many spans of rows, and how many of `blocks` blocks in a unit, a product of `rows` rows is divided into.
    `column_bytes`: of a column of x."""
    spans = -(-column_bytes // UNIT_BYTES)
    if rows >= threads * _OWN_ROWS:
        return -(-spans // threads) * threads, 1
    return spans, unit_blocks(blocks, threads)


def unit_blocks(blocks: int, threads: int) -> int:
    # A few blocks at once where a block is soon done: taking one costs as much as some rows of it.
    return max(1, blocks // (threads * 8))


def block_parts(context):
    """Vectors of a block's outputs."""
    return 2 if nir.wide_registers(context) else 1


@intrinsic
def block_width(typing):
    """`block_size`, of the processor that code is made for."""

    def lower(context, builder, signature, values):
        return nir.i64(16 * block_parts(context))

    return types.int64(), lower


def for_each_count(builder, rows, least, most, emit):
    """Code of its own, which `emit` (number) makes, for each number of `rows` from `least` to `most`."""
    done = builder.append_basic_block("done")
    cases = [builder.append_basic_block(f"rows{number}") for number in range(least, most + 1)]
    choice = builder.switch(rows, cases[-1])
    for number, block in enumerate(cases, least):
        if number < most:
            choice.add_case(nir.i64(number), block)
        builder.position_at_end(block)
        emit(number)
        builder.branch(done)
    builder.position_at_end(done)


def store_tile(builder, element, totals, parts, bias, weight, y, y_stride, count):
    """y[r, :count] = the `totals` of each row, `parts` vectors of float32, + the bias, rounded once. `weight`: an
    address with memory."""
    for part in range(parts):
        mask = nir.lane_mask(builder, nir.i64(0), builder.sub(count, nir.i64(16 * part)))
        start = nir.i64(16 * element.size * part)
        has_bias = builder.icmp_signed("!=", bias, nir.i64(0))
        lanes = builder.select(has_bias, mask, ir.Constant(nir.V_I1, [0] * nir.LANES))
        # Without a bias no lane is on. The address has memory then too: without any the load would take hundreds of
        # cycles.
        added = element.load(builder, builder.add(builder.select(has_bias, bias, weight), start), lanes)
        for r, total in enumerate(totals[part::parts]):
            target = builder.add(builder.add(y, builder.mul(y_stride, nir.i64(r))), start)
            element.store(builder, builder.fadd(total, added), target, mask)
