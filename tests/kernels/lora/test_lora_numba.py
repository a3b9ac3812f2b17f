"""Batched LoRA compiled for a CPU against the formula in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from loraplex.kernels.lora.dispatch import begin_pass
from loraplex.kernels.lora.numba_lora import NumbaLoraPass
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.types import Scratch, Segment, segments_by_slot
from support.kernels.lora_arena import ManualArena, lengths, make_arena

CPU = torch.device("cpu")
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("down", ("down_proj",), 80, (48,)),
)
ODD_GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 37, (41, 13, 7)),
    SiteGroup("down", ("down_proj",), 101, (37,)),
)
NARROW_GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 1, (1, 3, 2)),
    SiteGroup("down", ("down_proj",), 2, (2,)),
)
HEAD_GROUP = SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1", f"{HEAD}.2"), 40, (48, 48, 19))
LAYERS = 2
RANKS = (8, 16, 24, 64, 8, 256, {"q_proj": 8, "v_proj": 32, "down_proj": 16}, {"down_proj": 24}, 0)
SPARSE = 4


def zipf(rows: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(5)
    weights = 1 / np.arange(1, 9)
    slots = rng.choice(8, size=rows, p=weights / weights.sum())
    return [(int(slot), 1) for slot in sorted(slots)]


BATCHES: dict[str, list[Segment]] = {
    "one row": lengths([(1, 1)]),
    "distinct": lengths([(slot, 1) for slot in range(8)]),
    "identical": lengths([(3, 1)] * 19),
    "uniform": lengths([(row % 4, 1) for row in range(12)]),
    "zipf": lengths(zipf(24)),
    "skewed": lengths([(1, 17), (0, 1), (2, 1), (3, 1)]),
    "mostly base": lengths([(-1, 9), (5, 1), (-1, 3)]),
    "two, three and four rows": lengths([(0, 2), (3, 3), (2, 4), (1, 5), (6, 6), (5, 7)]),
    "prompts and decode": lengths([(2, 33), (1, 1), (-1, 1), (6, 1), (-1, 5), (0, 17), (7, 2)]),
}


@pytest.fixture(scope="module")
def arenas() -> dict[str, ManualArena]:
    def arena_of(dtype: torch.dtype, groups: Sequence[SiteGroup] = GROUPS) -> ManualArena:
        return make_arena(
            groups, LAYERS, dtype, RANKS, has=lambda slot, layer, _: slot != SPARSE or layer == 0, dora=(2, 6)
        )

    return {
        "float32": arena_of(torch.float32),
        "bfloat16": arena_of(torch.bfloat16),
        "float16": arena_of(torch.float16),
        "odd": arena_of(torch.bfloat16, ODD_GROUPS),
        "odd float16": arena_of(torch.float16, ODD_GROUPS),
        "odd float32": arena_of(torch.float32, ODD_GROUPS),
        "narrow": arena_of(torch.bfloat16, NARROW_GROUPS),
    }


def make_inputs(group: SiteGroup, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, group.in_features, generator=generator)
    y = torch.randn(num_rows, sum(group.out_features), generator=generator)
    return x.to(dtype), y.to(dtype)


def one_pass(arena: ManualArena, segments: list[Segment], num_rows: int) -> NumbaLoraPass:
    return NumbaLoraPass(
        arena.weights, Scratch(CPU), segments_by_slot(segments, arena.weights.num_chunks, num_rows), num_rows
    )


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once: as near to the float64 sum as a number of this dtype is, except what float32 sums lose."""
    rounding = {torch.float64: 0.0, torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[
        got.dtype
    ]
    error = (got.double() - want).abs()
    assert bool(got.isfinite().all())
    assert bool((error <= rounding * want.abs() + 2e-5 * want.abs().max()).all()), float(error.max())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("odd", torch.bfloat16),
        ("float16", torch.float16),
        ("odd float16", torch.float16),
        ("odd float32", torch.float32),
        ("narrow", torch.bfloat16),
        # Each pair of dtypes is compiled, which takes seconds.
        *(
            pytest.param(name, dtype, marks=mark)
            for name, dtype, mark in (
                ("bfloat16", torch.float32, pytest.mark.slow),
                ("bfloat16", torch.float64, pytest.mark.soak),
                ("odd", torch.float32, pytest.mark.soak),
                ("bfloat16", torch.float16, pytest.mark.soak),
                ("float32", torch.bfloat16, pytest.mark.soak),
            )
        ),
    ],
)
def test_equals_the_formula(
    arenas: dict[str, ManualArena], name: str, dtype: torch.dtype, batch: str
) -> None:
    arena, segments = arenas[name], BATCHES[batch]
    num_rows = sum(count for _, _, count in segments)
    lora = one_pass(arena, segments, num_rows)
    for layer in range(LAYERS):
        for group in arena.weights.groups:
            x, y = make_inputs(group, num_rows, dtype)
            want = arena.expected(layer, group, segments, x, y)
            lora.apply(layer, group.key, x, y)
            check(y, want)


def test_the_head_has_rows_of_its_own() -> None:
    arena = make_arena([HEAD_GROUP], 1, torch.bfloat16, [8, 40, 16], dora=[2])
    segments = lengths([(0, 1), (-1, 2), (1, 3), (2, 1)])
    x, y = make_inputs(HEAD_GROUP, 7, torch.bfloat16)
    want = arena.expected(0, HEAD_GROUP, segments, x, y)
    one_pass(arena, segments, 7).apply(0, HEAD, x, y)
    check(y, want)


def test_rows_of_the_base_and_sites_that_an_adapter_lacks_keep_their_bits(
    arenas: dict[str, ManualArena],
) -> None:
    arena, qkv = arenas["bfloat16"], GROUPS[0]
    segments = [(6, 1, 2), (7, 4, 1), (SPARSE, 5, 1)]
    x, y = make_inputs(qkv, 7, torch.bfloat16)
    before = y.clone()
    x[0] = y[0] = before[0] = float("nan")
    one_pass(arena, segments, 7).apply(1, "qkv", x, y)
    for row in (3, 4, 5, 6):  # the base, one without these sites, one without this layer, the base
        assert torch.equal(y[row], before[row])
    assert torch.equal(y[1:3, 48:64], before[1:3, 48:64])  # k_proj
    assert not torch.equal(y[1:3, :48], before[1:3, :48])
    assert bool(y[0].isnan().all())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nonfinite_values_stay_in_their_row(arenas: dict[str, ManualArena], poison: float) -> None:
    arena, group = arenas["bfloat16"], GROUPS[1]
    segments = lengths([(1, 4), (2, 1), (0, 3)])
    x, y = make_inputs(group, 8, torch.bfloat16)
    clean = y.clone()
    one_pass(arena, segments, 8).apply(0, "down", x, clean)
    x[2, 17] = poison
    one_pass(arena, segments, 8).apply(0, "down", x, y)
    assert not y[2].isfinite().any()
    keep = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "odd"])
def test_row_depends_on_no_other_to_the_bit(arenas: dict[str, ManualArena], name: str, threads: int) -> None:
    arena = arenas[name]
    dtype = arena.weights.storage.dtype
    before = torch.get_num_threads()
    for group in arena.weights.groups:
        x, y = make_inputs(group, 17, dtype)
        alone = y.clone()
        slots = [2] * 10 + [3] * 7
        for row, slot in enumerate(slots):
            one_pass(arena, [(slot, 0, 1)], 1).apply(0, group.key, x[row : row + 1], alone[row : row + 1])
        torch.set_num_threads(threads)
        try:
            for cuts in ((10,), (2, 4, 6, 8, 10), (3, 6, 10), (1, 5, 10)):
                bounds = [0, *cuts, 13, 17]
                segments = [(slots[first], first, end - first) for first, end in pairwise(bounds)]
                together = y.clone()
                one_pass(arena, segments, 17).apply(0, group.key, x, together)
                assert torch.equal(together, alone)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_segments_of_any_size(dtype: torch.dtype) -> None:
    """Wide and narrow sites, columns behind the last whole vector, vectors of DoRA."""
    groups = (
        SiteGroup("gate_up", ("gate_proj", "up_proj"), 171, (208, 71)),
        SiteGroup("down", ("down_proj",), 352, (64,)),
    )
    arena = make_arena(groups, 1, dtype, [24], dora=(0,))
    total = 40
    for group in groups:
        x, y = make_inputs(group, total, dtype)
        alone = y.clone()
        for row in range(total):
            one_pass(arena, [(0, 0, 1)], 1).apply(0, group.key, x[row : row + 1], alone[row : row + 1])
        check(alone, arena.expected(0, group, [(0, 0, total)], x, y))
        for size in range(1, total + 1):
            counts = [size] if size == total else [size, total - size]
            out = y.clone()
            one_pass(arena, lengths([(0, count) for count in counts]), total).apply(0, group.key, x, out)
            assert torch.equal(out, alone), size


def test_inputs_and_outputs_may_be_of_different_dtypes(arenas: dict[str, ManualArena]) -> None:
    arena, group = arenas["bfloat16"], GROUPS[0]
    segments = lengths([(1, 3), (2, 2)])
    x, y = make_inputs(group, 5, torch.float16)[0], make_inputs(group, 5, torch.float32)[1]
    want = arena.expected(0, group, segments, x, y)
    one_pass(arena, segments, 5).apply(0, "qkv", x, y)
    check(y, want)


def test_columns_and_rows_that_are_not_adjacent(arenas: dict[str, ManualArena]) -> None:
    arena, group = arenas["bfloat16"], GROUPS[1]
    segments = lengths([(1, 2), (0, 1)])
    x, y = make_inputs(group, 3, torch.bfloat16)
    wide_x, wide_y = torch.zeros(3, 160, dtype=x.dtype), torch.zeros(3, 96, dtype=y.dtype)
    wide_x[:, ::2], wide_y[:, :48] = x, y
    want = arena.expected(0, group, segments, x, y)
    one_pass(arena, segments, 3).apply(0, "down", wide_x[:, ::2], wide_y[:, :48])
    check(wide_y[:, :48], want)
    assert not wide_y[:, 48:].any()


def test_shapes_that_are_not_the_groups_are_refused(arenas: dict[str, ManualArena]) -> None:
    lora = one_pass(arenas["float32"], [(1, 0, 2)], 2)
    with pytest.raises(ValueError, match="rows got"):
        lora.apply(0, "qkv", torch.zeros(3, 48), torch.zeros(3, 80))
    with pytest.raises(ValueError, match="rows got"):
        lora.apply(0, "qkv", torch.zeros(2, 48), torch.zeros(2, 81))
    with pytest.raises(KeyError):
        lora.apply(0, "gate_up", torch.zeros(2, 48), torch.zeros(2, 80))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numba_is_chosen_for_every_dtype(dtype: torch.dtype) -> None:
    arena = make_arena(GROUPS, 1, dtype, [8])
    assert isinstance(begin_pass(NumbaLoraPass, arena.weights, Scratch(CPU), [(0, 0, 1)], 1), NumbaLoraPass)
