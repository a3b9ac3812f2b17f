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

from loraplex.adapters.base import BaseWeights
from loraplex.adapters.errors import ArtifactCorrupt
from loraplex.adapters.spec import SiteWeights


def dora_vectors(
    magnitude: NDArray[np.float32],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    base: BaseWeights,
    site: SiteWeights,
    dtype: np.dtype[Any],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(g, c), each [out_features] float32. `magnitude` [out_features], `a` [rank, in_features], `b` [out_features,
    rank] with the scaling in it. `dtype` is what the base is served in: its weights are rounded to it first. The
    base's weight is read and used in slices of rows. Raises ArtifactCorrupt where g is not finite, BaseModelInvalid,
    OSError."""
    squares = np.empty(len(b), np.float64)
    first = 0
    with np.errstate(all="ignore"):
        for rows in base.rows(site.layer, site.site):
            last = first + len(rows)
            sums = rows.astype(dtype, copy=False).astype(np.float32)
            sums += b[first:last] @ a
            squares[first:last] = np.square(sums, dtype=np.float64).sum(axis=1)
            first = last
        gain: NDArray[np.float32] = (magnitude / np.sqrt(squares)).astype(np.float32)
    if not np.isfinite(gain).all():
        raise ArtifactCorrupt(
            f"{site.site} of layer {site.layer} has a DoRA magnitude over a weight row of norm 0, or one too large"
        )
    bias = base.bias(site.layer, site.site)
    if bias is None:
        return gain, np.zeros_like(gain)
    return gain, (1 - gain) * bias.astype(dtype, copy=False).astype(np.float32)
