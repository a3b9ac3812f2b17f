"""DoRA's vectors, computed once when an adapter is laid out.

PEFT computes, for a linear y = W·x + bias with magnitudes m [out] (Liu et al., ICML 2024; `lora/dora.py`, eval mode):

    g = m / ‖W + scaling·B·A‖ (of each row)        y = bias + g ⊙ (W·x) + g ⊙ (scaling·B·A·x)

Nothing in g depends on x. So g is folded into B, and what is left to do to the base's own output is
y ← g ⊙ y + c with c = (1 - g) ⊙ bias.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseWeights
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import SiteWeights

_SMALL_PRODUCT = 1 << 18
"""Multiplications up to which OpenBLAS starts no threads."""


def dora_vectors(
    magnitude: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    base: BaseWeights,
    site: SiteWeights,
    dtype: np.dtype[Any],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(g, c), each [out_features] float32. `magnitude` [out_features], `a` [rank, in_features], `b` [out_features,
    rank] with the scaling in it. `dtype` is what the base is served in. The
    base's weight is read and used in slices of rows; sums are in float32, as PEFT's. Raises
    AdapterRefused("non_finite") where a norm or g is not finite, BaseModelInvalid, OSError."""
    squares = np.empty(len(b), np.float32)
    first = 0
    with np.errstate(all="ignore"):
        for sums in base.rows(site.layer, site.site, dtype):
            last = first + len(sums)
            _add_product(sums, b[first:last], a)
            squares[first:last] = np.einsum("ij,ij->i", sums, sums)
            first = last
        gain: NDArray[np.float32] = (magnitude / np.sqrt(squares)).astype(np.float32)
    if not (np.isfinite(gain).all() and np.isfinite(squares).all()):
        raise AdapterRefused(
            "non_finite",
            f"{site.site} of layer {site.layer}: DoRA's magnitudes, divided by the norms of the rows of W + BA, are "
            "not all finite: a row is zero or too large, or a magnitude is",
        )
    bias = base.bias(site.layer, site.site)
    if bias is None:
        return gain, np.zeros_like(gain)
    return gain, (1 - gain) * bias.astype(dtype, copy=False).astype(np.float32)


def _add_product(sums: NDArray[np.float32], b: NDArray[np.float32], a: NDArray[np.float32]) -> None:
    """sums += b·a, in products so small that the library computes them in this thread. Its team of threads would take
    the step's cores, and wait for each other: several times the time of both on a busy machine."""
    height = 64
    width = max(8, _SMALL_PRODUCT // (height * b.shape[1]))
    for top in range(0, len(sums), height):
        for left in range(0, sums.shape[1], width):
            part = sums[top : top + height, left : left + width]
            part += b[top : top + height] @ a[:, left : left + width]
