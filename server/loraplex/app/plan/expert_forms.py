"""Sizes of adapters on the routed experts of a mixture, by the form in which they were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.adapters.admission.base_families import EXPERTS_SERVED
from loraplex.adapters.device.expert_tiles import ExpertKey
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.engine.model.outline import ModelOutline
from loraplex.engine.sizing import adapter_pages


class _Site(NamedTuple):
    """A site of an expert: how many times the adapter's rank it has, and which side all experts share."""

    site: str
    ranks: int = 1
    one_a: bool = False
    one_b: bool = False


_FORMS: Mapping[str, tuple[_Site, ...]] = {
    "none": (),
    "pairs": (_Site("gate"), _Site("up"), _Site("down")),
    "stacked": (_Site("gate_up"), _Site("down")),
    "doubled": (_Site("gate_up", ranks=2), _Site("down")),
    "shared": (_Site("gate", one_a=True), _Site("up", one_a=True), _Site("down", one_b=True)),
}
EXPERT_FORMS: Mapping[str, str] = {
    "pairs": "a pair for each linear of an expert",
    "stacked": "PEFT's target_parameters",
    "doubled": "PEFT's target_modules with gate_proj, up_proj and down_proj: gate_up of twice the rank",
    "shared": "Tinker's: one A of gate and of up, one B of down, for all experts of a layer",
}
"""The values of `--experts` beside "none", and what trains each form."""


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """An adapter of the planned rank and linears that is on all routed experts too, in this form."""

    name: str
    adapter: int
    """Bytes of the adapter in memory."""
    resident: int
    """Such adapters that fit into the device memory for adapters."""


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The routed experts of a mixture."""

    count: int
    """Experts of a layer."""
    layers: int
    weights: int
    """Bytes of all of them."""
    obstacle: str
    """Why adapters cannot be on them; empty where they can."""
    forms: tuple[ExpertForm, ...]


def obstacle_to_experts(model: ModelOutline) -> str:
    """Why adapters cannot be on routed experts of this model; empty where they can."""
    if not model.expert_groups:
        return f"a {model.model_type} has no routed experts that adapters can be on"
    if model.model_type not in EXPERTS_SERVED:
        return f"LoRA on the routed experts of a {model.model_type} is not served"
    return ""


def whole_adapter(layout: ArenaLayout, rank: int, sites: tuple[str, ...], form: str) -> int:
    """Bytes of an adapter of `rank` on these sites and, in a form of `EXPERT_FORMS`, on all routed experts of the
    layout; "none": on none."""
    keys: tuple[ExpertKey, ...] = ()
    if layout.experts is not None:
        count = layout.experts.num_experts
        keys = tuple(
            ExpertKey(layer, of.site, (of.ranks * rank,) * count, of.one_a, of.one_b)
            for layer in range(layout.num_layers)
            for of in _FORMS[form]
            if layout.experts.shape(layer, of.site) is not None
        )
    return adapter_pages(layout, rank, sites, keys) * layout.page_bytes


def plan_experts(
    model: ModelOutline,
    layout: ArenaLayout,
    rank: int,
    sites: tuple[str, ...],
    arena: tuple[int, int],
) -> ExpertPlan | None:
    """`arena`: pages and slots. None where the model has no routed experts."""
    if not model.expert_groups:
        return None
    group, (pages, slots) = model.expert_groups[0], arena
    obstacle = obstacle_to_experts(model)
    sizes = {} if obstacle else {form: whole_adapter(layout, rank, sites, form) for form in EXPERT_FORMS}
    return ExpertPlan(
        count=group.num_experts,
        layers=len(group.layers),
        weights=model.expert_bytes,
        obstacle=obstacle,
        forms=tuple(
            ExpertForm(form, size, min(pages * layout.page_bytes // size, slots))
            for form, size in sizes.items()
        ),
    )
