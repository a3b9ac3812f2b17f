"""Whether the modules of an adapter's tensors, those that its config names, and those of the base are the same.

The tensors say what was trained. A name in the config that the base lacks only warns: PEFT matches names by their ends,
asks that one of them fits, and saves the whole list. A name that the base has, but no tensors came for, is refused:
something is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NoReturn

from loraplex.adapters.admission.base_model import BaseTensor, is_of_expert, locate_module_weights
from loraplex.adapters.admission.config.patterns import ends, suffixes
from loraplex.adapters.admission.config.selection import WEIGHT
from loraplex.adapters.admission.experts.checks import experts_not_served
from loraplex.adapters.admission.faults import Faults
from loraplex.adapters.admission.model_parts import ModelParts, is_of_multimodal, parts_of
from loraplex.adapters.admission.module_names import PREFIX, ModuleNames
from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.admission.tensor_names import AdapterTensors
from loraplex.adapters.admission.values import check_dtype
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.expert_shapes import LEAVES
from loraplex.adapters.spec import BaseSpec, SiteShape, SiteWeights, TensorSlice
from loraplex.adapters.store.files import shown
from loraplex.adapters.store.tensors import NUMPY_DTYPES
from loraplex.kernels.lora.site_groups import EMBEDDING, HEAD, LAYER_SITES, ROUTED_SITES, SITES

_MAX_TOLD = 8
_FUSED = frozenset({"in_proj_qkvz", "in_proj_ba"})
"""Linears that hold several of a delta net's. Tools order their rows in several ways."""
_LORA, _BASE_LAYER = ".lora_", ".base_layer."
_SIDES = {"A": 1, "B": 0}
"""The dimension that a matrix has of its linear's weight."""
_UNTIED = (
    "ensure_weight_tying gives lm_head the embedding's adapter, but no tensors came for lm_head. PEFT trains lm_head "
    "without LoRA in an adapter that is added beside another, and where an expression in target_modules does not fit "
    "the embedding's bare name: if it did here, set ensure_weight_tying to false in adapter_config.json"
)


def leave_out_parts(
    header: Mapping[str, TensorSlice], base: BaseSpec, names: ModuleNames, *, thorough: bool
) -> tuple[dict[str, TensorSlice], Counter[str]]:
    """The tensors without those for parts of the base that no text goes through, and the numbers of these by part:
    without them the adapter computes the same. `thorough` also looks each up in the base, whose headers are read.

    Raises AdapterRefused: for a module that the base has not (base_mismatch), or not in this size (shape_mismatch), and
    where nothing else came (no_effect); BaseModelInvalid.
    """
    parts, counts = parts_of(base.multimodal), Counter[str]()
    left: dict[str, TensorSlice] = {}
    for_parts: dict[str, TensorSlice] = {}
    for name, tensor in header.items():
        path = names.in_base(name.removeprefix(PREFIX))
        part = parts.part_of(path)
        if part is None:
            left[name] = tensor
        else:
            for_parts[path] = tensor
            counts[f"model.{part}"] += 1
    if thorough and for_parts:
        _check_parts(for_parts, locate_module_weights(base), parts)
    if for_parts and not any(_LORA in name for name in left):
        raise AdapterRefused(
            "no_effect",
            f"all LoRA is on {_list(sorted(counts))} of the base, which only images and sounds go through: they are "
            "not served, and on text the adapter would answer as the base does",
        )
    return left, counts


def told_left_out(counts: Mapping[str, int]) -> Iterable[str]:
    """Warnings for the report."""
    for part, count in counts.items():
        yield (
            f"{count} tensors of {part} were left out: only images and sounds go through it, which are not served, and "
            "on text they change nothing"
        )


def _check_parts(
    tensors: Mapping[str, TensorSlice], known: Mapping[str, BaseTensor], parts: ModelParts
) -> None:
    """`tensors`: by their names in the base."""
    modules = {name.rpartition(".")[0] for name in known}
    there = {parts.part_of(name) for name in known}
    for path, tensor in tensors.items():
        module, is_lora, kind = path.replace(_BASE_LAYER, ".").partition(_LORA)
        if parts.is_converted and parts.part_of(path) in there:
            continue
        if not (module in modules if is_lora else module in known):
            raise AdapterRefused("base_mismatch", f"the base has no module {shown(module, 160)}")
        weight = known.get(f"{module}.weight" if is_lora else module)
        if weight is None or weight.tensor.dtype not in NUMPY_DTYPES:
            continue
        size, given = weight.tensor.shape, tensor.shape
        side = _SIDES.get(kind[:1])
        if is_lora and (side is None or len(size) != 2 or len(given) != 2):
            continue
        if (given != size) if side is None else (given[side] != size[side]):
            raise AdapterRefused(
                "shape_mismatch",
                f"{shown(path, 160)} {list(given)} does not fit the base's weight {list(size)}",
            )


def are_in_parts(targets: Iterable[str], base: BaseSpec, names: ModuleNames, *, thorough: bool) -> bool:
    """Whether the modules of the base that PEFT finds by the ends of their paths lie in parts that no text goes
    through. Not `thorough`: whether the base has such parts. Raises BaseModelInvalid."""
    parts = parts_of(base.multimodal)
    if not parts.others or not thorough:
        return bool(parts.others)
    modules = {module for name in locate_module_weights(base) for module in _begins(name)}
    for end in map(names.in_base, targets):
        found = [module for module in modules if module.endswith(end)]
        if not found or any(parts.part_of(module) is None for module in found):
            return False
    return True


def check_modules(
    tensors: AdapterTensors, by_path: Mapping[str, SiteShape], base: BaseSpec, names: ModuleNames
) -> None:
    """Refuse modules that are not served, once for each kind of them. Raises AdapterRefused (unsupported_feature,
    base_mismatch), BaseModelInvalid."""
    foreign = [module for module in tensors.a if module not in by_path]
    if not foreign:
        return
    known, parts = locate_module_weights(base), parts_of(base.multimodal)
    mixture = any(is_of_expert(name) for name in known)
    kinds: dict[str | None, list[str]] = {}
    for module in foreign:
        kinds.setdefault(_feature(names.in_base(module), known, parts, mixture), []).append(module)
    faults = Faults()
    for feature, modules in kinds.items():
        which = shown(modules[0], 160) + (f" and {len(modules) - 1} more" if len(modules) > 1 else "")
        if feature is None:
            faults.add("base_mismatch", _not_there(modules, which, names, parts))
        else:
            faults.add("unsupported_feature", _not_served(feature, which, base), feature=feature)
    faults.raise_any()


def _not_there(modules: list[str], which: str, names: ModuleNames, parts: ModelParts) -> str:
    """The refusal of modules that the base, which has these parts, has not."""
    if not parts.others and all(is_of_multimodal(names.in_base(module)) for module in modules):
        return (
            f"the base has no module {which}: the adapter was trained on a model that also sees or hears, and the base "
            "is a language model alone. Serve the whole checkpoint that it was trained on, whose text is served and "
            "where LoRA on these parts is left out, unless the server is set to refuse it; or train the linears of the "
            "language model alone"
        )
    return f"the base has no module {which}: the adapter is for another model"


def check_tying(
    settings: LoraSettings, tensors: AdapterTensors, base: BaseSpec, names: ModuleNames
) -> list[str]:
    """Check ensure_weight_tying for the report. Raises AdapterRefused("unsupported_feature") if it makes one
    adapter of the head's and the embedding's."""
    if not settings.ties_weights or has_tied_head(settings, tensors, base):
        return []
    head = locate_module_weights(base).get(f"{HEAD}.weight") if names.in_file(HEAD) in tensors.a else None
    if head is not None and head.stored_name != f"{HEAD}.weight":
        raise AdapterRefused(
            "unsupported_feature",
            f"ensure_weight_tying: the base ties {HEAD} to its embedding, so the LoRA on {HEAD} was trained as one "
            "with a LoRA on the embedding; on the head alone it does not compute what was trained",
            feature="ensure_weight_tying",
        )
    return ["ensure_weight_tying is without effect: nothing that the base ties was trained"]


def has_tied_head(settings: LoraSettings, tensors: AdapterTensors, base: BaseSpec) -> bool:
    """Whether PEFT puts the embedding's adapter on the head too."""
    return settings.ties_weights and base.tied_head and bool(tensors.looked_up)


def check_embedding(
    tensors: AdapterTensors, by_path: Mapping[str, SiteShape], settings: LoraSettings
) -> None:
    """Raises AdapterRefused for an embedding's tensors on a linear, a linear's on the embedding, and DoRA on it."""
    for module in tensors.a:
        is_embedding = by_path[module].site == EMBEDDING
        if is_embedding != (module in tensors.looked_up):
            kind = "lora_A and lora_B" if is_embedding else "lora_embedding_A and lora_embedding_B"
            raise AdapterRefused(
                "unexpected_tensor",
                f"{module} has {kind}, which PEFT gives to {'linears' if is_embedding else 'embeddings'} alone",
            )
        if is_embedding and settings.use_dora:
            raise AdapterRefused(
                "unsupported_feature",
                f"DoRA on {module} is not served: it scales the base's embedding by norms over the whole vocabulary, "
                "and the rest of the adapter alone is not what was trained",
                feature="use_dora",
            )


def check_coverage(
    tensors: AdapterTensors,
    by_path: Mapping[str, SiteShape],
    settings: LoraSettings,
    base: BaseSpec,
    names: ModuleNames,
    *,
    thorough: bool,
) -> list[str]:
    """Compare the modules that the config names with those that tensors came for. Returns warnings for the report.
    `thorough` also looks for names among the base's other modules, for which its headers are read.

    Raises AdapterRefused (unexpected_tensor, missing_tensor), BaseModelInvalid."""
    selection = settings.selection
    selected = {module for module in by_path if selection.selects(module)}
    if has_tied_head(settings, tensors, base):
        tied = {path for path, shape in by_path.items() if shape.site == HEAD}
        if not tied <= tensors.a.keys():
            raise AdapterRefused("missing_tensor", _UNTIED)
        selected |= tied
    for module in tensors.a:
        if module not in selected:
            raise AdapterRefused(
                "unexpected_tensor", f"tensors came for {module}, which the config does not name"
            )
    for module in by_path:
        if selection.exact and module in selected and module not in tensors.a:
            raise AdapterRefused("missing_tensor", f"the config names {module}, but no tensors came for it")
    notes = []
    beyond = [index for index in sorted(selection.layers or ()) if index >= base.num_layers]
    if beyond:
        notes.append(
            f"layers_to_transform names layer {_list(str(index) for index in beyond)}, but the base has "
            f"{base.num_layers}; tensors came for all of its own that are named"
        )
    named = {suffix for module in by_path for suffix in suffixes(module)} | (
        LEAVES.keys() if base.experts else set()
    )
    unused = sorted(target for target in selection.targets or () if target not in named)
    if unused and thorough:
        _refuse_missing(unused, base, names)
    weights = {name.removesuffix(WEIGHT) for name in settings.target_parameters}
    for config_field, those in (
        ("target_modules", [target for target in unused if target not in weights]),
        ("target_parameters", [target + WEIGHT for target in unused if target in weights]),
    ):
        if those:
            notes.append(
                f"{config_field} names {_list(map(shown, those))}, which the base's language model has no "
                "linear of; the tensors tell what was trained"
            )
    return notes


def note_bare_layers(
    tensors: AdapterTensors,
    on_experts: Iterable[int],
    settings: LoraSettings,
    base: BaseSpec,
    names: ModuleNames,
) -> list[str]:
    """Return a warning where target_modules fits no linear of some layers, as the names of attention's linears do on a
    hybrid. Nothing is said where the config chooses layers. `on_experts`: the layers with LoRA on routed experts."""
    selection = settings.selection
    chosen = selection.targets is None or selection.layers is not None or not selection.exact
    named = (*(selection.targets or ()), *selection.excluded)
    if chosen or any(part.isdecimal() for name in named for part in name.split(".")):
        return []
    linears: dict[int, list[SiteShape]] = {}
    for shape in base.sites.values():
        if shape.site in LAYER_SITES:
            linears.setdefault(shape.layer, []).append(shape)
    trained = {
        layer
        for layer, shapes in linears.items()
        if any(names.in_file(shape.module_path) in tensors.a for shape in shapes)
    } | set(on_experts)
    bare = sorted(linears.keys() - trained)
    if not trained or not bare:
        return []
    lacking = dict.fromkeys(shape.site for layer in bare for shape in linears[layer])
    return [
        f"{len(bare)} of {len(linears)} layers have no LoRA ({_list(map(str, bare))}): target_modules names none of "
        f"their linears, which are {', '.join(name for name in LAYER_SITES if name in lacking)}"
    ]


def _refuse_missing(unused: list[str], base: BaseSpec, names: ModuleNames) -> None:
    """Refuse names of modules of the base that are no linears with LoRA here. Experts are one tensor for PEFT with a
    transformers of today, which has no modules of the names that the checkpoint gives them."""
    parts = parts_of(base.multimodal)
    others = {
        suffix
        for name in locate_module_weights(base)
        if parts.part_of(name) is None and not is_of_expert(name)
        for suffix in ends(names.in_file(name).rpartition(".")[0])
    }
    for target in unused:
        if target in others:
            raise AdapterRefused(
                "missing_tensor", f"target_modules names {shown(target)}, but no tensors came for it"
            )


def check_magnitudes(tensors: AdapterTensors, by_path: dict[str, SiteShape], settings: LoraSettings) -> None:
    for module in tensors.a:
        magnitude = tensors.magnitudes.get(module)
        if magnitude is None:
            if settings.use_dora:
                raise AdapterRefused(
                    "missing_tensor", f"use_dora is set, but {module} has no lora_magnitude_vector"
                )
            continue
        if not settings.use_dora:
            raise AdapterRefused(
                "unexpected_tensor", f"{module} has a lora_magnitude_vector, but use_dora is not set"
            )
        check_dtype(module, "lora_magnitude_vector", magnitude)
        if magnitude.shape != (by_path[module].out_features,):
            raise AdapterRefused(
                "shape_mismatch",
                f"{module}: lora_magnitude_vector is {list(magnitude.shape)}, not one for each of the "
                f"{by_path[module].out_features} outputs",
            )


def check_shapes(
    tensors: AdapterTensors, by_path: dict[str, SiteShape], settings: LoraSettings, max_rank: int
) -> tuple[SiteWeights, ...]:
    sites: list[SiteWeights] = []
    widths: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    misfit: SiteWeights | None = None
    for module, a in tensors.a.items():
        b, shape = tensors.b[module], by_path[module]
        check_dtype(module, "lora_A", a)
        check_dtype(module, "lora_B", b)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise AdapterRefused(
                "shape_mismatch",
                f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} do not make a product",
            )
        rank = a.shape[0]
        if rank > max_rank:
            raise AdapterRefused(
                "rank_exceeds_max", f"{module} has rank {rank}; this server accepts at most {max_rank}"
            )
        declared, scaling = settings.rank_and_scaling(settings.matched_path(module), rank)
        if rank != declared:
            raise AdapterRefused(
                "shape_mismatch", f"{module} has rank {rank} in the tensors and {declared} in the config"
            )
        site = SiteWeights(shape.layer, shape.site, rank, scaling, a, b, tensors.magnitudes.get(module))
        found, wanted = (a.shape[1], b.shape[0]), (shape.in_features, shape.out_features)
        widths.setdefault(shape.site, []).append((found, wanted))
        if misfit is None and found != wanted:
            misfit = site
        sites.append(site)
    if misfit is not None:
        _refuse_misfit(misfit, widths[misfit.site], by_path)
    return tuple(sorted(sites, key=lambda s: (s.layer, SITES.index(s.site))))


def _refuse_misfit(
    misfit: SiteWeights, widths: list[tuple[tuple[int, int], tuple[int, int]]], by_path: dict[str, SiteShape]
) -> NoReturn:
    shape = next(s for s in by_path.values() if (s.layer, s.site) == (misfit.layer, misfit.site))
    found, wanted = (misfit.a.shape[1], misfit.b.shape[0]), (shape.in_features, shape.out_features)
    what = f"{shape.module_path} is {wanted[0]} -> {wanted[1]} in the base, {found[0]} -> {found[1]} in the adapter"
    # Of one size in every layer, or right in none: another architecture. Wrong in one place: a broken file.
    if len({size for size, _ in widths}) == 1 or all(size != own for size, own in widths):
        raise AdapterRefused("base_mismatch", f"{what}: the adapter is for another model")
    raise AdapterRefused("shape_mismatch", what)


def _feature(module: str, known: Mapping[str, BaseTensor], parts: ModelParts, mixture: bool) -> str | None:
    """The feature that an unserved module belongs to; None if the base has no such module."""
    if parts.part_of(module) is not None:
        return "other_towers"
    if mixture and is_of_expert(module):
        return "experts"
    before, _, leaf = module.rpartition(".")
    if f"{module}.weight" in known or (leaf in _FUSED and f"{before}.in_proj_qkv.weight" in known):
        return leaf
    return None


def _not_served(feature: str, which: str, base: BaseSpec) -> str:
    sites = {site for _, site in base.sites}
    served = ", ".join(name for name in SITES if name in sites)
    if feature == "experts":
        return experts_not_served(which, base)
    if feature == "other_towers":
        return (
            f"LoRA on another part than the language model ({which}) is not served with --adapter-towers refuse; in "
            f"the language model it is served on {served}"
        )
    if feature in _FUSED:
        return (
            f"LoRA on {which} is not served: the base has in_proj_qkv, in_proj_z, in_proj_b and in_proj_a in its "
            "place, and the order of its rows is not known (by kind, or by key head); save the adapter on those four"
        )
    if feature in SITES and feature not in ROUTED_SITES:
        return (
            f"LoRA on {which} is not served: {feature} is served where a layer computes with one of that name"
        )
    return f"LoRA on {which} is not served; on this base it is served on {served}"


def _begins(path: str) -> Iterable[str]:
    """ "a.b", then "a", of "a.b.c"."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _list(names: Iterable[str]) -> str:
    told = list(names)
    return ", ".join(told[:_MAX_TOLD]) + (
        f" and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else ""
    )
