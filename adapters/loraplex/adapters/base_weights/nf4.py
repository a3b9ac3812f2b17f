"""nf4 made of a weight: the base that a QLoRA training multiplies, from the full-precision checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.base_weights.grouped import NotFinite

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The table of Dettmers et al., "QLoRA" (2023), appendix E."""
_BLOCK = 64
_NESTED_BLOCK = 256
_PIECE_BLOCKS = 1 << 14
"""Blocks that are worked on at a time: 4 MiB in float32."""


def quantise_nf4(weight: NDArray[Any]) -> NDArray[np.float32]:
    """A weight [N, K] of any floats as nf4 stands for it, float32, in the form that QLoRA trains over by default.

    Blocks are of 64 weights, of all rows one behind the other; the last one may be shorter. A weight over the largest
    magnitude of its block becomes the nearest of the 16 values, and of two the lower. The largest magnitudes less their
    mean are codes of 8 bits themselves ("double quantisation", QLoRA, section 3), in blocks of 256 (bitsandbytes'
    `quantize_4bit` with `compress_statistics`). Raises NotFinite.
    """
    flat = weight.reshape(-1)
    step = _PIECE_BLOCKS * _BLOCK
    pieces = range(0, flat.size, step)
    largest = np.concatenate([np.abs(_blocks(flat[at : at + step], _BLOCK)).max(axis=1) for at in pieces])
    if not np.isfinite(largest).all():
        raise NotFinite("a weight of the base is infinite, or no number")
    scales, table = _nested(largest), np.array(NF4, np.float32)
    dense = np.empty(flat.size, np.float32)
    for at in pieces:
        blocks = slice(at // _BLOCK, at // _BLOCK + _PIECE_BLOCKS)
        values = _nearest(_scaled(_blocks(flat[at : at + step], _BLOCK), largest[blocks]), table)
        values *= scales[blocks, None]
        dense[at : at + step] = values.reshape(-1)[: flat.size - at]
    return dense.reshape(weight.shape)


def _nested(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scales [n] of blocks, as codes of 8 bits keep them."""
    offset = largest.mean(dtype=np.float32)
    blocks = _blocks(largest - offset, _NESTED_BLOCK)
    outer = np.abs(blocks).max(axis=1)
    found = _nearest(_scaled(blocks, outer), _dynamic_map()) * outer[:, None]
    scales: NDArray[np.float32] = found.reshape(-1)[: largest.size] + offset
    return scales


def _dynamic_map() -> NDArray[np.float32]:
    """The 256 values of an 8-bit code: a sign, a power of ten, and evenly spaced fractions, more of them for larger
    powers (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2016)."""
    values = [0.0, 1.0]
    for power in range(7):
        bounds = np.linspace(0.1, 1, (1 << power) + 1)
        middles = 10.0 ** (power - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


def _blocks(flat: NDArray[Any], size: int) -> NDArray[np.float32]:
    """[n, size] float32, the last row filled up with zeros."""
    padded = np.zeros(-(-flat.size // size) * size, np.float32)
    padded[: flat.size] = flat
    return padded.reshape(-1, size)


def _scaled(blocks: NDArray[np.float32], largest: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks / np.where(largest > 0, largest, np.float32(1)).astype(np.float32)[:, None]


def _nearest(values: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest entries of a sorted table."""
    found: NDArray[np.float32] = table[np.searchsorted((table[:-1] + table[1:]) / 2, values)]
    return found
