"""The forms that a model's linears are served in, by what its checkpoint stores, the settings and the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_model import is_of_expert
from loraplex.adapters.base_weights.gguf import is_indexed, module_form, read_index
from loraplex.adapters.base_weights.grouped import INT8_GROUP, group_of
from loraplex.adapters.base_weights.schemes import read_scheme, stores_head
from loraplex.adapters.base_weights.tensors import QuantisationUnsupported
from loraplex.adapters.spec import TensorSlice
from loraplex.engine.model.base import ModelUnsupported
from loraplex.kernels.bundle import Kernels
from loraplex.kernels.weight_form import FLOATS, WeightForm, served_form


@dataclass(frozen=True, slots=True)
class Linears:
    """The forms of a model's linears."""

    format: str
    """A quantised checkpoint's, for example "gptq int4"; empty: its linears are floats."""
    stored: WeightForm
    """The form in which those are served that the checkpoint quantises. Linears of a GGUF file differ; this is the one
    of fewest bits."""
    quantise: bool
    """Linears that are stored as floats become codes of 8 bits."""
    stores_head: bool
    experts_alone: bool
    """Only routed experts are quantised."""
    backend: str
    rounds_activations: bool
    index: Mapping[str, TensorSlice] | None
    """The tensors of a GGUF file."""

    @property
    def form(self) -> WeightForm:
        """The form of the layers' linears, modules aside that a quantising tool left out."""
        return self._quantised(self.stored, INT8_GROUP)

    @property
    def have_codes(self) -> bool:
        return self.form.codes == "groups"

    @property
    def activations(self) -> str:
        """The numbers that x is rounded to for products of codes; empty: x keeps the model's dtype."""
        return self.form.activations if self.form.codes == "groups" else ""

    def form_of(self, modules: Iterable[str], inputs: int) -> WeightForm:
        """The form of modules, by their names in the checkpoint, that are multiplied as one."""
        form = self.stored
        if self.index is not None:
            stored = module_form(self.index, next(iter(modules)))
            form = FLOATS if stored is None else self._served(stored)
        elif self._are_left_out(modules):
            form = FLOATS
        return self._quantised(form, group_of(inputs))

    def _are_left_out(self, modules: Iterable[str]) -> bool:
        if self.experts_alone:
            return not all(map(is_of_expert, modules))
        return not self.stores_head and any(name.endswith(("lm_head", "embed_tokens")) for name in modules)

    def row_bytes(self, inputs: int, dtype: torch.dtype) -> int:
        """Memory of one output's weights of a layer's linear."""
        form = self._quantised(self.stored, group_of(inputs))
        return form.row_bytes(inputs, dtype.itemsize, self.backend)

    def _quantised(self, form: WeightForm, group: int) -> WeightForm:
        return WeightForm("groups", 8, group) if self.quantise and form.codes != "groups" else form

    def _served(self, stored: WeightForm) -> WeightForm:
        return served_form(stored, self.backend, round_activations=self.rounds_activations)


def plan_linears(
    model_dir: Path, fields: Mapping[str, Any], quantise: str, dtype: str, kernels: Kernels
) -> Linears:
    """`quantise` and `dtype` as `ModelSettings` has them. Raises ModelUnsupported."""
    # A dtype that is named asks for exact products.
    rounds = dtype == "auto"
    try:
        scheme = read_scheme(fields)
        stored = FLOATS if scheme is None else scheme.form
        return Linears(
            format="" if scheme is None else scheme.name,
            stored=served_form(stored, kernels.backend, round_activations=rounds),
            quantise=quantise != "none",
            stores_head=stores_head(fields),
            experts_alone=scheme is not None and scheme.experts_alone,
            backend=kernels.backend,
            rounds_activations=rounds,
            index=read_index(model_dir) if is_indexed(model_dir) else None,
        )
    except (QuantisationUnsupported, OSError) as error:
        raise ModelUnsupported(str(error)) from error
