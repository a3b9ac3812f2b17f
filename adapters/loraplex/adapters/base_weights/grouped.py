"""Weights of a linear as codes in groups, with numpy.

The engine multiplies these codes and scales. The code that needs the weights themselves (DoRA's norms, the reference of
a version's numbers) has them from `GroupedWeight.dense`. So all of them see the same base.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.kernels.linear.stored import GroupedWeight

INT8_GROUP = 64
"""Inputs that share a scale where a base of 16 or 32 bits is quantised at its load."""
_LEAST_GROUP = 16
_MOST_CODE = 127
_PIECE_VALUES = 1 << 20
"""Weights that are worked on at a time: their float32 stays in a processor's cache."""


class NotFinite(ValueError):
    """A weight that is infinite, or no number."""


def stack(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of as many inputs, one behind the other by rows. Groups of different sizes are divided."""
    group = gcd(*(part.group for part in parts))
    scales, offsets = [], []
    for part in parts:
        times = part.group // group
        scales.append(np.repeat(part.scales, times, axis=1))
        offsets.append(
            np.zeros_like(scales[-1]) if part.offsets is None else np.repeat(part.offsets, times, axis=1)
        )
    has_offsets = any(part.offsets is not None for part in parts)
    codes = np.concatenate([part.codes for part in parts])
    return GroupedWeight(
        codes, np.concatenate(scales), np.concatenate(offsets) if has_offsets else None, group
    )


def group_of(inputs: int) -> int:
    """Size of a group of a linear with `inputs` inputs: the largest even divisor up to INT8_GROUP; all of them, a scale
    for each output, where only groups below 16 would divide them."""
    for group in range(INT8_GROUP, _LEAST_GROUP - 1, -2):
        if inputs % group == 0:
            return group
    return inputs


def quantise_int8(weight: NDArray[Any], *, group: int = 0) -> GroupedWeight:
    """Codes in groups for a weight [N, K] of any floats. A group's scale is its largest magnitude over 127, and a code
    is the quotient, rounded to the nearest, ties to even. A row's codes depend on that row alone. `group`: a divisor of
    K; 0: that of `group_of`. Raises NotFinite."""
    rows, inputs = weight.shape
    group = group or group_of(inputs)
    codes = np.empty((rows, inputs), np.int8)
    scales = np.empty((rows, inputs // group), np.float32)
    step = max(1, _PIECE_VALUES // max(1, inputs))
    for first in range(0, rows, step):
        piece = weight[first : first + step].astype(np.float32).reshape(-1, inputs // group, group)
        largest = np.abs(piece).max(axis=2)
        if not np.isfinite(largest).all():
            raise NotFinite("a weight of the base is infinite, or no number")
        scale = largest / np.float32(_MOST_CODE)
        # A group of zeros has the scale 0; so has one of numbers that are too small for a scale of their own.
        piece /= np.where(scale > 0, scale, np.float32(1))[:, :, None]
        np.rint(piece, out=piece)
        codes[first : first + step] = np.clip(piece, -_MOST_CODE, _MOST_CODE).reshape(-1, inputs)
        scales[first : first + step] = scale
    return GroupedWeight(codes, scales, None, group)
