"""Checks of an adapter's values: finiteness, the size of its change, and copies of the base's weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.admission.base_model import (
    BaseTensor,
    BaseWeights,
    locate_module_weights,
    read_text_config,
)
from loraplex.adapters.admission.module_names import ModuleNames
from loraplex.adapters.errors import AdapterRefused, BaseModelInvalid
from loraplex.adapters.spec import BaseSpec, SiteWeights, TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.adapters.store.tensors import NUMPY_DTYPES, iter_rows, read_native

_STRIP = 4096
_ROTATED = ("q_proj", "k_proj")
# The square of the relative norm below which float64 sums cannot tell a product from zero.
_NOTHING = 1e-14
FLOAT32_MAX = float(np.finfo(np.float32).max)
LEAST_NORM = 2.0**-126
"""The smallest normal number of float32 and of bfloat16. A smaller change of a linear is lost in any served dtype."""


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
    if abs(site.scaling) * largest > FLOAT32_MAX:
        raise AdapterRefused("non_finite", f"{module_path}.lora_B overflows when its scaling is applied")
    gram_a = _gram_of_rows(read_native(tensors_path, site.a), f"{module_path}.lora_A")
    if site.magnitude is not None:
        _finite(read_native(tensors_path, site.magnitude), f"{module_path}.lora_magnitude_vector")
    product = float(np.sum(gram_b * gram_a))
    bound = float(np.trace(gram_b) * np.trace(gram_a))
    if site.scaling == 0.0 or product <= _NOTHING * bound:
        return SiteNorm(module_path, 0.0)
    return SiteNorm(module_path, abs(site.scaling) * math.sqrt(product))


def measure_sites(
    tensors_path: Path,
    sites: tuple[SiteWeights, ...],
    base: BaseSpec,
    of_experts: Iterable[SiteNorm],
    *,
    has_more: bool,
) -> dict[str, Any]:
    """The norms of a report, of all sites and `of_experts`. `has_more`: the adapter changes more than these. Raises
    AdapterRefused (non_finite, no_effect), OSError."""
    norms = [
        measure_site(tensors_path, site, base.sites[site.layer, site.site].module_path) for site in sites
    ]
    norms += of_experts
    largest, smallest = max(norms, key=lambda n: n.norm), min(norms, key=lambda n: n.norm)
    # A magnitude, a row that replaces another and a head have an effect of their own.
    if largest.norm < LEAST_NORM and not has_more and not any(site.magnitude for site in sites):
        size = "zero" if largest.norm == 0.0 else f"zero or smaller than {LEAST_NORM:.2g}"
        raise AdapterRefused(
            "no_effect",
            f"every product of the scaling, lora_B and lora_A is {size}: the adapter would answer as the base does",
        )
    return {
        "total": math.hypot(*(n.norm for n in norms)),
        "max": largest.norm,
        "max_module": largest.module_path,
        "min": smallest.norm,
    }


def check_dtype(module: str, matrix: str, tensor: TensorSlice) -> None:
    """Raises AdapterRefused("unsupported_feature")."""
    if tensor.dtype not in NUMPY_DTYPES:
        accepted = ", ".join(NUMPY_DTYPES)
        raise AdapterRefused(
            "unsupported_feature",
            f"{shown(module)}.{matrix} is stored as {tensor.dtype}; accepted are {accepted}",
            feature=f"dtype_{tensor.dtype}",
        )


def check_copies(
    tensors_path: Path, copies: Mapping[str, TensorSlice], base: BaseSpec, names: ModuleNames, deep: bool
) -> None:
    """Check copies of the base's weights that were saved along; `deep`: their values too. Raises AdapterRefused
    (unexpected_tensor, base_mismatch, unsupported_feature), BaseModelInvalid."""
    known = locate_module_weights(base)
    for name, saved in copies.items():
        weight = known.get(names.in_base(name))
        if weight is None:
            raise AdapterRefused(
                "unexpected_tensor", f"unexpected tensor for {shown(name, 160)}: the base has no such weight"
            )
        module, _, kind = name.rpartition(".")
        check_dtype(module, kind, saved)
        rows, own = saved.shape[:1], weight.tensor.shape[:1]
        if rows != own and saved.shape[1:] == weight.tensor.shape[1:]:
            raise AdapterRefused(
                "base_mismatch",
                f"the copy of {name} that was saved along has {rows[0]} rows, the base's has {own[0]}: the vocabulary "
                "was resized for the training, and an adapter for it needs a base that was resized in the same way",
            )
        if deep and not equals_base(tensors_path, saved, weight):
            raise AdapterRefused(
                "base_mismatch", f"the copy of {name} that was saved along differs from the base's own weight"
            )


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


def note_magnitude_order(tensors_path: Path, sites: Iterable[SiteWeights], base: BaseSpec) -> list[str]:
    """Warn of DoRA's magnitudes that fit the norms of their rows in another order of the rows: rotary embeddings turn
    pairs of rows, which are neighbours in Llama's own code and in torchtune, and half a head apart in transformers. A
    conversion that moves the rows of lora_B and not the magnitudes makes such an adapter. One layer tells."""
    config = read_text_config(Path(base.model_dir))
    heads = config.get("num_attention_heads")
    dim = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    first = {site.site: site for site in reversed(list(sites)) if site.site in _ROTATED and site.magnitude}
    for site in first.values():
        magnitude = (
            np.abs(read_native(tensors_path, site.magnitude).astype(np.float64)) if site.magnitude else None
        )
        if magnitude is None or not dim or dim % 2 or len(magnitude) % dim:
            continue
        try:
            norms = _row_norms(tensors_path, site, BaseWeights(base))
        except BaseModelInvalid:  # the check of numbers tells
            continue
        if not (magnitude.all() and norms.all()):
            continue
        pairs = np.arange(len(norms)).reshape(-1, dim // 2, 2).swapaxes(1, 2).ravel()
        in_order, *others = (
            float(np.std(np.log(magnitude[order] / norms)))
            for order in (np.arange(len(norms)), pairs, np.argsort(pairs))
        )
        if min(others) < in_order / 2:
            module = base.sites[site.layer, site.site].module_path
            return [
                f"the magnitudes of {module} fit its rows in the order of another implementation (torchtune, Llama's "
                "own code), not in the order that they have: they were not moved with the rows of lora_B, and the "
                "adapter computes something else than was trained"
            ]
    return []


def _row_norms(tensors_path: Path, site: SiteWeights, weights: BaseWeights) -> NDArray[np.float64]:
    """‖W + scaling·B·A‖ of each row [out_features]."""
    a = read_native(tensors_path, site.a).astype(np.float64)
    b = read_native(tensors_path, site.b).astype(np.float64) * site.scaling
    norms = np.empty(len(b))
    first = 0
    for rows in weights.rows(site.layer, site.site, np.dtype(np.float32)):
        last = first + len(rows)
        norms[first:last] = np.linalg.norm(rows.astype(np.float64) + b[first:last] @ a, axis=1)
        first = last
    return norms


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
