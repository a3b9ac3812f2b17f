"""How the linears of a checkpoint whose codes have 4 bits are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loraplex.adapters.admission.base_families import text_fields
from loraplex.adapters.base_weights.schemes import group_of_4_bits
from loraplex.engine.model.base import Model
from loraplex.engine.model.fused import FusedDecoder
from loraplex.engine.model.weights import every_part
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear import humming


def activations(raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels) -> str:
    """The form of the activations that 4-bit linears of a checkpoint are multiplied with, from its config alone:
    "int8", or empty for the model's dtype, which a `dtype` that is named asks for. Raises QuantisationUnsupported."""
    if dtype != "auto" or kernels.ops.pack_integers is None:
        return ""
    # It imports numba, which only those need who have its kernels.
    from loraplex.kernels.layers.numba_quantise import GROUP

    group = group_of_4_bits(text_fields(raw))
    return "" if group is None or group % GROUP else "int8"


def library(model: Model) -> str:
    """The library, with its version, that multiplies with linears of a model; empty for the engine's own kernels."""
    parts = every_part(model.weights) if isinstance(model, FusedDecoder) else ()
    return humming.NAME if any(isinstance(part, humming.LibraryWeight) for part in parts) else ""


def explain(raw: Mapping[str, Any], asked: str, dtype: torch.dtype, kernels: Kernels) -> str:
    """The form of a checkpoint's 4-bit linears in words, from its config alone, for `asked` as the dtype and `dtype` as
    what is served; empty where it has none. Raises QuantisationUnsupported."""
    if activations(raw, asked, kernels):
        return "4-bit linears with 8-bit activations in groups of 32"
    group = group_of_4_bits(text_fields(raw))
    if group is None or kernels.choose_four_bits is None:
        return ""
    choice = kernels.choose_four_bits(group, dtype)
    by = f"{choice.library} where it has their form" if choice.library else f"Triton, since {choice.reason}"
    return f"two codes of 4 bits in a byte, by {by}"
