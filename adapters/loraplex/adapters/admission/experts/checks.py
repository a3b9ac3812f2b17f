"""Checks of LoRA on a mixture's experts: what is read, what is refused, and warnings for the report of a version."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.admission.base_families import EXPERTS_SERVED
from loraplex.adapters.admission.experts.forms import ExpertForms, read_experts
from loraplex.adapters.admission.experts.places import FORMS, PARAMETERS, ExpertTensors
from loraplex.adapters.admission.module_names import ModuleNames
from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.admission.safetensors_header import (
    ADAPTER_LIMITS,
    LENGTH_BYTES,
    adapter_limits,
    check_count,
    check_length,
    read_header,
)
from loraplex.adapters.admission.tensor_names import AdapterTensors
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.expert_shapes import LEAVES, SPELLINGS
from loraplex.adapters.spec import BaseSpec, ExpertWeights, SiteShape, TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.kernels.lora.site_groups import LAYER_SITES, ROUTED_SITES, SITES

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value")
"""Linears of the attention, which no mixture has among its experts."""
_LINEARS = frozenset(LAYER_SITES) - ROUTED_SITES
"""Sites of layers that are linears in transformers too, as routers are not."""
_OUTSIDE = "The adapter changes what lies outside of them alone"
_TRAINED_BY = 'target_parameters=["experts.gate_up_proj", "experts.down_proj"]'


def read_upload(path: Path, base: BaseSpec) -> dict[str, TensorSlice]:
    """`read_header` with the limits of the base; what lies outside of its experts is held to those of any upload."""
    header = read_header(path, adapter_limits(base))
    others = sum("experts" not in name.split(".") for name in header)
    check_count(others, ADAPTER_LIMITS)
    if 0 < others == len(header):
        check_length(next(iter(header.values())).start - LENGTH_BYTES, ADAPTER_LIMITS)
    return header


@dataclass(frozen=True, slots=True)
class ExpertsRead:
    """LoRA on the experts of a base, the sentence about it for the report of a version, and warnings."""

    weights: tuple[ExpertWeights, ...] = ()
    told: str = ""
    notes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the sites, such as "experts.down"."""
        return tuple(dict.fromkeys(f"experts.{weights.site}" for weights in self.weights))

    @property
    def ranks(self) -> set[int]:
        return {weights.rank for weights in self.weights}

    @property
    def num_parameters(self) -> int:
        """Numbers in the file: what experts share counts once."""
        tensors = {tensor.start: tensor for weights in self.weights for tensor in (weights.a, weights.b)}
        return sum(math.prod(tensor.shape) for tensor in tensors.values())

    def rank_by_module(self, base: BaseSpec) -> Iterator[tuple[str, int]]:
        """The largest rank of an expert of each site of a layer, by a path such as "model.layers.0.mlp.experts.up"."""
        found: dict[str, int] = {}
        for weights in self.weights:
            path = f"{base.experts[weights.layer].module_path}.{weights.site}"
            found[path] = max(found.get(path, 0), weights.rank)
        yield from found.items()


def check_experts(
    experts: ExpertTensors,
    tensors: AdapterTensors,
    by_path: Mapping[str, SiteShape],
    base: BaseSpec,
    settings: LoraSettings | None,
    max_rank: int,
) -> ExpertsRead:
    """Read what lies on experts, where the config can be read. Where the base's are not served they are refused: by the
    name of what could never be read, else with the form that was found. Raises AdapterRefused."""
    modules = list(experts.modules())
    if not modules:
        return ExpertsRead()
    is_served = base.model_type in EXPERTS_SERVED
    found = ""
    try:
        if settings is not None:
            forms = read_experts(experts, base.experts, settings, max_rank)
            notes = (*forms.notes, *_left_out(tensors, by_path, settings))
            if is_served:
                return ExpertsRead(forms.weights, _told(forms), notes)
            found = "; ".join(["", f"the file is whole, and has {_told(forms)}", *notes])
    except AdapterRefused as refusal:
        if is_served or refusal.feature is not None:
            raise
        found = f"; served or not, {refusal.message}"
    if is_served:
        return ExpertsRead()
    which = shown(modules[0], 160) + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
    raise AdapterRefused(
        "unsupported_feature", f"{experts_not_served(which, base)}{found}", feature="experts"
    )


def experts_not_served(which: str, base: BaseSpec) -> str:
    """The refusal of LoRA on routed experts, with what is served instead."""
    if base.model_type in EXPERTS_SERVED:
        return (
            f"LoRA on the experts of a mixture ({which}) is not served by this name: it has no number of an expert, or "
            f"the layer has no experts; {FORMS}"
        )
    sites = {site for _, site in base.sites}
    served = ", ".join(name for name in SITES if name in sites)
    attention = ", ".join(f'"{name}"' for name in _ATTENTION if name in sites)
    return (
        f"LoRA on the experts of a mixture ({which}) is not served; on this base LoRA is served outside of the "
        f"experts, on {served}. PEFT leaves the experts out where target_modules names linears of the attention "
        f"alone: target_modules=[{attention}]"
    )


def _told(forms: ExpertForms) -> str:
    ranks = sorted({weights.rank for weights in forms.weights})
    layers = len({weights.layer for weights in forms.weights})
    sites = ", ".join(dict.fromkeys(weights.site for weights in forms.weights))
    return f"{forms.form}: {sites} of {layers} layers, rank {' and '.join(map(str, ranks))} an expert"


def note_untrained(
    settings: LoraSettings,
    base: BaseSpec,
    names: ModuleNames,
    tensors: AdapterTensors,
    by_path: Mapping[str, SiteShape],
) -> list[str]:
    """Warnings about an adapter without tensors for experts, whose config names them or which is on every linear
    outside of them. Raises AdapterRefused("missing_tensor") where target_parameters names them."""
    if not base.experts:
        return []
    parameters = [name for name in settings.target_parameters if name.rpartition(".")[2] in PARAMETERS]
    if parameters:
        raise AdapterRefused(
            "missing_tensor",
            f"target_parameters names {shown(parameters[0])}, but no tensors came for the experts of any layer",
        )
    is_served = base.model_type in EXPERTS_SERVED
    named = _names_experts(settings, base, names)
    if named is None:
        linears = {path for path, shape in by_path.items() if shape.site in _LINEARS}
        if not is_served or not linears <= tensors.a.keys():
            return []
        return [
            "the experts have no LoRA, and every linear outside of them has: with all-linear, PEFT leaves experts out "
            f"that are parameters. {_OUTSIDE}. If they were to be trained, {_TRAINED_BY} does so"
        ]
    told = f"the experts were not trained: {named}, and no tensors came for them. {_OUTSIDE}"
    if not is_served:
        return [f"{told}. LoRA on the experts of a {base.model_type} would be refused: it is not served"]
    return [
        f"{told}. PEFT before 0.19 leaves out experts that transformers has in stacks, and later releases do so in "
        f"some families; {_TRAINED_BY} trains them"
    ]


def _left_out(
    tensors: AdapterTensors, by_path: Mapping[str, SiteShape], settings: LoraSettings
) -> Iterator[str]:
    """The linears that PEFT does not train where it moves the names of target_modules to parameters of experts."""
    left = [path for path, shape in by_path.items() if shape.site in SPELLINGS[0] and path not in tensors.a]
    if left and not set(PARAMETERS).isdisjoint(settings.target_parameters):
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield (
            f"PEFT left the shared experts and dense layers out of the training ({left[0]}{more}): it takes gate_proj, "
            "up_proj and down_proj of target_modules for the stacked experts alone"
        )


def _names_experts(settings: LoraSettings, base: BaseSpec, names: ModuleNames) -> str | None:
    """The part of the config that would have trained experts, each in a module of its own."""
    selection = settings.selection
    if not selection.exact:
        return None
    if selection.targets is None:
        return 'target_modules is "all-linear"'
    shape = next(iter(base.experts.values()))
    path = names.in_file(shape.module_path)
    leaves = [leaf for leaf in LEAVES if selection.selects(f"{path}.0.{leaf}")]
    return f"target_modules names {', '.join(leaves)}" if leaves else None
