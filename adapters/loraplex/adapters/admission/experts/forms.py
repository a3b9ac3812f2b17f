"""The forms of LoRA on routed experts, read into one: a layer, a site, an expert or all of them, A, B and a scaling.

PEFT has saved the stacks of a layer's experts in two ways under the same names: releases before 0.19.1 took the last
two dimensions of most weights for [in, out]. Where a matrix is not square its shape tells; a square one lies as the
others of its file do; a file of square ones is told by its release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from loraplex.adapters.admission.experts.places import PARAMETERS, ExpertTensors, Pair
from loraplex.adapters.admission.peft_config import LoraSettings
from loraplex.adapters.admission.values import check_dtype
from loraplex.adapters.errors import AdapterRefused, RefusalCode
from loraplex.adapters.expert_shapes import LEAVES, SPELLINGS
from loraplex.adapters.spec import ExpertShape, ExpertSite, ExpertWeights, TensorSlice
from loraplex.adapters.store.files import shown

_NUMBER = re.compile(r"(?<=layers\.)[0-9]+(?=\.|$)")
_ORDER: tuple[ExpertSite, ...] = ("gate", "up", "gate_up", "down")
_RIGHT_SINCE = (0, 19, 1)
"""The release of PEFT from which on all stacks lie one way."""
_RIGHT_BEFORE = ((0, 18, 0), (0, 18, 1))
"""Releases that turn no stack of weights that are stored as [experts, in, out]. 0.19.0 turns those too."""
_OF_PARAMETER: Mapping[str, ExpertSite] = {"gate_up_proj": "gate_up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class ExpertForms:
    """The weights of a file by layer, site and expert, and their form in words."""

    weights: tuple[ExpertWeights, ...]
    form: str
    notes: tuple[str, ...] = ()
    """Warnings for the report."""


def read_experts(
    tensors: ExpertTensors, experts: Mapping[int, ExpertShape], settings: LoraSettings, max_rank: int
) -> ExpertForms:
    """Read the tensors that came for experts of a base. Nothing is read of the file: a slice of it stands for each
    matrix, and one of a whole stack for those of all experts.

    Raises AdapterRefused: unsupported_feature (experts_dora, experts_bias, experts_orientation, experts_layout),
    missing_tensor, unexpected_tensor, shape_mismatch, base_mismatch, rank_exceeds_max.
    """
    if tensors.has_magnitudes or settings.use_dora:
        _refuse(
            "unsupported_feature",
            "DoRA on the experts of a mixture is not served: it has a magnitude for each output of each expert, and "
            "the LoRA alone is not what was trained",
            feature="experts_dora",
        )
    biases = sorted(name for name in settings.target_parameters if name.endswith("_bias"))
    if biases:
        _refuse(
            "unsupported_feature",
            f"target_parameters names {shown(biases[0])}: LoRA on biases of experts is not served, and the rest of the "
            "adapter alone is not what was trained",
            feature="experts_bias",
        )
    reader = _Reader(tensors, experts, settings, max_rank)
    if tensors.pairs:
        return reader.pairs()
    return reader.stacks() if tensors.stacks else reader.shared()


@dataclass(frozen=True, slots=True)
class _Reader:
    tensors: ExpertTensors
    experts: Mapping[int, ExpertShape]
    settings: LoraSettings
    max_rank: int

    def pairs(self) -> ExpertForms:
        self._check_selected()
        found = []
        for (layer, expert, site), pair in self.tensors.pairs.items():
            _check_dimensions(pair, 2)
            if pair.a.shape[0] != pair.b.shape[1]:
                _refuse("shape_mismatch", f"{_told(pair)} do not make a product")
            _check_sizes(pair, _sizes(self.experts[layer], site), (pair.a.shape[1], pair.b.shape[0]))
            rank = pair.a.shape[0]
            scaling = self._scaling(pair.path, rank, site)
            found.append(ExpertWeights(layer, site, expert, rank, scaling, pair.a, pair.b))
        notes: tuple[str, ...] = ()
        if self.settings.use_rslora and any(weights.site != "down" for weights in found):
            notes = (
                "rank-stabilised LoRA with a pair an expert: PEFT 0.19 and later load gate and up as one LoRA of twice "
                "the rank, 1.41 times too strong; it counts as it was trained here",
            )
        return ExpertForms(_ordered(found), "a pair an expert", notes)

    def _check_selected(self) -> None:
        """A list of names means every expert of every layer that it selects."""
        selection, pairs = self.settings.selection, self.tensors.pairs
        leaves = {pair.path.rpartition(".")[2] for pair in pairs.values()}
        spelling = next(names for names in SPELLINGS if not leaves.isdisjoint(names))
        for layer, shape in self.experts.items():
            module = self._module(layer)
            for expert, leaf in ((e, leaf) for e in range(shape.count) for leaf in spelling):
                pair = pairs.get((layer, expert, LEAVES[leaf]))
                path = pair.path if pair is not None else f"{module}.{expert}.{leaf}"
                is_selected = selection.selects(path)
                if pair is not None and not is_selected:
                    _refuse(
                        "unexpected_tensor",
                        f"tensors came for {shown(path, 160)}, which the config does not name",
                    )
                if pair is None and is_selected and selection.exact:
                    _refuse(
                        "missing_tensor", f"the config names {shown(path, 160)}, but no tensors came for it"
                    )

    def stacks(self) -> ExpertForms:
        parameters = self._parameters()
        turned = self._are_turned(parameters)
        found = []
        for (layer, depth), pair in self.tensors.stacks.items():
            parameter, count = parameters[layer, depth], self.experts[layer].count
            site = _OF_PARAMETER[parameter]
            rank = pair.a.shape[0] // count
            if pair.a.shape[0] != rank * count or pair.b.shape[1] != pair.a.shape[0] or not rank:
                _refuse("shape_mismatch", f"{_told(pair)} are no stacks of {count} experts")
            self._check_count(pair, f"{self._module(layer)}.{parameter}", rank, count)
            scaling = self._scaling(f"{self._module(layer)}.{parameter}", rank, site)
            in_turns = self.experts[layer].in_turns and site == "gate_up"
            found.append(ExpertWeights(layer, site, -1, rank, scaling, pair.a, pair.b, turned, in_turns))
        turned_in_words = ", turned as PEFT before 0.19.1 has them" if turned else ""
        return ExpertForms(_ordered(found), f"stacks of all experts of a layer{turned_in_words}")

    def _check_count(self, pair: Pair, parameter: str, rank: int, count: int) -> None:
        """The rows of a stack tell the rank where the number of experts is known. Of another model's experts, they are
        the config's rank for each of those."""
        declared, _ = self.settings.rank_and_scaling(parameter, rank)
        others, rest = divmod(pair.a.shape[0], declared)
        if declared != rank and not rest:
            _refuse(
                "shape_mismatch",
                f"{_told(pair)} are stacks of {others} experts at the config's rank {declared}, and of rank {rank} for "
                f"the {count} experts of the base: the adapter is for another model, or the config names another rank",
            )

    def _parameters(self) -> dict[tuple[int, int], str]:
        """The parameter of each stack. PEFT wraps those that are named in their own order, each around the last: of
        two, gate_up_proj lies deeper; one alone lies on top."""
        found = {}
        for layer in self.experts:
            module = self._module(layer)
            named = [name for name in PARAMETERS if self._names(f"{module}.{name}")]
            for depth, parameter in enumerate(reversed(named)):
                if (layer, depth) not in self.tensors.stacks:
                    _refuse(
                        "missing_tensor",
                        f"target_parameters names {shown(f'{module}.{parameter}', 160)}, but no tensors came for it",
                    )
                found[layer, depth] = parameter
        for key, pair in self.tensors.stacks.items():
            if key not in found:
                _refuse(
                    "unexpected_tensor",
                    f"tensors came for {shown(pair.path, 160)}, a parameter of the experts that target_parameters does "
                    "not name",
                )
        return found

    def _names(self, parameter: str) -> bool:
        """Whether target_parameters names it, by its path or the end of it."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.settings.target_parameters)

    def _are_turned(self, parameters: Mapping[tuple[int, int], str]) -> bool:
        seen = set()
        for (layer, depth), pair in self.tensors.stacks.items():
            _check_dimensions(pair, 2)
            sizes = _sizes(self.experts[layer], _OF_PARAMETER[parameters[layer, depth]])
            have = (pair.a.shape[1], pair.b.shape[0])
            _check_sizes(pair, sizes, have if have != sizes[::-1] else sizes)
            if sizes[0] != sizes[1]:
                seen.add(have != sizes)
        if len(seen) > 1:
            first = next(iter(self.tensors.stacks.values()))
            _refuse(
                "unexpected_tensor",
                f"unexpected tensors for {shown(first.path, 160)}: some stacks of the file lie turned, and some do not",
            )
        release = self.settings.release or (0,)
        if (
            not seen
            and release < _RIGHT_SINCE
            and not (self._stores_inputs_first() and release in _RIGHT_BEFORE)
        ):
            _refuse(
                "unsupported_feature",
                "which way the stacked experts lie cannot be told: every matrix is square, PEFT before 0.19.1 turned "
                "them, and the config names no later release. Train it again with PEFT 0.19.1 or later, or merge it "
                "with the PEFT that it was trained with",
                feature="experts_orientation",
            )
        return seen == {True}

    def _stores_inputs_first(self) -> bool:
        """Whether the stacks of the base's weights are [experts, in, out], as gpt-oss has them."""
        return all(shape.in_turns for shape in self.experts.values())

    def shared(self) -> ExpertForms:
        found = []
        for (layer, site), pair in self.tensors.shared.items():
            shape = self.experts[layer]
            _check_dimensions(pair, 3)
            if {pair.a.shape[0], pair.b.shape[0]} - {1, shape.count} or pair.a.shape[1] != pair.b.shape[2]:
                _refuse(
                    "unsupported_feature",
                    f"{_told(pair)} are of no form of LoRA on {shape.count} experts that is read: each is [1 or "
                    "experts, ..., ...]",
                    feature="experts_layout",
                )
            _check_sizes(pair, _sizes(shape, site), (pair.a.shape[2], pair.b.shape[1]))
            rank = pair.a.shape[1]
            scaling = self._scaling(pair.path, rank, site)
            for expert in range(shape.count):
                a, b = _part(pair.a, expert), _part(pair.b, expert)
                found.append(ExpertWeights(layer, site, expert, rank, scaling, a, b))
        return ExpertForms(_ordered(found), "three dimensions, as Tinker saves them")

    def _module(self, layer: int) -> str:
        """The path of a layer's experts by the file's names."""
        before, experts, _ = next(self.tensors.modules()).partition(".experts")
        return _NUMBER.sub(str(layer), before, count=1) + experts

    def _scaling(self, path: str, rank: int, site: ExpertSite) -> float:
        # PEFT makes one LoRA of twice the rank of gate and up.
        most = self.max_rank * (2 if site == "gate_up" else 1)
        if rank > most:
            _refuse(
                "rank_exceeds_max",
                f"{shown(path, 160)} has rank {rank} an expert; this server accepts at most {most}",
            )
        declared, scaling = self.settings.rank_and_scaling(path, rank)
        if rank != declared:
            _refuse(
                "shape_mismatch",
                f"{shown(path, 160)} has rank {rank} an expert in the tensors and {declared} in the config",
            )
        return scaling


def _check_dimensions(pair: Pair, count: int) -> None:
    check_dtype(pair.path, "lora_A", pair.a)
    check_dtype(pair.path, "lora_B", pair.b)
    if len(pair.a.shape) == len(pair.b.shape) == count:
        if 0 in (*pair.a.shape, *pair.b.shape):
            _refuse("shape_mismatch", f"{_told(pair)} are empty")
        return
    _refuse(
        "unsupported_feature",
        f"{_told(pair)} are of no form of LoRA on experts that is read: matrices of {count} dimensions are",
        feature="experts_layout",
    )


def _check_sizes(pair: Pair, sizes: tuple[int, int], have: tuple[int, int]) -> None:
    if sizes != have:
        _refuse(
            "base_mismatch",
            f"{shown(pair.path, 160)} is {sizes[0]} -> {sizes[1]} in the base, {have[0]} -> {have[1]} in the adapter: "
            "the adapter is for another model",
        )


def _sizes(shape: ExpertShape, site: ExpertSite) -> tuple[int, int]:
    """in_features and out_features."""
    if site == "down":
        return shape.inner_size, shape.hidden_size
    return shape.hidden_size, shape.inner_size * (2 if site == "gate_up" else 1)


def _part(tensor: TensorSlice, expert: int) -> TensorSlice:
    """The matrix of one expert; that of all where there is one."""
    count, *sizes = tensor.shape
    each = (tensor.end - tensor.start) // count
    start = tensor.start + each * (expert if count > 1 else 0)
    return TensorSlice(tensor.dtype, tuple(sizes), start, start + each)


def _ordered(found: Iterable[ExpertWeights]) -> tuple[ExpertWeights, ...]:
    return tuple(sorted(found, key=lambda w: (w.layer, _ORDER.index(w.site), w.expert)))


def _told(pair: Pair) -> str:
    return f"{shown(pair.path, 160)}: lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)}"


def _refuse(code: RefusalCode, message: str, *, feature: str | None = None) -> NoReturn:
    raise AdapterRefused(code, message, feature=feature)
