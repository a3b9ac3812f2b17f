"""How the linears of a checkpoint of codes are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loraplex.adapters.admission.base_families import text_fields
from loraplex.adapters.base_weights.schemes import codes_for_int8, group_of_4_bits
from loraplex.engine.model.base import Model
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.model.weights import every_part
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear import humming


def activations(raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels) -> str:
    """The form of the activations that linears of a checkpoint are multiplied with (`bits_for_int8`): "int8", or empty
    for the model's dtype. Raises QuantisationUnsupported."""
    return "int8" if bits_for_int8(raw, dtype, kernels) else ""


def bits_for_int8(raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels) -> int:
    """The most bits of codes that are multiplied with activations in 8 bits, from a checkpoint's config alone: 4, or 8
    where it is made for that; 0: none, as a `dtype` that is named asks for. Raises QuantisationUnsupported."""
    if dtype != "auto" or kernels.ops.pack_integers is None:
        return 0
    # It imports numba, which only those need who have its kernels.
    from loraplex.kernels.layers.numba_quantise import GROUP

    found = codes_for_int8(text_fields(raw))
    if found is None:
        return 0
    bits, group = found
    return 0 if group % GROUP else bits


def library(model: Model) -> str:
    """The library, with its version, that multiplies with linears of a model; empty for the engine's own kernels."""
    parts = every_part(model.weights) if isinstance(model, FusedDecoder) else ()
    return humming.NAME if any(isinstance(part, humming.LibraryWeight) for part in parts) else ""


def explain(raw: Mapping[str, Any], asked: str, dtype: torch.dtype, kernels: Kernels) -> str:
    """The form of a checkpoint's linears in words, from its config alone, for `asked` as the dtype and `dtype` as what
    is served; empty where there is nothing to say. Raises QuantisationUnsupported."""
    if bits := bits_for_int8(raw, asked, kernels):
        return f"{bits}-bit linears with 8-bit activations in groups of 32"
    group = group_of_4_bits(text_fields(raw))
    if group is None or kernels.choose_four_bits is None:
        return ""
    choice = kernels.choose_four_bits(group, dtype)
    by = f"{choice.library} where it has their form" if choice.library else f"Triton, since {choice.reason}"
    return f"two codes of 4 bits in a byte, by {by}"
