"""Values of LoRA on experts, as an upload is inspected: whether they are finite, and how large their products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.values import SiteNorm
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.spec import BaseSpec, ExpertWeights
from loraplex.adapters.store.tensors import scan_tensors

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def measure_experts(
    tensors_path: Path, experts: Sequence[ExpertWeights], base: BaseSpec
) -> tuple[list[SiteNorm], list[str]]:
    """A bound of ‖scaling·B·A‖ of each site of each layer's experts, exactly 0 where the products are zero: the root of
    Σ (scaling·‖Bₑ‖·‖Aₑ‖)². And warnings about experts without effect. Reads the file once, holds its largest tensor.

    Raises AdapterRefused("non_finite") for NaN or infinity, and where folding the scaling into B overflows; OSError.
    """
    slices = {tensor.start: (tensor, weights) for weights in experts for tensor in (weights.a, weights.b)}
    if not slices:
        return [], []
    norms: dict[int, NDArray[np.float64]] = {}
    for tensor, values in scan_tensors(
        tensors_path, [tensor for tensor, _ in slices.values()], lambda _: None
    ):
        _, weights = slices[tensor.start]
        path = f"{base.experts[weights.layer].module_path}.{weights.site}"
        norms[tensor.start] = _norms(values, weights, path, is_a=tensor.start == weights.a.start)
    squares: dict[str, float] = {}
    idle: dict[tuple[int, int], bool] = {}
    for weights in experts:
        shape = base.experts[weights.layer]
        path = f"{shape.module_path}.{weights.site}"
        products = abs(weights.scaling) * norms[weights.a.start] * norms[weights.b.start]
        squares[path] = squares.get(path, 0.0) + float((products**2).sum())
        for expert, product in enumerate(products.tolist(), max(weights.expert, 0)):
            key = (weights.layer, expert)
            idle[key] = idle.get(key, True) and product == 0.0
    without = sum(idle.values())
    notes = []
    if without:
        notes.append(
            f"{without} of {len(idle)} experts with LoRA have a product of zero: no token of the training went to "
            "them, and they answer as the base's do"
        )
    return [SiteNorm(path, math.sqrt(square)) for path, square in squares.items()], notes


def _norms(values: NDArray[Any], weights: ExpertWeights, path: str, *, is_a: bool) -> NDArray[np.float64]:
    """The Frobenius norm of the matrix of each expert."""
    with np.errstate(all="ignore"):
        # As it is served: what float32 can't hold is refused, even where float64 can.
        exact = values.astype(np.float32, copy=False)
    largest = float(np.abs(exact).max())
    if not math.isfinite(largest):
        raise AdapterRefused("non_finite", f"LoRA on {path} holds NaN or infinite values")
    if is_a == weights.turned and abs(weights.scaling) * largest > _FLOAT32_MAX:
        raise AdapterRefused("non_finite", f"LoRA on {path} overflows when its scaling is applied")
    if weights.expert >= 0:
        return np.array([np.linalg.norm(exact.astype(np.float64))])
    if is_a:
        parts = exact.reshape(-1, weights.rank * exact.shape[1])
        squares = np.einsum("ij,ij->i", parts, parts, dtype=np.float64)
    else:
        columns = np.einsum("ij,ij->j", exact, exact, dtype=np.float64)
        squares = columns.reshape(weights.rank, -1).sum(axis=0)
    found: NDArray[np.float64] = np.sqrt(squares)
    return found
