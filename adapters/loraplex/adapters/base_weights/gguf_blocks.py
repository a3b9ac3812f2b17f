"""Blocks of GGUF files as codes in groups, with numpy.

A block of a row holds its codes and one scale, or a scale of scales ("k-quants"); the layouts are those of ggml's
`ggml-common.h`. Scales are products of two stored numbers, which float32 holds exactly, so that a weight is what
llama.cpp computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Parts = tuple[Bytes | NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]
"""Codes [B, values], scales and offsets [B, values / group] of B blocks."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """`values` weights of a row in `size` bytes; `group` of them share a scale. `decode` takes [B, size]."""

    values: int
    size: int
    group: int
    has_offsets: bool
    decode: Callable[[Bytes], Parts]


def _half(blocks: Bytes, first: int) -> NDArray[np.float32]:
    """[B, 1]: the float16 at a place of each block."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _low_then_high(packed: Bytes, run: int) -> Bytes:
    """[B, n] → [B, 2n]: the low nibbles of each `run` bytes, then their high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(packed), -1)


def _q8_0(blocks: Bytes) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return _low_then_high(blocks[:, 2:], 16).view(np.int8) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _low_then_high(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _fifth(blocks: Bytes, first: int) -> Bytes:
    """[B, 32]: a bit for each code, of the four bytes at a place of each block, where it counts 16."""
    return np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little") * np.uint8(16)


def _q5_0(blocks: Bytes) -> Parts:
    codes = _low_then_high(blocks[:, 6:], 16) | _fifth(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _low_then_high(blocks[:, 8:], 16) | _fifth(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _scales_and_offsets(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[B, 8] each, of two float16 and twelve bytes: eight scales and eight minima of six bits. Four of each lie in the
    low bits of the first eight bytes; the others have their low four bits in the last four bytes, their high two
    above the first ones."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Parts:
    return (_low_then_high(blocks[:, 16:], 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: Bytes) -> Parts:
    # Bit i of the 32 bytes is the fifth bit of the codes of group i.
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _low_then_high(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1) << 4
    return (codes, *_scales_and_offsets(blocks))


def _q6_k(blocks: Bytes) -> Parts:
    count = len(blocks)
    low = _low_then_high(blocks[:, :128], 64)
    # Each byte holds the high two bits of four codes, 32 places apart.
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts & 3).reshape(count, -1)
    codes = (low | high << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, _half(blocks, 208) * scales, None


KINDS = {
    "Q4_0": BlockKind(32, 18, 32, False, _q4_0),
    "Q4_1": BlockKind(32, 20, 32, True, _q4_1),
    "Q5_0": BlockKind(32, 22, 32, False, _q5_0),
    "Q5_1": BlockKind(32, 24, 32, True, _q5_1),
    "Q8_0": BlockKind(32, 34, 32, False, _q8_0),
    "Q4_K": BlockKind(256, 144, 32, True, _q4_k),
    "Q5_K": BlockKind(256, 176, 32, True, _q5_k),
    "Q6_K": BlockKind(256, 210, 16, False, _q6_k),
}
"""The kinds that are served, by ggml's names."""
FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Those whose codes have 4 bits, in groups of 32."""
