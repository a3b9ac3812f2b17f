"""The places of the positions before each row of a step, for layers that read these alone: short convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.attention import BLOCK_SIZE


def previous_slots(
    num_rows: Sequence[int] | NDArray[np.int64],
    seq_lens: Sequence[int] | NDArray[np.int64],
    starts: Sequence[int] | NDArray[np.int64],
    tables: Sequence[int] | NDArray[np.int32],
    count: int,
) -> NDArray[np.int64]:
    """[T, count]: where the `count` positions before each row lie, the furthest first, as block·16 + offset; -1 where a
    sequence has none. Sequence i has the next num_rows[i] rows, seq_lens[i] positions at their end, and its blocks in
    `tables` from starts[i] on."""
    rows, flat = np.asarray(num_rows, np.int64), np.asarray(tables, np.int64)
    first = np.asarray(seq_lens, np.int64) - rows
    positions = np.arange(rows.sum()) + np.repeat(first - (np.cumsum(rows) - rows), rows)
    before = positions[:, None] + np.arange(-count, 0)
    at = np.repeat(np.asarray(starts, np.int64), rows)[:, None] + np.maximum(before, 0) // BLOCK_SIZE
    return np.where(before < 0, -1, flat[at] * BLOCK_SIZE + before % BLOCK_SIZE)


def rows_among(previous: NDArray[np.int64], slots: NDArray[np.int32]) -> NDArray[np.int64]:
    """`previous_slots` with -2 - row for a place that row `row` of the step has, by the `slots` [T] of its rows: what
    reads such a place need not wait until it is written."""
    order = np.argsort(slots)
    at = np.minimum(np.searchsorted(slots, previous, sorter=order), len(slots) - 1)
    rows = order[at]
    return np.where(slots[rows] == previous, -2 - rows, previous)
