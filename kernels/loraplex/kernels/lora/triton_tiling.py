"""Sizes of batched LoRA's tiles on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.kernels.lora.types import CHUNK

_REGISTERS = 65536
"""Registers of a multiprocessor; threads get them by eights."""
_MOST_REGISTERS = 255
"""Registers that a thread can have."""
STRIP_TILES = 8
"""Tiles of `large_block_n` columns in a strip."""


@dataclass(frozen=True, slots=True)
class LoraTiling:
    """Powers of two throughout, of at least 16 where tensor cores multiply.

    Small pieces have up to `small_rows` rows, as many as tensor cores multiply at least; large ones up to
    `large_rows`. A program reads `block_k` columns of x and A at a time, `block_n` of B and y, `block_r` ranks. A small
    piece's K is cut into up to `max_splits` planes, of whole `block_k`s; `planes` of them are summed at a time. There
    are as few planes as give every program work: each costs a write and several reads of hidden values. Steps with more
    than `max_small_rows` rows in small pieces make large ones of those above ROW_ROWS.

    Of large pieces, K is cut into one of `large_splits`, one of `large_blocks_r` ranks are computed at a time, and
    `expand_rows` rows are expanded at a time: below 64, see `loraplex.kernels.lora.triton_expand`.

    A launch has `shrink_programs` or `expand_programs` for each multiprocessor, and B sides no more registers than fit
    there. With `row_programs`, B sides of small pieces have none on tensor cores: pieces have up to ROW_ROWS rows then,
    and that number of programs of one warp share a multiprocessor (`loraplex.kernels.lora.triton_rows`). 12 are planned
    for, and no GPU has timed them.

    With `row_block_k`, A sides of pieces of one and of two rows have none on tensor cores either, and take that number
    of columns of K at a time: 1,024 keep four warps busy. `early`: an A side of small pieces begins while the kernel
    before it ends, and has its tiles on the way when x is there. No GPU has timed these.

    With `strip_stages`, B sides of large pieces go by strips of STRIP_TILES · `large_block_n` columns: tiles are loaded
    that number of stages ahead, the one that is computed included (`loraplex.kernels.lora.triton_strips`). That takes
    adapters of up to the largest of `large_blocks_r` ranks: where wider ones may come, B sides stay as they are. Three
    stages are planned for, and no GPU has timed them.

    `batch_invariant`: every piece is a small one, on tensor cores whatever its rows, so that the order of a row's sums
    follows from its site and its adapter's ranks alone (ADR 0040).
    """

    small_rows: int = 16
    block_k: int = 512
    block_n: int = 256
    block_r: int = 16
    max_splits: int = 8
    planes: int = 8
    small_warps: int = 4
    small_stages: int = 2
    max_small_rows: int = 1024
    large_rows: int = 64
    large_block_k: int = 64
    large_block_n: int = 128
    large_blocks_r: tuple[int, ...] = (16, 32, 64)
    large_splits: tuple[int, ...] = (1, 2, 4, 8)
    large_warps: int = 4
    large_stages: int = 4
    expand_rows: int = 32
    shrink_programs: int = 4
    expand_programs: int = 3
    row_programs: int = 0
    row_block_k: int = 0
    early: bool = False
    strip_stages: int = 0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        multiplied = (
            self.small_rows, self.block_k, self.block_n, self.block_r, self.large_rows, self.large_block_k,
            self.large_block_n, self.expand_rows, *self.large_blocks_r,
        )  # fmt: skip
        for size in multiplied:
            if size < 2 * CHUNK or size & (size - 1):
                raise ValueError(f"a tile's side is {size}: no power of two of at least {2 * CHUNK}")
        if self.row_block_k % self.block_k or self.row_block_k & (self.row_block_k - 1):
            raise ValueError(f"{self.row_block_k} columns by rows are no power of two of {self.block_k}")
        if self.strip_stages and self.expand_rows > self.large_rows:
            raise ValueError("a strip has no more rows than a large piece")
        if self.expand_rows >= 64:
            raise ValueError(
                "64 rows and more are expanded with WGMMA, whose operands in registers ptxas gets wrong"
            )
        if self.batch_invariant and (self.row_programs or self.row_block_k):
            raise ValueError("sums by rows are taken in another order for one row than for several")

    def expand_registers(self, small: bool) -> int:
        """The most registers of a thread with which the B sides of a launch fit a multiprocessor. Where it may choose,
        a compiler takes more than it needs."""
        if small and self.row_programs:
            return min(_MOST_REGISTERS, _REGISTERS // (self.row_programs * 32)) // 8 * 8
        warps = self.small_warps if small else self.large_warps
        return _REGISTERS // (self.expand_programs * warps * 32) // 8 * 8

    def shrink_registers(self) -> int:
        """The most registers of a thread with which the A sides of small pieces fit a multiprocessor."""
        return _REGISTERS // (self.shrink_programs * self.small_warps * 32) // 8 * 8

    def split(self, in_features: int, wanted: int) -> tuple[int, int]:
        """The columns in a plane of a small piece, and the number of planes. `wanted` planes would give every program
        work; they are counted in powers of two. Where a row's bits must not depend on the step, the site alone
        decides."""
        most = self.max_splits
        if not self.batch_invariant:
            most = min(most, 1 << (max(1, wanted) - 1).bit_length())
        block = max(self.block_k, self.row_block_k)
        split = -(-in_features // (block * most)) * block
        return split, -(-in_features // split)


INVARIANT_TILING = LoraTiling(batch_invariant=True, block_k=256, max_splits=8)
"""The tiling for the same bits in every step, recorded or not. Fewer planes, since prompts have as many."""
