"""Images of LoRA on routed experts: every form becomes the same tiles, and no expert takes more than it needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.host_slab import loose_pages
from loraplex.adapters.device.image_files import ImageFiles, image_key
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt, LoadAbandoned
from loraplex.adapters.spec import AdapterSpec, ExpertShape
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.lora.dispatch import GRANULE_BYTES
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.lora_zoo import dirty_arena
from support.models.expert_adapters import (
    Arrays,
    Changes,
    changes,
    pairs,
    read,
    stacks,
    three_dimensions,
    write,
)

EXPERTS = {layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 5, 64, 48) for layer in (0, 2)}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def layout_of(
    experts: dict[int, ExpertShape] = EXPERTS, dtype: torch.dtype = torch.float32, **options: Any
) -> ArenaLayout:
    shape = next(iter(experts.values()))
    h, i, layers = shape.hidden_size, shape.inner_size, tuple(experts)
    return ArenaLayout(
        (SiteGroup("o", ("o_proj",), h, (h,)),),
        max(experts) + 1,
        dtype,
        experts=(
            ExpertSiteGroup(
                "experts.gate_up",
                ("gate", "up", "gate_up"),
                h,
                ((0, i), (i, 2 * i), (0, 2 * i)),
                shape.count,
                layers,
            ),
            ExpertSiteGroup("experts.down", ("down",), i, ((0, h),), shape.count, layers),
        ),
        **({"max_rank": 16} | options),
    )


def spec_of(folder: Path, experts: dict[int, ExpertShape] = EXPERTS) -> AdapterSpec:
    weights = read(folder, experts).weights
    path = folder / "adapter_model.safetensors"
    return AdapterSpec("0" * 64, max(w.rank for w in weights), (), path.stat().st_size, (), experts=weights)


def build(
    folder: Path, layout: ArenaLayout, experts: dict[int, ExpertShape] = EXPERTS, **options: Any
) -> HostImage:
    return build_image(spec_of(folder, experts), folder / "adapter_model.safetensors", layout, **options)


def in_image(image: HostImage, layout: ArenaLayout, experts: dict[int, ExpertShape] = EXPERTS) -> Changes:
    """B·A by layer and expert, as `changes` gives it of the file."""
    assert layout.experts is not None
    flat = torch.cat(image.memory.runs).view(-1).view(layout.dtype).float().numpy()
    heights = {(layer, number): height for layer, number, height in image.heights.tolist()}
    names = {layout.experts.number(site): site for site in ("gate", "up", "gate_up", "down")}
    found: Changes = {}
    for layer, number, expert, _, a_start, b_start in image.experts.tolist():
        site, height = names[number], heights[layer, number]
        shape = layout.experts.shape(layer, site)
        assert shape is not None
        sides = []
        for start, features in zip((a_start, b_start), shape, strict=True):
            first, size = start * GRANULE_BYTES, height * features * layout.dtype.itemsize
            assert first // layout.page_bytes == (first + size - 1) // layout.page_bytes, (
                "a tile crosses a page"
            )
            first //= layout.dtype.itemsize
            sides.append(flat[first : first + height * features].reshape(height, features))
        change = sides[1].T @ sides[0]
        inner = experts[layer].inner_size
        of = found.setdefault((layer, expert), {})
        into = of.setdefault(
            "down" if site == "down" else "gate_up",
            np.zeros((shape[1] if site == "down" else 2 * inner, shape[0]), np.float32),
        )
        into[{"gate": slice(0, inner), "up": slice(inner, None)}.get(site, slice(None))] += change
    return found


def turned(tensors: Arrays, rank: int, count: int) -> Arrays:
    """Stacks as PEFT before 0.19.1 saved them."""
    found: Arrays = {}
    for name, a in tensors.items():
        if ".lora_A." in name:
            other = name.replace("lora_A", "lora_B")
            b = tensors[other].reshape(-1, rank, count)
            found[name] = np.ascontiguousarray(b.transpose(2, 1, 0).reshape(rank * count, -1))
            a_of = a.reshape(count, rank, -1)
            found[other] = np.ascontiguousarray(a_of.transpose(2, 1, 0).reshape(-1, rank * count))
    return found


def doubled(rank: int) -> dict[str, Any]:
    return {
        "target_parameters": BOTH,
        "target_modules": [],
        "rank_pattern": {r".*\.gate_up_proj": 2 * rank},
        "alpha_pattern": {r".*\.gate_up_proj": 16},
        "r": rank,
    }


def stacks_of_two_ranks(rank: int) -> Arrays:
    deep, top = stacks(EXPERTS, 2 * rank), stacks(EXPERTS, rank)
    return {name: (deep if ".base_layer." in name else top)[name] for name in top}


def saved(
    form: str, rank: int, folder: Path, experts: dict[int, ExpertShape] = EXPERTS, **fields: Any
) -> Path:
    on_parameters = {"target_parameters": BOTH, "target_modules": [], "r": rank} | fields
    if form == "pairs":
        return write(folder, pairs(experts, rank), r=rank, **fields)
    if form == "doubled":
        return write(folder, stacks_of_two_ranks(rank), **doubled(rank), **fields)
    if form == "three dimensions":
        return write(folder, three_dimensions(experts, rank), r=rank, **fields)
    if form == "turned":
        count = next(iter(experts.values())).count
        old = turned(stacks(experts, rank), rank, count)
        return write(folder, old, **on_parameters, peft_version="0.18.1")
    return write(folder, stacks(experts, rank), **on_parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 8, 13])
@pytest.mark.parametrize("form", ["pairs", "stacks", "turned", "doubled", "three dimensions"])
def test_every_form_becomes_its_tiles(form: str, rank: int, dtype: torch.dtype, tmp_path: Path) -> None:
    layout, folder = layout_of(dtype=dtype), saved(form, rank, tmp_path, lora_alpha=5, use_rslora=True)
    expected = changes(folder, read(folder, EXPERTS), EXPERTS)
    found = in_image(build(folder, layout), layout)
    assert found.keys() == expected.keys()
    for place, sites in expected.items():
        for site, change in sites.items():
            error = np.abs(found[place][site] - change).max() / np.abs(change).max()
            assert error < (1e-5 if dtype is torch.float32 else 2e-2), (place, site)


@pytest.mark.parametrize("form", ["stacks", "turned", "doubled"])
def test_gate_and_up_that_a_stack_has_in_turns_become_halves(form: str, tmp_path: Path) -> None:
    experts = {layer: replace(shape, in_turns=True) for layer, shape in EXPERTS.items()}
    layout, folder = layout_of(experts), saved(form, 3, tmp_path, experts)
    expected = changes(folder, read(folder, experts), experts)
    found = in_image(build(folder, layout, experts), layout, experts)
    assert found.keys() == expected.keys()
    for place, sites in expected.items():
        gate_up = np.concatenate((sites["gate_up"][0::2], sites["gate_up"][1::2]))
        np.testing.assert_allclose(found[place]["gate_up"], gate_up, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found[place]["down"], sites["down"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rank", "height"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (12, 8)])
def test_tiles_are_as_high_as_ranks_need(rank: int, height: int, tmp_path: Path) -> None:
    image = build(saved("stacks", rank, tmp_path), layout_of())
    assert set(image.heights[:, 2].tolist()) == {height}
    assert set(image.experts[:, 3].tolist()) == set(range(-(-rank // height)))


LARGE = {layer: ExpertShape(layer, f"model.layers.{layer}.mlp.experts", 32, 1024, 384) for layer in range(4)}


@pytest.mark.parametrize(
    ("form", "rank"), [("pairs", 1), ("stacks", 1), ("pairs", 2), ("stacks", 4), ("pairs", 8), ("stacks", 8)]
)
def test_an_image_is_no_larger_than_its_file(form: str, rank: int, tmp_path: Path) -> None:
    layout = layout_of(LARGE, page_bytes=(64 if rank < 4 else 256) << 10)
    folder = saved(form, rank, tmp_path, LARGE)
    image = build(folder, layout, LARGE)
    assert image.num_bytes <= 1.05 * (folder / "adapter_model.safetensors").stat().st_size
    image.release()


def shared_as_pairs(rank: int, experts: dict[int, ExpertShape] = EXPERTS) -> Arrays:
    """Pairs where all experts have one A of gate, one of up, and one B of down."""
    tensors = pairs(experts, rank)
    for name in tensors:
        layer, leaf, side = name.split(".")[2], name.split(".")[6], name.split(".")[7]
        if (side == "lora_B") == (leaf == "down_proj"):
            tensors[name] = tensors[f"model.layers.{layer}.mlp.experts.0.{leaf}.{side}.weight"]
    return tensors


def test_a_side_that_all_experts_share_lies_once(tmp_path: Path) -> None:
    layout = layout_of()
    folder = write(tmp_path / "shared", shared_as_pairs(8), r=8)
    image = build(folder, layout)
    found, expected = in_image(image, layout), changes(folder, read(folder, EXPERTS), EXPERTS)
    for place, sites in expected.items():
        for site, change in sites.items():
            np.testing.assert_allclose(found[place][site], change, rtol=1e-4, atol=1e-4)
    sizes = {}
    forms = {
        "own": pairs(LARGE, 2),
        "shared": shared_as_pairs(2, LARGE),
        "three dimensions": three_dimensions(LARGE, 2),
    }
    layout = layout_of(LARGE, page_bytes=64 << 10)
    for name, tensors in forms.items():
        sizes[name] = build(write(tmp_path / name, tensors, r=2), layout, LARGE).num_bytes
    assert sizes["shared"] == sizes["three dimensions"] <= 0.4 * sizes["own"]


def test_one_b_with_several_scalings_is_no_shared_one(tmp_path: Path) -> None:
    patterns = {"alpha_pattern": {"model.layers.0.mlp.experts.3.down_proj": 32}}
    folder = write(tmp_path, shared_as_pairs(8), r=8, **patterns)
    layout = layout_of()
    found, expected = in_image(build(folder, layout), layout), changes(folder, read(folder, EXPERTS), EXPERTS)
    for place, sites in expected.items():
        np.testing.assert_allclose(found[place]["down"], sites["down"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["pairs", "stacks", "turned"])
def test_an_expert_without_effect_takes_no_tile(form: str, tmp_path: Path) -> None:
    tensors = pairs(EXPERTS, 4) if form == "pairs" else stacks(EXPERTS, 4)
    for name in tensors:
        if ".lora_B." in name and form == "pairs" and ".experts.3." in name:
            tensors[name][:] = 0
        elif ".lora_B." in name and form != "pairs":
            tensors[name].reshape(-1, 4, 5)[:, :, 3] = 0
    if form == "turned":
        tensors = turned(tensors, 4, 5)
    fields = {} if form == "pairs" else {"target_parameters": BOTH, "target_modules": []}
    release = "0.18.1" if form == "turned" else "0.21.2"
    image = build(write(tmp_path, tensors, r=4, peft_version=release, **fields), layout_of())
    assert set(image.experts[:, 2].tolist()) == {0, 1, 2, 4}


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    tensors = pairs(EXPERTS, 4)
    tensors["model.layers.2.mlp.experts.3.up_proj.lora_B.weight"][5, 1] = 3e38
    with pytest.raises(
        AdapterRefused, match=r"up of expert 3 in layer 2 has values that are not finite"
    ) as caught:
        build(write(tmp_path, tensors, r=4, lora_alpha=80), layout_of())
    assert caught.value.code == "non_finite"


def test_a_load_is_abandoned_between_matrices_and_gives_its_pages_back(tmp_path: Path) -> None:
    folder, layout = saved("pairs", 4, tmp_path), layout_of()
    given: list[Any] = []
    for calls in (3, 90):
        left = iter(range(calls))
        with pytest.raises(LoadAbandoned):
            build(
                folder,
                layout,
                wanted=lambda left=left: next(left, None) is not None,
                memory=lambda n: given.append(loose_pages(n, layout.page_bytes)) or given[-1],
            )
    assert len(given) == 1, "pages were taken before it was known which tiles there are"
    assert not given[0].runs


@pytest.mark.parametrize("form", ["pairs", "stacks", "three dimensions"])
def test_a_file_is_fed_in_order_once(form: str, tmp_path: Path) -> None:
    folder, seen = saved(form, 4, tmp_path), bytearray()
    build(folder, layout_of(), feed=seen.extend)
    assert seen == (folder / "adapter_model.safetensors").read_bytes()


def test_what_does_not_fit_the_model_is_no_image(tmp_path: Path) -> None:
    folder = saved("stacks", 8, tmp_path)
    other = {layer: ExpertShape(layer, shape.module_path, 5, 64, 40) for layer, shape in EXPERTS.items()}
    for layout, words in (
        (layout_of(other), "do not fit rank 8 of 5 experts"),
        (layout_of({0: EXPERTS[0]}), "layer 2 is not a place"),
        (layout_of(max_rank=4), r"has rank 8; this engine serves 1 … 4"),
    ):
        with pytest.raises(ArtifactCorrupt, match=words):
            build(folder, layout)
    with pytest.raises(AdapterRefused, match="own decoder, not here") as caught:
        build(folder, ArenaLayout(layout_of().groups, 3, torch.float32, max_rank=8))
    assert caught.value.feature == "experts"
    # By the names that admission gives the sites of a version.
    assert layout_of().expert_site_names == ("experts.gate", "experts.up", "experts.gate_up", "experts.down")


def test_an_image_comes_back_from_the_disk(tmp_path: Path) -> None:
    layout, folder = layout_of(), saved("doubled", 3, tmp_path / "a")
    image = build(folder, layout)
    files = ImageFiles(tmp_path, image_key(layout, "base"), 1 << 24)
    assert files.write(image, lambda: True)
    again = files.read_image(image.digest, lambda n: loose_pages(n, layout.page_bytes), lambda: True)
    assert again is not None
    assert np.array_equal(again.experts, image.experts)
    assert np.array_equal(again.heights, image.heights)
    assert torch.equal(torch.cat(again.memory.runs), torch.cat(image.memory.runs))
    assert image_key(layout_of({0: EXPERTS[0], 2: EXPERTS[2], 3: EXPERTS[0]}), "base") != image_key(
        layout, "base"
    )


def test_a_slot_has_the_tables_of_its_last_adapter(tmp_path: Path) -> None:
    layout = layout_of()
    images = [
        build(saved(form, rank, tmp_path / form), layout) for form, rank in (("pairs", 13), ("stacks", 2))
    ]
    arena = dirty_arena(layout, 2 + max(image.num_pages for image in images), 2)
    assert arena.experts is not None
    for image in (*images, images[0]):
        pages = tuple(range(image.num_pages, 0, -1))
        arena.write(image, 1, pages)
        starts = (np.array(pages) + 1) * layout.granules_per_page
        own = arena.experts.slot_of[1]
        table, per_page = arena.experts.tables[own], layout.granules_per_page
        assert np.count_nonzero(table) == 2 * len(image.experts)
        for *where, a, b in image.experts.tolist():
            expected = [starts[tile // per_page] + tile % per_page for tile in (a, b)]
            assert table[tuple(where)].tolist() == expected
        assert {
            (*at, arena.experts.heights[own][at])
            for at in zip(*arena.experts.heights[own].nonzero(), strict=True)
        } == {tuple(row) for row in image.heights.tolist()}
        assert arena.expert_pass([(1, 0, 2)], 3) is not None
        assert arena.expert_pass([(-1, 0, 2)], 3) is None
    arena.clear_slot(1)
    assert not arena.experts.tables.any()
    assert arena.expert_pass([], 3) is None
