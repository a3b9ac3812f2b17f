"""The fixed inputs of the numerical check, and the sketches of outputs.

A site gets PROBE_ROWS rows. In the first ones x is +1 or -1 and y is 0, so that the output is the adapter's change
alone. In the last one x is 0 and y is 1, so that it shows what the adapter does to the base's own output: DoRA's
factors, and nothing for plain LoRA. These values are exact in every dtype.

An output row [N] becomes SKETCH_SUMS sums: column j is added to sum j mod SKETCH_SUMS with a sign of its own. The
signs are random, so the squares of a row's sums add up to the square of its norm on average, also for a difference of
two rows.

The embedding is looked up by token, and is measured as the linear that it is: each of the x has a sign for every
token of the vocabulary. Rows of it that an adapter replaces are summed with their tokens' signs; the last row is what
the embedding gives for the tokens behind them, which are the base's, with 1 for its numbers.
Rows of the head are measured as a linear whose other columns are 0 in the first rows and 1 in the last.

A routed expert has one row, whatever the router would choose: expert e of a layer gets the row e mod INPUT_ROWS of the
layer's inputs, and EXPERT_SUMS sums of each of its sites. They are fewer, since there are tens of thousands.

Everything follows from numbers of rows and columns by a hash, and is the same on every machine.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PROBE_ROWS = 5
INPUT_ROWS = PROBE_ROWS - 1
"""Rows in which x is +1 or -1; the last row follows."""
SKETCH_SUMS = 64
EXPERT_SUMS = 16
"""Sums of an output of a routed expert."""

EMBEDDING_ROWS, HEAD_ROWS = "embed_tokens.rows", "lm_head.rows"
"""Names of the measurements of replaced rows, like sites' names. Their layer is 0."""

_INPUTS, _COLUMNS = 0x9E3779B9, 0x7F4A7C15


@lru_cache(maxsize=256)
def probe_inputs(layer: int, in_features: int) -> NDArray[np.float32]:
    """x [PROBE_ROWS, in_features] of the sites of a layer, +1 or -1, and 0 in the last row. Read-only."""
    x = np.zeros((PROBE_ROWS, in_features), np.float32)
    for row in range(INPUT_ROWS):
        x[row] = _signs(_INPUTS + (layer * INPUT_ROWS + row + 1) * 0x85EBCA6B, in_features)
    x.flags.writeable = False
    return x


@lru_cache(maxsize=64)
def column_signs(out_features: int) -> NDArray[np.float32]:
    """[out_features] +1 or -1. Read-only."""
    signs = _signs(_COLUMNS, out_features)
    signs.flags.writeable = False
    return signs


def sketch(rows: NDArray[np.float64], count: int = SKETCH_SUMS) -> NDArray[np.float64]:
    """[T, N] → [T, count]."""
    return fold(rows * column_signs(rows.shape[1]), count)


def fold(rows: NDArray[np.float64], count: int = SKETCH_SUMS) -> NDArray[np.float64]:
    """[T, N] → [T, count]: the sums of every `count`-th column."""
    height, width = rows.shape
    padded = np.zeros((height, -(-width // count) * count))
    padded[:, :width] = rows
    sums: NDArray[np.float64] = padded.reshape(height, -1, count).sum(axis=1)
    return sums


def _signs(seed: int, count: int) -> NDArray[np.float32]:
    """The finalizer of MurmurHash3 over seed + index; its highest bit is the sign."""
    with np.errstate(over="ignore"):
        h = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed & 0xFFFFFFFF)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h ^= h >> np.uint32(shift)
            h *= np.uint32(factor)
        h ^= h >> np.uint32(16)
    return np.where(h >> np.uint32(31), np.float32(-1), np.float32(1)).astype(np.float32)
