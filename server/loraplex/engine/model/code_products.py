"""How the linears of a checkpoint of codes are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from loraplex.adapters.admission.base_families import text_fields
from loraplex.adapters.base_weights.grouped import INT8_GROUP
from loraplex.adapters.base_weights.schemes import stored_form
from loraplex.engine.model.base import Model
from loraplex.engine.model.fused import FusedDecoder
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.linear.packed import PackedLinear, every_part
from loraplex.kernels.weight_form import ACTIVATION_GROUP, WeightForm, served_form


def activations(raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels) -> str:
    """The form of the activations that linears of a checkpoint are multiplied with (`bits_for_int8`): "int8", or empty
    for the model's dtype. Raises QuantisationUnsupported."""
    return "int8" if bits_for_int8(raw, dtype, kernels) else ""


def linear_form(
    raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels, *, quantise: bool = False
) -> WeightForm:
    """The form that linears of a checkpoint are served in, from its config alone. A `dtype` that is named keeps
    activations in it. `quantise`: those that are stored as floats become codes of 8 bits. Raises
    QuantisationUnsupported."""
    stored = stored_form(text_fields(raw))
    if quantise and stored.codes != "groups":
        return WeightForm("groups", 8, INT8_GROUP)
    return served_form(stored, kernels.backend, round_activations=dtype == "auto")


def bits_for_int8(raw: Mapping[str, Any], dtype: str | torch.dtype, kernels: Kernels) -> int:
    """The most bits of codes that are multiplied with activations in 8 bits, from a checkpoint's config alone: 4, or 8
    where it is made for that; 0: none, as a `dtype` that is named asks for. Raises QuantisationUnsupported."""
    form = linear_form(raw, dtype, kernels)
    return form.bits if form.activations == "int8" else 0


def library(model: Model) -> str:
    """The library, with its version, that multiplies with linears of a model; empty for the engine's own kernels."""
    parts = every_part(model.weights) if isinstance(model, FusedDecoder) else ()
    return next((part.library for part in parts if isinstance(part, PackedLinear) and part.library), "")


def explain(raw: Mapping[str, Any], asked: str, dtype: torch.dtype, kernels: Kernels) -> str:
    """The form of a checkpoint's linears in words, from its config alone, for `asked` as the dtype and `dtype` as what
    is served; empty where there is nothing to say. Raises QuantisationUnsupported."""
    form = linear_form(raw, asked, kernels)
    if form.activations == "int8":
        return f"{form.bits}-bit linears with 8-bit activations in groups of {ACTIVATION_GROUP}"
    if form.codes != "groups" or form.bits != 4 or kernels.choose_four_bits is None:
        return ""
    choice = kernels.choose_four_bits(form.group, dtype)
    by = f"{choice.library} where it has their form" if choice.library else f"Triton, since {choice.reason}"
    return f"two codes of 4 bits in a byte, by {by}"
