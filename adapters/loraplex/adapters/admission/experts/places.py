"""The tensors of an adapter that lie on routed experts, by the place that their names tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from loraplex.adapters.admission.module_names import ModuleNames
from loraplex.adapters.admission.tensor_names import AdapterTensors
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.expert_shapes import LEAVES
from loraplex.adapters.spec import BaseSpec, ExpertShape, ExpertSite, TensorSlice
from loraplex.adapters.store.files import shown

_NUMBER = "(0|[1-9][0-9]{0,5})"
_PLACE = re.compile(rf"(.*)layers\.{_NUMBER}\.(?:[a-z_]{{1,64}}\.)?experts((?:\.[A-Za-z0-9_]+)*)")
_STACKED = re.compile(r"(?:\.base_layer)*")
_OF_ONE = re.compile(rf"\.{_NUMBER}\.({'|'.join(LEAVES)})")
_OF_ALL = re.compile(rf"\.({'|'.join(LEAVES)})")
_MAX_DEPTH = 2
PARAMETERS = ("gate_up_proj", "down_proj")
"""Stacks of weights in transformers 5, in the order in which PEFT wraps them: the first lies deepest."""
FORMS = (
    "read are a pair for each expert (experts.0.gate_proj, or w1, w2, w3), PEFT's stacks (experts and "
    "experts.base_layer) and Tinker's three dimensions (experts.w1)"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """lora_A and lora_B of a module, and its path in the file."""

    path: str
    a: TensorSlice
    b: TensorSlice


@dataclass(slots=True)
class ExpertTensors:
    """The tensors of one file. A file has them in one of three forms."""

    pairs: dict[tuple[int, int, ExpertSite], Pair] = field(default_factory=dict)
    """Keyed by layer, expert and site."""
    stacks: dict[tuple[int, int], Pair] = field(default_factory=dict)
    """Keyed by layer and depth: a parameter that PEFT wrapped before another lies deeper."""
    shared: dict[tuple[int, ExpertSite], Pair] = field(default_factory=dict)
    """Keyed by layer and site. The first of their three dimensions is one for each expert, or one for all."""
    has_magnitudes: bool = False

    def modules(self) -> Iterator[str]:
        """Their paths in the file."""
        return (pair.path for form in (self.pairs, self.stacks, self.shared) for pair in form.values())


def take_experts(tensors: AdapterTensors, base: BaseSpec, names: ModuleNames) -> ExpertTensors:
    """Take what lies on routed experts of the base out of `tensors`.

    Raises AdapterRefused: unsupported_feature for forms that are not read (experts_layout, experts_bias),
    unexpected_tensor where a file mixes forms or names an expert that the base has not.
    """
    found = ExpertTensors()
    if not base.experts:
        return found
    paths = {module: names.in_base(module) for module in tensors.a}
    for module in [module for module, path in paths.items() if "experts" in path.split(".")]:
        place = _place(paths[module], base)
        if place is None:
            continue
        pair = Pair(module, tensors.a.pop(module), tensors.b.pop(module))
        found.has_magnitudes |= tensors.magnitudes.pop(module, None) is not None
        _sort(found, *place, pair)
    forms = [of for of in (found.pairs, found.stacks, found.shared) if of]
    if len(forms) > 1:
        _unexpected(next(found.modules()), "the file has experts in several forms")
    return found


def expert_paths(names_in_file: Iterable[str], base: BaseSpec, names: ModuleNames) -> Iterator[str]:
    """Every path by which a config may give experts a rank or an alpha: of the parameters that are stacks, and of the
    linears that tensors came for."""
    for shape in base.experts.values():
        yield from (f"{names.in_file(shape.module_path)}.{parameter}" for parameter in PARAMETERS)
    if base.experts:
        modules = {name.partition(".lora_")[0] for name in names_in_file if ".experts." in name}
        for module in modules:
            place = _place(names.in_base(module), base)
            if place is not None and (_OF_ONE.fullmatch(place[1]) or _OF_ALL.fullmatch(place[1])):
                yield module


def _place(path: str, base: BaseSpec) -> tuple[ExpertShape, str] | None:
    """The experts that a module of the base lies in, and the rest of its path. None: it lies in none."""
    found = _PLACE.fullmatch(path)
    shape = base.experts.get(int(found[2])) if found else None
    if found is None or shape is None or shape.module_path.partition("layers.")[0] != found[1]:
        return None
    return shape, found[3]


def _sort(into: ExpertTensors, shape: ExpertShape, rest: str, pair: Pair) -> None:
    if _STACKED.fullmatch(rest):
        depth = rest.count(".")
        if depth >= _MAX_DEPTH:
            _unsupported(
                "experts_bias",
                f"{shown(pair.path, 160)} is a third parameter of the experts that was trained, such as a bias: LoRA "
                f"on experts is read on {' and '.join(PARAMETERS)}",
            )
        stack = (shape.layer, depth)
        if stack in into.stacks:
            _unexpected(pair.path, f"{shown(into.stacks[stack].path, 160)} stands for the same experts")
        into.stacks[stack] = pair
        return
    if one := _OF_ONE.fullmatch(rest):
        expert = int(one[1])
        if expert >= shape.count:
            raise AdapterRefused(
                "base_mismatch",
                f"the base has no module {shown(pair.path, 160)}: its layer {shape.layer} has {shape.count} experts; "
                "the adapter is for another model",
            )
        key = (shape.layer, expert, LEAVES[one[2]])
        if key in into.pairs:
            _unexpected(pair.path, f"{shown(into.pairs[key].path, 160)} stands for the same expert")
        into.pairs[key] = pair
        return
    if every := _OF_ALL.fullmatch(rest):
        place = (shape.layer, LEAVES[every[1]])
        if place in into.shared:
            _unexpected(pair.path, f"{shown(into.shared[place].path, 160)} stands for the same experts")
        into.shared[place] = pair
        return
    _unsupported(
        "experts_layout",
        f"{shown(pair.path, 160)} is LoRA on experts in a form that is not read; {FORMS}",
    )


def _unexpected(module: str, why: str) -> NoReturn:
    raise AdapterRefused("unexpected_tensor", f"unexpected tensors for {shown(module, 160)}: {why}")


def _unsupported(feature: str, message: str) -> NoReturn:
    raise AdapterRefused("unsupported_feature", message, feature=feature)
