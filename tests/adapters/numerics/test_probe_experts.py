"""Forced routing through kernels and tables that serve: a sound adapter on routed experts is equal to the reference,
and faults that are planted in its image, its tables or the reading of its file are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import build_image
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.numerics import TOLERANCE, NumbersVerdict, SiteOutputs
from loraplex.adapters.spec import AdapterSpec, ExpertShape, ExpertWeights
from loraplex.engine.execution.riders.expert_probe import measure_experts
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.lora.dispatch import GRANULE_BYTES
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.whole_reads import check_numbers
from support.kernels.recurrent import INTERPRETED
from support.models.expert_adapters import Arrays, pairs, plain_base, read, stacks, three_dimensions, write

HIDDEN, INNER, COUNT, NUM_LAYERS = 64, 48, 6, 3
EXPERTS = {at: ExpertShape(at, f"model.layers.{at}.mlp.experts", COUNT, HIDDEN, INNER) for at in (0, 2)}
SQUARE = {0: ExpertShape(0, "model.layers.0.mlp.experts", COUNT, HIDDEN, HIDDEN // 2)}
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": []}
SLOT = 1
CPU = torch.device("cpu")


def saved(form: str, rank: int, folder: Path, experts: dict[int, ExpertShape] = EXPERTS) -> Path:
    """With ranks that differ where the form has it: gate and up of `doubled` have twice the rank of down."""
    fields: dict[str, Any] = {}
    if form == "pairs":
        tensors = pairs(experts, rank)
    elif form == "three dimensions":
        tensors = three_dimensions(experts, rank)
    elif form == "turned":
        tensors, fields = stacks(experts, rank, turned=True), BOTH | {"peft_version": "0.18.1"}
    elif form == "doubled":
        deep, top = stacks(experts, 2 * rank), stacks(experts, rank)
        tensors = {name: (deep if "base_layer" in name else top)[name] for name in top}
        key = r".*\.gate_up_proj"
        fields = BOTH | {"rank_pattern": {key: 2 * rank}, "alpha_pattern": {key: 16}, "use_rslora": True}
    else:
        tensors, fields = stacks(experts, rank), BOTH
    tensors = {name: array * np.float32(0.1) for name, array in tensors.items()}
    return write(folder, tensors, r=rank, **fields)


def arena_of(
    weights: tuple[ExpertWeights, ...],
    path: Path,
    dtype: torch.dtype,
    kernels: str = "torch",
    experts: dict[int, ExpertShape] = EXPERTS,
) -> AdapterArena:
    """An arena that has it in SLOT, and another adapter before it."""
    shape = experts[0]
    i, h, layers = shape.inner_size, shape.hidden_size, tuple(experts)
    columns = ((0, i), (i, 2 * i), (0, 2 * i))
    groups = (
        ExpertSiteGroup("experts.gate_up", ("gate", "up", "gate_up"), h, columns, COUNT, layers),
        ExpertSiteGroup("experts.down", ("down",), i, ((0, h),), COUNT, layers),
    )
    others = (SiteGroup("o", ("o_proj",), h, (h,)),)
    layout = ArenaLayout(others, NUM_LAYERS, dtype, max_rank=64, experts=groups)
    spec = AdapterSpec("0" * 64, max(w.rank for w in weights), (), path.stat().st_size, (), experts=weights)
    image = build_image(spec, path, layout)
    arena = AdapterArena(layout, 2 * image.num_pages, 3, resolve_kernels(kernels, CPU))
    if kernels == "triton":
        arena.device_lora(64, 8)
    pages = tuple(range(2 * image.num_pages))
    arena.write(image, SLOT - 1, pages[: image.num_pages])
    arena.write(image, SLOT, pages[image.num_pages :])
    image.release()
    return arena


def measured(arena: AdapterArena) -> SiteOutputs:
    found = measure_experts(arena, SLOT, range(NUM_LAYERS), arena.layout.dtype, CPU)
    return SiteOutputs(
        str(arena.layout.dtype).removeprefix("torch."),
        (),
        b"",
        b"",
        expert_sites=found.sites,
        expert_sums=found.sums.numpy().tobytes(),
        expert_finite=bytes(found.finite.tolist()),
    )


def test_a_probe_leaves_the_pass_of_the_steps_alone(tmp_path: Path) -> None:
    """Most steps are like the one before, and cost nothing to prepare."""
    path = write(tmp_path, pairs(EXPERTS, 2), r=2) / "adapter_model.safetensors"
    arena = arena_of(weights_of(tmp_path), path, torch.float32)
    step = [(SLOT - 1, 0, 3)]
    made = arena.expert_pass(step, 4)
    assert made is not None
    assert measured(arena).expert_sites
    assert arena.expert_pass(step, 4) is made


def judged(folder: Path, arena: AdapterArena, experts: dict[int, ExpertShape] = EXPERTS) -> NumbersVerdict:
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    return check_numbers(*files, plain_base(experts), measured(arena))


def weights_of(folder: Path, experts: dict[int, ExpertShape] = EXPERTS) -> tuple[ExpertWeights, ...]:
    return read(folder, experts, max_rank=64).weights


@pytest.mark.parametrize(
    ("form", "rank"),
    [
        *((form, rank) for form in ("pairs", "doubled") for rank in (1, 2, 3, 8, 13, 32, 64)),
        *((form, 5) for form in ("stacks", "turned", "three dimensions")),
    ],
)
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("torch", torch.float32),
        ("torch", torch.bfloat16),
        ("numba", torch.float32),
        ("numba", torch.bfloat16),
        pytest.param("triton", torch.float32, marks=INTERPRETED),
    ],
)
def test_sound_adapters_are_equal_to_the_reference(
    form: str, rank: int, kernels: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(form, rank, tmp_path)
    path = folder / "adapter_model.safetensors"
    verdict = judged(folder, arena_of(weights_of(folder), path, dtype, kernels))
    assert verdict.ok, verdict.message
    assert verdict.report["max"] < 0.75 * TOLERANCE
    sites = 2 if form in ("stacks", "turned", "doubled") else 3
    assert len(verdict.report["errors"]) == sites * len(EXPERTS)


@pytest.mark.parametrize("form", ["stacks", "turned", "doubled"])
def test_gate_and_up_in_turns_are_equal_to_the_reference_as_halves(form: str, tmp_path: Path) -> None:
    experts = {layer: replace(shape, in_turns=True) for layer, shape in EXPERTS.items()}
    folder = saved(form, 3, tmp_path, experts)
    files = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    base = replace(plain_base(experts), model_type="gpt_oss")
    for read_as, is_right in ((experts, True), (EXPERTS, False)):
        arena = arena_of(weights_of(folder, read_as), files[1], torch.float32, "numba", read_as)
        verdict = check_numbers(*files, base, measured(arena))
        assert verdict.ok is is_right, verdict.message


def own_slot(arena: AdapterArena) -> int:
    """SLOT's in the tables of experts."""
    assert arena.experts is not None
    return int(arena.experts.slot_of[SLOT])


def sites_of(arena: AdapterArena) -> dict[str, int]:
    assert arena.layout.experts is not None
    return {site: arena.layout.experts.number(site) for site in ("gate", "up", "gate_up", "down")}


def dropped(arena: AdapterArena, *sites: str) -> None:
    assert arena.experts is not None
    for site in sites:
        arena.experts.heights[own_slot(arena), :, sites_of(arena)[site]] = 0


def one_dropped(arena: AdapterArena) -> None:
    assert arena.experts is not None
    arena.experts.tables[own_slot(arena), 2, :, 4] = 0


def exchanged(arena: AdapterArena) -> None:
    assert arena.experts is not None
    of_site = arena.experts.tables[own_slot(arena), 0, sites_of(arena)["down"]]
    of_site[[2, 5]] = of_site[[5, 2]]


def up_from_gates_a(arena: AdapterArena) -> None:
    assert arena.experts is not None
    tables, sites = arena.experts.tables[own_slot(arena)], sites_of(arena)
    tables[:, sites["up"], ..., 0] = tables[:, sites["gate"], ..., 0]


def one_scaled(arena: AdapterArena) -> None:
    assert arena.experts is not None
    number = sites_of(arena)["down"]
    height = int(arena.experts.heights[own_slot(arena), 2, number])
    storage = arena.experts.storage
    for offset in arena.experts.tables[own_slot(arena), 2, number, 3, :, 1].tolist():
        if offset:
            storage[offset * GRANULE_BYTES // storage.itemsize :][: height * HIDDEN] *= 1.1


IN_TABLES: dict[str, Callable[[AdapterArena], None]] = {
    "gate and up dropped": lambda arena: dropped(arena, "gate", "up"),
    "down dropped": lambda arena: dropped(arena, "down"),
    "one expert of one layer dropped": one_dropped,
    "one expert's scale": one_scaled,
    "two experts exchanged": exchanged,
    "up from gate's A": up_from_gates_a,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 8, 64])
@pytest.mark.parametrize("fault", IN_TABLES)
def test_faults_in_the_tables_are_found(fault: str, rank: int, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved("pairs", rank, tmp_path)
    arena = arena_of(weights_of(folder), folder / "adapter_model.safetensors", dtype)
    IN_TABLES[fault](arena)
    verdict = judged(folder, arena)
    assert verdict.report["verdict"] == "mismatch"
    assert verdict.report["max"] > 2 * TOLERANCE
    if fault == "one expert's scale":
        assert verdict.report["worst_module"] == "model.layers.2.mlp.experts.down of expert 3"


def by_expert(tensors: Arrays, rank: int) -> Arrays:
    """Each B as a reader sees it that takes columns by rank for columns by expert."""
    found = dict(tensors)
    for name in tensors:
        if ".lora_B." in name:
            b = tensors[name]
            found[name] = np.ascontiguousarray(
                b.reshape(len(b), COUNT, -1).transpose(0, 2, 1).reshape(b.shape)
            )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [2, 8, 64])
@pytest.mark.parametrize("fault", ["B by expert", "the root of 2 on gate and up", "turned read straight"])
def test_faults_of_reading_are_found(fault: str, rank: int, dtype: torch.dtype, tmp_path: Path) -> None:
    experts = SQUARE if fault == "turned read straight" else EXPERTS
    folder = saved("turned" if experts is SQUARE else "stacks", rank, tmp_path, experts)
    weights, path = weights_of(folder, experts), folder / "adapter_model.safetensors"
    if fault == "B by expert":
        tensors = {
            name: array * np.float32(0.1) for name, array in by_expert(stacks(EXPERTS, rank), rank).items()
        }
        path = write(tmp_path / "other", tensors, r=rank, **BOTH) / path.name
    elif fault == "the root of 2 on gate and up":
        weights = tuple(replace(w, scaling=w.scaling * (1 if w.site == "down" else 2**0.5)) for w in weights)
    else:  # only the square one can be
        weights = tuple(replace(w, turned=w.site == "down") for w in weights)
    verdict = judged(folder, arena_of(weights, path, dtype, experts=experts), experts)
    assert verdict.report["verdict"] == "mismatch"
    assert verdict.report["max"] > 2 * TOLERANCE
