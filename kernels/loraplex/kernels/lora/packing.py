"""How a step's rows are packed into equal blocks, so that a batch of matrix products serves any mix of adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.lora.types import Segment

MAX_BLOCK_ROWS = 512
GATHER_ROWS = 8
"""Reading a tile costs about as much as computing this number of rows with it (measured on CPU in float32)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Blocks of `height` lanes (a lane computes one row) and `width` chunks. A row's chunks all lie in its block,
    so nothing has to be summed across blocks; low ranks share a block instead of being padded to the highest.

    `lane_row` [L = blocks·height] is the row of each lane (0 where unused). `row_lane` [T] is the lane of each
    row, L for base rows. `lane_owner` [blocks, height] and `chunk_owner` [blocks, width] number the adapters (-1 and
    -2 where unused): a lane may use only its own adapter's chunks. `chunk_slot` and `chunk_index` [blocks, width]
    name the chunks; unused places have index -1.
    """

    num_blocks: int
    height: int
    width: int
    lane_row: NDArray[np.int32]
    row_lane: NDArray[np.int32]
    lane_owner: NDArray[np.int32]
    chunk_owner: NDArray[np.int32]
    chunk_slot: NDArray[np.int32]
    chunk_index: NDArray[np.int32]


def pack_rows(
    by_slot: Mapping[int, Sequence[Segment]], num_chunks: NDArray[np.int32], num_rows: int
) -> Packing:
    """Pack the rows of each slot's adapter, which has `num_chunks[slot]` chunks at its widest site.

    The width is that of the widest adapter; the height is the power of two that costs least.
    """
    slots = sorted(by_slot, key=lambda slot: (-int(num_chunks[slot]), slot))
    counts = [sum(count for _, _, count in by_slot[slot]) for slot in slots]
    chunks = [int(num_chunks[slot]) for slot in slots]
    width = chunks[0]
    height, best = 1, 0
    candidate = 1
    while True:
        cost = _count_blocks(counts, chunks, candidate, width) * (GATHER_ROWS + candidate)
        if not best or cost < best:
            height, best = candidate, cost
        if candidate >= min(sum(counts), MAX_BLOCK_ROWS):
            break
        candidate *= 2
    return _pack(by_slot, slots, chunks, num_rows, height, width)


def _count_blocks(counts: list[int], chunks: list[int], height: int, width: int) -> int:
    """How many blocks `_pack` makes."""
    blocks = 0
    lanes_left = chunks_left = 0
    for count, adapter_chunks in zip(counts, chunks, strict=True):
        full, rest = divmod(count, height)
        blocks += full
        if rest:
            if rest > lanes_left or adapter_chunks > chunks_left:
                blocks += 1
                lanes_left, chunks_left = height, width
            lanes_left -= rest
            chunks_left -= adapter_chunks
    return blocks


def _pack(
    by_slot: Mapping[int, Sequence[Segment]],
    slots: list[int],
    chunks: list[int],
    num_rows: int,
    height: int,
    width: int,
) -> Packing:
    """Full blocks of one adapter each; then the remainders, widest first, each into the open block if it fits
    there, else into a new one."""
    lanes: list[NDArray[np.int32]] = []  # rows, by tile
    tiles: list[tuple[int, int, int, int]] = []  # (owner, block, first lane, first chunk), by tile
    blocks = 0
    rests: list[tuple[int, NDArray[np.int32]]] = []
    for owner, slot in enumerate(slots):
        rows = np.concatenate([np.arange(first, first + n, dtype=np.int32) for _, first, n in by_slot[slot]])
        whole = len(rows) - len(rows) % height
        for start in range(0, whole, height):
            lanes.append(rows[start : start + height])
            tiles.append((owner, blocks, 0, 0))
            blocks += 1
        if whole < len(rows):
            rests.append((owner, rows[whole:]))
    lane = chunk = 0
    lanes_left = chunks_left = 0
    for owner, rows in rests:
        if len(rows) > lanes_left or chunks[owner] > chunks_left:
            blocks += 1
            lane = chunk = 0
            lanes_left, chunks_left = height, width
        lanes.append(rows)
        tiles.append((owner, blocks - 1, lane, chunk))
        lane += len(rows)
        chunk += chunks[owner]
        lanes_left -= len(rows)
        chunks_left -= chunks[owner]

    lane_row = np.zeros(blocks * height, np.int32)
    row_lane = np.full(num_rows, blocks * height, np.int32)
    lane_owner = np.full((blocks, height), -1, np.int32)
    chunk_owner = np.full((blocks, width), -2, np.int32)
    chunk_slot = np.zeros((blocks, width), np.int32)
    chunk_index = np.full((blocks, width), -1, np.int32)
    for rows, (owner, block, lane, chunk) in zip(lanes, tiles, strict=True):
        at = block * height + lane
        lane_row[at : at + len(rows)] = rows
        row_lane[rows] = np.arange(at, at + len(rows), dtype=np.int32)
        lane_owner[block, lane : lane + len(rows)] = owner
        end = chunk + chunks[owner]
        chunk_owner[block, chunk:end] = owner
        chunk_slot[block, chunk:end] = slots[owner]
        chunk_index[block, chunk:end] = np.arange(chunks[owner], dtype=np.int32)
    return Packing(
        blocks, height, width, lane_row, row_lane, lane_owner, chunk_owner, chunk_slot, chunk_index
    )
