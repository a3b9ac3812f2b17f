"""Memory of the tables of adapters on experts, where they are large beside the adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage, blank_image, build_image
from loraplex.adapters.device.image_files import image_key
from loraplex.adapters.device.layout import ArenaLayout
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.spec import AdapterSpec, ExpertShape
from loraplex.engine.sizing import arena_bytes, arena_size, page_cost
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.experts.lora_types import ExpertSiteGroup
from loraplex.kernels.lora.site_groups import SiteGroup
from support.models.expert_adapters import pairs, read, write

CPU, MIB = torch.device("cpu"), 1 << 20
COUNT, WIDTH = 64, 16
EXPERTS = {0: ExpertShape(0, "model.layers.0.mlp.experts", COUNT, WIDTH, WIDTH)}


def layout_of(max_rank: int = 512) -> ArenaLayout:
    columns = ((0, WIDTH), (WIDTH, 2 * WIDTH), (0, 2 * WIDTH))
    groups = (
        ExpertSiteGroup("experts.gate_up", ("gate", "up", "gate_up"), WIDTH, columns, COUNT, (0,)),
        ExpertSiteGroup("experts.down", ("down",), WIDTH, ((0, WIDTH),), COUNT, (0,)),
    )
    others = (SiteGroup("o", ("o_proj",), WIDTH, (WIDTH,)),)
    return ArenaLayout(others, 1, torch.bfloat16, max_rank=max_rank, experts=groups)


def on_experts(layout: ArenaLayout, folder: Path) -> HostImage:
    path = write(folder, pairs(EXPERTS, 1), r=1) / "adapter_model.safetensors"
    weights = read(folder, EXPERTS).weights
    spec = AdapterSpec("0" * 64, 1, (), path.stat().st_size, (), experts=weights)
    return build_image(spec, path, layout)


def allocated(arena: AdapterArena) -> int:
    """Bytes of the arrays themselves."""
    assert arena.experts is not None
    pages = arena.experts.storage
    return pages.numel() * pages.element_size() + arena.experts.tables.nbytes + arena.experts.heights.nbytes


def test_a_budget_has_room_for_pages_and_tables() -> None:
    layout = layout_of()
    assert layout.expert_table_bytes > layout.page_bytes
    for budget in (MIB, 7 * MIB, 100 * MIB, 3 << 30):
        num_pages, num_slots = arena_size(budget, layout)
        size = arena_bytes(num_pages, layout) - layout.page_bytes
        assert 0.8 * budget - layout.page_bytes < size <= budget
        assert num_slots == min(num_pages, 1024)
    num_pages, num_slots = arena_size(100 * MIB, layout)
    assert arena_size(num_pages * page_cost(layout), layout) == (num_pages, num_slots)
    arena = AdapterArena(layout, num_pages, num_slots, resolve_kernels("torch", CPU))
    assert arena.num_bytes == allocated(arena) == arena_bytes(num_pages, layout)
    with pytest.raises(LoraplexError, match=r"--adapter-memory: 0\.0 MiB"):
        arena_size(layout.page_bytes // 2, layout)


def test_an_adapter_takes_what_its_pages_say(tmp_path: Path) -> None:
    """Within 5 %, its table with it. What has nothing on experts takes no table."""
    layout = layout_of()
    image = on_experts(layout, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < layout.expert_table_bytes
    assert layout.expert_table_bytes <= 0.05 * image.num_bytes
    others = replace(blank_image(layout), digest="1" * 64)
    assert others.num_pages == 1
    num_pages = 3 * image.num_pages + image.num_pages // 2
    arena = AdapterArena(layout, num_pages, num_pages, resolve_kernels("torch", CPU))
    assert arena.experts is not None
    assert len(arena.experts.tables) == 3
    pages = [tuple(range(n * image.num_pages, (n + 1) * image.num_pages)) for n in range(3)]
    # As many as the pages hold, each again in another slot, and others between them.
    for start in (0, 7, 3):
        for number, own in enumerate(pages):
            arena.write(image, start + 2 * number, own)
            arena.write(others, start + 2 * number + 1, (3 * image.num_pages,))
        segments = [(start + 2 * number, number, 1) for number in range(3)]
        assert arena.expert_pass(segments, 3) is not None
        assert arena.expert_pass([(start + 1, 0, 1), (-1, 1, 1)], 2) is None
        assert len({int(arena.experts.slot_of[slot]) for slot, _, _ in segments}) == 3
        for slot in range(start, start + 6):
            arena.clear_slot(slot)
        assert not arena.experts.tables.any()
    image.release()


def test_an_image_of_a_server_with_smaller_tables_is_laid_out_again(tmp_path: Path) -> None:
    """Images of smaller tables have too few pages: more such adapters than tables would fit the arena."""
    small, large = layout_of(8), layout_of()
    on_small, on_large = on_experts(small, tmp_path / "small"), on_experts(large, tmp_path / "large")
    assert on_small.num_pages < on_large.num_pages
    assert image_key(small, "base") != image_key(large, "base")
    on_small.release()
    on_large.release()
