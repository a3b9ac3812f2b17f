"""Images in host memory: where tiles lie, what is rounded, and what does not become an image."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.layout import MAX_PAGE_BYTES, MIN_PAGE_BYTES, ArenaLayout
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt
from loraplex.kernels.lora.dispatch import CHUNK, GRANULE_BYTES
from loraplex.kernels.lora.site_groups import SiteGroup
from support.adapters.lora_zoo import GROUPS, ODD_GROUPS, make_adapter


def layout_of(groups: tuple[SiteGroup, ...] = GROUPS, **options: object) -> ArenaLayout:
    return ArenaLayout(groups, 2, **({"dtype": torch.float32, "max_rank": 64} | options))  # type: ignore[arg-type]


def same_pages(one: HostImage, other: HostImage) -> bool:
    return torch.equal(torch.cat(one.memory.runs), torch.cat(other.memory.runs))


def tile(image: HostImage, layout: ArenaLayout, start: int, features: int) -> torch.Tensor:
    flat = torch.cat(image.memory.runs).view(-1).view(layout.dtype)
    first = start * GRANULE_BYTES // layout.dtype.itemsize
    return flat[first : first + CHUNK * features].view(CHUNK, features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_hold_the_matrices_scaled_and_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    layout = layout_of(ODD_GROUPS, dtype=dtype, page_bytes=64 * 60)
    adapter = make_adapter(tmp_path / "a", ODD_GROUPS, rank={"q_proj": 11, "k_proj": 1, "v_proj": 8, "down_proj": 20},
                           layers=[1], scaling=1 / 3)  # fmt: skip
    image = build_image(adapter.spec, adapter.path, layout)
    names = {number: site for (_, site), number in layout.sites.items()}
    found: dict[str, int] = {}
    for layer, number, chunk, a_start, b_start in image.sites.tolist():
        site = names[number]
        a, b, scaling = adapter.dense[layer, site]
        scaled = (b.numpy() * np.float32(scaling)).T
        for start, matrix in ((a_start, a), (b_start, torch.from_numpy(scaled))):
            part = matrix[chunk * CHUNK : (chunk + 1) * CHUNK]
            stored = tile(image, layout, start, part.shape[1])
            assert torch.equal(stored[: len(part)], part.to(dtype))
            assert not stored[len(part) :].any(), "a rank that does not exist is not zero"
            size = CHUNK * part.shape[1] * dtype.itemsize
            first = start * GRANULE_BYTES
            assert first // layout.page_bytes == (first + size - 1) // layout.page_bytes, (
                "a tile crosses a page"
            )
        found[site] = found.get(site, 0) + 1
    assert found == {"q_proj": 2, "k_proj": 1, "v_proj": 1, "down_proj": 3}
    assert image.num_bytes == image.num_pages * layout.page_bytes
    assert image.rank == 20


@pytest.mark.parametrize("seed", range(6))
def test_a_file_is_read_once_whatever_lies_where(tmp_path: Path, seed: int) -> None:
    """Matrices in any order, with other bytes between them, larger and smaller than what is read at a time."""
    rng = np.random.default_rng(seed)
    groups = (
        SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 37, (41, 13, 7)),
        SiteGroup("down", ("down_proj",), 9001, (37,)),
    )
    layout = layout_of(groups)
    adapter = make_adapter(tmp_path / "a", groups, rank=19, layers=range(2), seed=seed)
    expected = build_image(adapter.spec, adapter.path, layout)
    raw, moved, shuffled = adapter.path.read_bytes(), {}, bytearray(rng.bytes(rng.integers(9)))
    tensors = [tensor for site in adapter.spec.sites for tensor in (site.a, site.b)]
    for index in rng.permutation(len(tensors)):
        tensor = tensors[index]
        shuffled += rng.bytes(rng.choice([0, 0, 8, 3, 700_000]))
        moved[tensor] = replace(tensor, start=len(shuffled), end=len(shuffled) + tensor.end - tensor.start)
        shuffled += raw[tensor.start : tensor.end]
    shuffled += rng.bytes(rng.integers(9))
    (tmp_path / "b").write_bytes(shuffled)
    sites = tuple(replace(site, a=moved[site.a], b=moved[site.b]) for site in adapter.spec.sites)
    seen = bytearray()
    image = build_image(
        replace(adapter.spec, sites=sites), tmp_path / "b", layout, feed=lambda part: seen.extend(part)
    )
    assert seen == shuffled
    assert same_pages(image, expected)
    assert np.array_equal(image.sites, expected.sites)


def test_images_hold_nothing_of_the_memory_that_they_were_given(tmp_path: Path) -> None:
    layout = layout_of(ODD_GROUPS, dtype=torch.bfloat16, page_bytes=64 * 60)
    adapter = make_adapter(tmp_path / "a", ODD_GROUPS, rank=11, layers=range(2))
    plain = build_image(adapter.spec, adapter.path, layout)
    torch.use_deterministic_algorithms(True)  # fills new memory with ones
    try:
        image = build_image(adapter.spec, adapter.path, layout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_pages(image, plain)
    tiles = [tile(image, layout, start, f) for _, number, chunk, *starts in image.sites.tolist() if chunk == 1
             for start, f in zip(starts, layout.features[number], strict=True)]  # fmt: skip
    assert tiles
    assert not any(part[3:].any() for part in tiles)


def test_no_two_tiles_overlap(tmp_path: Path) -> None:
    layout = layout_of(page_bytes=64 * 48)
    adapter = make_adapter(tmp_path / "a", GROUPS, rank=24, layers=range(2))
    image = build_image(adapter.spec, adapter.path, layout)
    spans = []
    for _, number, _, *starts in image.sites.tolist():
        for start, features in zip(starts, layout.features[number], strict=True):
            spans.append((start * GRANULE_BYTES, start * GRANULE_BYTES + layout.tile_bytes(features)))
    spans.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_an_image_costs_what_its_own_ranks_and_sites_cost(tmp_path: Path) -> None:
    """SmolLM2-135M's shapes in bf16: rank 16 everywhere is 9.8 MB, rank 8 on two sites 2.1 MB."""
    groups = (
        SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 576, (576, 192, 192)),
        SiteGroup("o", ("o_proj",), 576, (576,)),
        SiteGroup("gate_up", ("gate_proj", "up_proj"), 576, (1536, 1536)),
        SiteGroup("down", ("down_proj",), 1536, (576,)),
    )
    layout = ArenaLayout(groups, 4, torch.bfloat16, max_rank=64)
    for rank, sites, elements in ((16, None, 16 * 10176 * 4), (8, ["q_proj", "v_proj"], 8 * 1920 * 4)):
        adapter = make_adapter(tmp_path / str(rank), groups, rank=rank, layers=range(4), sites=sites)
        image = build_image(adapter.spec, adapter.path, layout)
        assert image.num_bytes <= 1.1 * 2 * elements + layout.page_bytes


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers"),
    [(576, 1536, 30), (4096, 14336, 32), (8192, 28672, 80), (16384, 53248, 126)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_page_size_suits_the_model(
    hidden: int, intermediate: int, layers: int, dtype: torch.dtype
) -> None:
    groups = (
        SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), hidden, (hidden, hidden // 8, hidden // 8)),
        SiteGroup("down", ("down_proj",), intermediate, (hidden,)),
    )
    layout = ArenaLayout(groups, layers, dtype, max_rank=64)
    assert MIN_PAGE_BYTES <= layout.page_bytes <= MAX_PAGE_BYTES
    assert layout.page_bytes & (layout.page_bytes - 1) == 0
    assert layout.largest_tile_bytes <= layout.page_bytes


def test_pages_that_cannot_hold_a_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="largest tile"):
        layout_of(page_bytes=64)
    with pytest.raises(ValueError, match="two groups"):
        layout_of((*GROUPS, GROUPS[1]))


def test_values_that_overflow_are_refused(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", GROUPS, rank=4, layers=[0], std=300, scaling=1000)
    build_image(adapter.spec, adapter.path, layout_of())
    with pytest.raises(AdapterRefused, match="not finite once they are scaled and in float16"):
        build_image(adapter.spec, adapter.path, layout_of(dtype=torch.float16))


def test_tensors_that_do_not_fit_the_layout_are_refused(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", GROUPS, rank=8, layers=[0])
    first, *others = adapter.spec.sites
    layout = layout_of(max_rank=16)

    def refused(match: str, **changes: object) -> None:
        spec = replace(adapter.spec, sites=(replace(first, **changes), *others))  # type: ignore[arg-type]
        with pytest.raises(ArtifactCorrupt, match=match):
            build_image(spec, adapter.path, layout)

    refused("layer 2 is not a place", layer=2)
    refused("lm_head of layer 0 is not a place", site="lm_head")
    spec = replace(adapter.spec, sites=(first, *others, first))
    with pytest.raises(ArtifactCorrupt, match="is there twice"):
        build_image(spec, adapter.path, layout)
    refused("rank 17; this engine serves 1 … 16", rank=17)
    refused("do not fit rank 8", a=replace(first.a, shape=(8, 47)))
    with pytest.raises(ArtifactCorrupt, match="changes nothing"):
        build_image(replace(adapter.spec, sites=()), adapter.path, layout)
