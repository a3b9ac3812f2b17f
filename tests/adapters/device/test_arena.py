"""The arena's pages, slots and tables. What it computes is tested with the kernel and the transport."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.adapters.device.arena import AdapterArena
from loraplex.adapters.device.host_image import HostImage, build_image
from loraplex.adapters.device.layout import ArenaLayout
from support.adapters.lora_zoo import GROUPS, OpCounter, Zoo, ZooAdapter, dirty_arena, make_adapter
from support.kernels.lora_reference import lora_reference


@pytest.fixture
def layout() -> ArenaLayout:
    return ArenaLayout(GROUPS, 2, torch.float32, max_rank=32, page_bytes=16 << 10)


@pytest.fixture
def adapters(tmp_path: Path) -> list[ZooAdapter]:
    return [
        make_adapter(tmp_path / str(i), GROUPS, rank=8 * (i + 1), layers=range(2), seed=i) for i in range(3)
    ]


def check(arena: AdapterArena, slot: int, adapter: ZooAdapter) -> None:
    """The slot computes this adapter."""
    generator = torch.Generator().manual_seed(1)
    lora = arena.lora_pass([(slot, 0, 2)], 2)
    assert lora is not None
    for layer in range(2):
        for group in GROUPS:
            x = torch.randn(2, group.in_features, generator=generator)
            y = torch.zeros(2, sum(group.out_features))
            expected = lora_reference(x, y, group, [adapter.in_layer(layer)] * 2)
            lora.apply(layer, group.key, x, y)
            torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["adjacent", "scattered", "backwards", "two runs"])
def test_any_pages_will_do(layout: ArenaLayout, adapters: list[ZooAdapter], order: str) -> None:
    image = build_image(adapters[2].spec, adapters[2].path, layout)
    n = image.num_pages
    assert n >= 4
    pages = {
        "adjacent": list(range(3, 3 + n)),
        "scattered": [(2 * i + 1) % (2 * n + 3) for i in range(n)],
        "backwards": list(range(n, 0, -1)),
        "two runs": [*range(n // 2), *range(n, n + n - n // 2)],
    }[order]
    assert len(set(pages)) == n
    arena = dirty_arena(layout, 2 * n + 3, 2)
    arena.write(image, 1, tuple(pages))
    check(arena, 1, adapters[2])


def test_a_slot_and_pages_are_used_again(layout: ArenaLayout, adapters: list[ZooAdapter]) -> None:
    images = [build_image(a.spec, a.path, layout) for a in adapters]
    arena = dirty_arena(layout, 40, 2)
    for index in (2, 0, 1, 2):
        arena.write(images[index], 0, tuple(range(images[index].num_pages)))
        check(arena, 0, adapters[index])
        arena.clear_slot(0)
        with pytest.raises(ValueError, match="slot 0 holds no adapter"):
            arena.lora_pass([(0, 0, 1)], 1)


def test_a_smaller_adapter_does_not_inherit_sites_from_the_slots_last_one(
    layout: ArenaLayout, adapters: list[ZooAdapter], tmp_path: Path
) -> None:
    small = make_adapter(
        tmp_path / "small", GROUPS, rank=3, layers=[1], sites=["k_proj", "down_proj"], seed=9
    )
    arena = dirty_arena(layout, 40, 1)
    for adapter in (adapters[2], small):
        image = build_image(adapter.spec, adapter.path, layout)
        arena.write(image, 0, tuple(range(image.num_pages)))
    check(arena, 0, small)
    lora = arena.lora_pass([(0, 0, 1)], 1)
    assert lora is not None
    with OpCounter() as counter:
        lora.apply(0, "down", torch.zeros(1, 80), torch.zeros(1, 48))
        lora.apply(1, "gate_up", torch.zeros(1, 48), torch.zeros(1, 160))
    assert not counter.ops.keys() - {"aten.zeros.default"}, "work is done for sites that nobody has"


def test_a_pass_is_kept_only_while_its_adapters_stay(layout: ArenaLayout, adapters: list[ZooAdapter]) -> None:
    zoo = Zoo(layout, adapters)
    segments = [(0, 0, 1), (1, 1, 2)]
    kept = zoo.arena.lora_pass(segments, 3)
    assert zoo.arena.lora_pass(list(segments), 3) is kept
    assert zoo.arena.lora_pass(segments, 4) is not kept
    kept = zoo.arena.lora_pass(segments, 3)
    zoo.arena.write(zoo.images[1], 1, tuple(range(zoo.images[1].num_pages)))
    assert zoo.arena.lora_pass(segments, 3) is not kept


def test_pages_that_are_not_the_arenas_are_refused(layout: ArenaLayout, adapters: list[ZooAdapter]) -> None:
    image: HostImage = build_image(adapters[0].spec, adapters[0].path, layout)
    arena = dirty_arena(layout, 4, 1)
    for pages in ((), tuple(range(image.num_pages + 1)), (4,) * image.num_pages, (-1,) * image.num_pages):
        with pytest.raises(ValueError, match="can't be written"):
            arena.write(image, 0, pages)


def test_the_memory_it_takes_is_its_pages_and_one_of_zeros(layout: ArenaLayout) -> None:
    assert dirty_arena(layout, 4, 1).num_bytes == 5 * layout.page_bytes
