"""Checks of an adapter's values: finiteness, the size of its change, and copies of the base's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import BaseTensor
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import SiteWeights, TensorSlice
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows, read_native

_STRIP = 4096
# The square of the relative norm below which float64 sums cannot tell a product from zero.
_NOTHING = 1e-14
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SiteNorm:
    """The Frobenius norm of scaling·B·A; exactly 0 where the product is zero."""

    module_path: str
    norm: float


def measure_site(tensors_path: Path, site: SiteWeights, module_path: str) -> SiteNorm:
    """Scan the tensors of a site and compute ‖scaling·B·A‖ from their r×r Gram matrices:
    ‖B·A‖² = tr(BᵀB·AAᵀ). Holds A (at most max_rank · in_features) and a chunk of B in memory.

    Raises AdapterRefused("non_finite") for NaN or infinity, and where folding the scaling into B overflows.
    """
    gram_b, largest = _gram_of_columns(tensors_path, site.b, f"{module_path}.lora_B")
    if abs(site.scaling) * largest > _FLOAT32_MAX:
        raise AdapterRefused("non_finite", f"{module_path}.lora_B overflows when its scaling is applied")
    gram_a = _gram_of_rows(read_native(tensors_path, site.a), f"{module_path}.lora_A")
    if site.magnitude is not None:
        _finite(read_native(tensors_path, site.magnitude), f"{module_path}.lora_magnitude_vector")
    product = float(np.sum(gram_b * gram_a))
    bound = float(np.trace(gram_b) * np.trace(gram_a))
    if site.scaling == 0.0 or product <= _NOTHING * bound:
        return SiteNorm(module_path, 0.0)
    return SiteNorm(module_path, abs(site.scaling) * math.sqrt(product))


def equals_base(tensors_path: Path, saved: TensorSlice, base: BaseTensor) -> bool:
    """Whether a saved tensor is the base's own, rounded to the dtype it was saved in. Reads both in chunks."""
    original = base.tensor
    if saved.shape != original.shape or not saved.shape or original.dtype not in NUMPY_DTYPES:
        return False
    dtype = NUMPY_DTYPES[saved.dtype]
    with np.errstate(all="ignore"):
        return all(
            np.array_equal(theirs, ours.astype(np.float32).astype(dtype))
            for theirs, ours in zip(
                iter_rows(tensors_path, saved), iter_rows(base.path, original), strict=True
            )
        )


def _gram_of_columns(path: Path, tensor: TensorSlice, name: str) -> tuple[NDArray[np.float64], float]:
    """BᵀB [r, r] and the largest |B|, over rows read in chunks."""
    rank = tensor.shape[1]
    gram = np.zeros((rank, rank), np.float64)
    largest = 0.0
    for rows in iter_rows(path, tensor):
        exact = _finite(rows, name)
        gram += exact.T @ exact
        largest = max(largest, float(np.abs(exact).max()))
    return gram, largest


def _gram_of_rows(matrix: NDArray[np.generic], name: str) -> NDArray[np.float64]:
    """AAᵀ [r, r], over strips of columns."""
    gram = np.zeros((matrix.shape[0], matrix.shape[0]), np.float64)
    for first in range(0, matrix.shape[1], _STRIP):
        exact = _finite(matrix[:, first : first + _STRIP], name)
        gram += exact @ exact.T
    return gram


def _finite(values: NDArray[np.generic], name: str) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):
        # As it is served: what float32 can't hold is refused, even where float64 can.
        exact = values.astype(np.float32).astype(np.float64)
    if not np.isfinite(exact).all():
        raise AdapterRefused("non_finite", f"{name} holds NaN or infinite values")
    return exact
