"""Sizes of paged attention's tiles on a GPU.

A tile has up to `block_m` rows: the query heads that share a KV head, of as many adjacent positions as fit. So K and V
are read once for all heads of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_HEADS = 32
"""Heads of one KV head in a tile. Larger groups are cut."""
_LARGE_HEAD_BYTES = 256
"""Heads above this size get narrower tiles, so that two programs fit a multiprocessor."""
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of a model's attention. Raises ValueError where query heads do not divide over KV heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads")

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def heads_per_tile(self) -> int:
        return min(self.group, _MAX_HEADS)

    @property
    def parts_per_group(self) -> int:
        return -(-self.group // self.heads_per_tile)

    @property
    def units(self) -> int:
        """Programs that compute one work item: one for each KV head, more where its group is cut."""
        return self.num_kv_heads * self.parts_per_group


@dataclass(frozen=True, slots=True)
class Tiling:
    """A kernel's tile: `block_m` rows of queries against `block_n` positions at a time. `min_split`: positions below
    which cutting a context in two costs more than it gains."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_split: int

    def __post_init__(self) -> None:
        for name, size in (("block_m", self.block_m), ("block_n", self.block_n)):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} is {size}; a tile's sides are powers of two of at least 16")

    def check(self, capability: tuple[int, int]) -> None:
        """Raises ValueError for a tile that is known to compute wrong numbers on a GPU of this compute capability.

        From 64 rows and 4 warps on, Hopper multiplies with WGMMA. In P·V the operand P comes straight out of the
        softmax, in registers; the ptxas 12.8 that Triton 3.6 and 3.7 bring may overwrite them while a pipelined
        WGMMA still reads (triton #9433). Fewer rows use the older instruction, one stage waits for each product.
        """
        if capability >= _HOPPER and self.block_m >= 64 and self.num_warps % 4 == 0 and self.num_stages > 1:
            raise ValueError(
                f"{self.block_m} rows in {self.num_stages} stages are miscompiled for Hopper: use fewer than 64 "
                "rows or one stage"
            )


@dataclass(frozen=True, slots=True)
class Tilings:
    """`decode` is for sequences whose rows fit one of its tiles, `prefill` for longer ones. `batch_invariant`: `decode`
    is for all of them, and both the tile of a row and its splits follow from its position alone. Raises ValueError
    where the sizes do not divide each other as that needs."""

    decode: Tiling
    prefill: Tiling
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        split, rows = self.decode.min_split, max(self.decode.block_m, self.decode.block_n)
        if self.batch_invariant and (split & (split - 1) or split < rows):
            raise ValueError(f"min_split is {split}: no power of two of at least {rows}")


def choose_tilings(
    shape: AttentionShape, itemsize: int, capability: tuple[int, int], *, batch_invariant: bool = False
) -> Tilings:
    """Tiles for a model on a GPU. `itemsize`: bytes of an element of K, V and the queries. `batch_invariant` as in
    Tilings."""
    large = shape.head_dim * itemsize > _LARGE_HEAD_BYTES
    if batch_invariant:
        # Below 64 rows, so that both architectures multiply with the same instruction in several stages.
        columns = (16 if large else 32) if itemsize > 2 else (32 if large else 64)
        tiling = Tiling(_MAX_HEADS, columns, num_warps=4, num_stages=3, min_split=512)
        tiling.check(capability)
        return Tilings(tiling, tiling, batch_invariant=True)
    rows = max(16, _power_of_two(shape.heads_per_tile))
    # Two or three tiles of K and V on their way a program: what it takes to keep the memory busy.
    decode = Tiling(rows, 32 if large else 64, num_warps=4, num_stages=3, min_split=256)
    if itemsize > 2:  # float32 goes without tensor cores
        prefill = Tiling(max(rows, 32), 16 if large else 32, num_warps=8, num_stages=2, min_split=512)
    else:
        hopper = capability >= _HOPPER
        # See Tiling.check: one stage. What it loses, other programs on the multiprocessor make up for in part.
        stages = 1 if hopper else 2
        # Before Hopper both operands of a product are in registers: there is room for fewer scores.
        narrow = large or (not hopper and shape.head_dim > 64)
        warps = 8 if large else 4
        prefill = Tiling(64, 32 if narrow else 64, num_warps=warps, num_stages=stages, min_split=512)
        if shape.head_dim * itemsize > 2 * _LARGE_HEAD_BYTES:
            # The answers of 64 rows would take more registers than there are.
            prefill = Tiling(32, 32, num_warps=8, num_stages=2, min_split=512)
    tilings = Tilings(decode, prefill)
    for tiling in (tilings.decode, tilings.prefill):
        tiling.check(capability)
    return tilings


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
