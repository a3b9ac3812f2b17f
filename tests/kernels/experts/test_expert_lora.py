"""LoRA on routed experts: every implementation against the formula in float64, a place at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from loraplex.kernels.bundle import Kernels
from loraplex.kernels.experts.lora_types import (
    ExpertLoraPass,
    ExpertLoraWeights,
    ExpertSiteGroup,
    begin_expert_pass,
    slots_of_rows,
    tile_height,
)
from loraplex.kernels.experts.numba_expert_lora import NumbaExpertLoraPass
from loraplex.kernels.experts.triton_expert_lora import TritonExpertLora
from loraplex.kernels.experts.types import ExpertRows, Routes
from loraplex.kernels.lora.types import Segment
from loraplex.kernels.numba_backend import numba_kernels
from loraplex.kernels.numba_runtime.recording import CallList
from loraplex.kernels.numba_runtime.thread_team import record_calls
from loraplex.kernels.torch_backend import torch_kernels
from loraplex.kernels.triton_backend import triton_kernels
from support.kernels.lora_arena import ManualExpertArena, expert_groups, lengths, make_expert_arena
from support.kernels.recurrent import INTERPRETED
from support.kernels.triton_interpreter import repair_bfloat16

CPU = torch.device("cpu")


def pass_by_triton(
    weights: ExpertLoraWeights, by_slot: Mapping[int, Sequence[Segment]], num_rows: int
) -> ExpertLoraPass:
    return TritonExpertLora(weights).begin(torch.from_numpy(slots_of_rows(by_slot, num_rows)))


BACKENDS = {
    "torch": torch_kernels(CPU, batch_invariant=True),
    "numba": numba_kernels(CPU, batch_invariant=True),
    "triton": replace(triton_kernels(CPU, batch_invariant=True), expert_lora_pass=pass_by_triton),
}
EXPERTS, LAYERS = 5, 3
RANKS = (
    {"gate": 8, "up": 8, "down": 8},
    {"gate_up": 64, "down": 12},
    {"gate_up": 3, "down": 3},
    {"gate": 1, "up": 12, "down": 1},
    {"down": 2},
    {},
)
SHARED, BASE, EMPTY = 2, -1, 5
UNTRAINED = ((0, 1), (1, 4), (3, 0), (3, 2))
BATCHES: dict[str, list[Segment]] = {
    "one row": lengths([(1, 1)]),
    "one adapter": lengths([(3, 9)]),
    "mixed": lengths([(0, 3), (BASE, 2), (1, 1), (2, 6), (3, 4), (4, 2), (EMPTY, 2), (0, 2)]),
    "a prompt": lengths([(2, 1), (1, 45), (BASE, 3), (0, 17)]),
}


@pytest.fixture(params=["torch", "numba", pytest.param("triton", marks=[INTERPRETED, pytest.mark.slow])])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param == "triton":
        request.getfixturevalue("quick_interpreter")
        repair_bfloat16(monkeypatch)
    return BACKENDS[request.param]


def make_arena(dtype: torch.dtype, hidden: int = 64, width: int = 48) -> ManualExpertArena:
    groups = expert_groups(hidden, width, EXPERTS, (0, 2))
    return make_expert_arena(groups, LAYERS, dtype, RANKS, untrained=UNTRAINED, shared_a=(SHARED,))


def begin(
    kernels: Kernels, arena: ManualExpertArena, segments: list[Segment], num_rows: int
) -> ExpertLoraPass | None:
    assert kernels.expert_lora_pass is not None
    return begin_expert_pass(kernels.expert_lora_pass, arena.weights, segments, num_rows)


def rows_of(kernels: Kernels, num_rows: int, seed: int = 0) -> ExpertRows:
    """Two experts a row; expert 3 has none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, EXPERTS, generator=generator)
    scores[:, 3] = -1
    return kernels.ops.experts.group(Routes(scores.topk(2).indices, torch.ones(num_rows, 2)), EXPERTS)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once a site: as near to the float64 sum as a number of this dtype is, except what float32 sums lose."""
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[got.dtype]
    error = (got.double() - want).abs()
    assert bool(got.isfinite().all())
    assert bool((error <= rounding * want.abs() + 2e-5 * want.abs().max()).all()), float(error.max())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("sizes", [(64, 48), (37, 41)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_formula(kernels: Kernels, dtype: torch.dtype, sizes: tuple[int, int], batch: str) -> None:
    arena, segments = make_arena(dtype, *sizes), BATCHES[batch]
    num_rows = sum(count for _, _, count in segments)
    rows = rows_of(kernels, num_rows)
    lora = begin(kernels, arena, segments, num_rows)
    assert lora is not None
    for layer in (0, 2):
        for group in arena.weights.groups:
            x = drawn(2 * num_rows, group.in_features, seed=1).to(dtype)
            y = drawn(2 * num_rows, group.out_features, seed=2).to(dtype)
            want = arena.expected(layer, group, segments, x, y, rows)
            assert not torch.equal(want, y.double())
            lora.apply(layer, group.key, x, y, rows)
            check(y, want)


def test_places_without_tiles_keep_their_bits(kernels: Kernels) -> None:
    arena, segments = make_arena(torch.bfloat16), BATCHES["mixed"]
    num_rows = sum(count for _, _, count in segments)
    rows = rows_of(kernels, num_rows)
    lora = begin(kernels, arena, segments, num_rows)
    assert lora is not None
    slots = torch.tensor([slot for slot, _, count in segments for _ in range(count)])[rows.row_of]
    experts = torch.repeat_interleave(torch.arange(EXPERTS), rows.starts.diff())
    x = drawn(2 * num_rows, 64).bfloat16()
    y = drawn(2 * num_rows, 96, seed=1).bfloat16()
    idle = (slots == BASE) | (slots == 4) | (slots == EMPTY)
    idle |= torch.tensor([pair in UNTRAINED for pair in zip(slots.tolist(), experts.tolist(), strict=True)])
    x[idle] = float("nan")
    before = y.clone()
    lora.apply(0, "experts.gate_up", x, y, rows)
    assert torch.equal(y[idle], before[idle])
    assert bool((y[~idle] != before[~idle]).any(1).all())
    after = y.clone()
    lora.apply(1, "experts.gate_up", x, y, rows)  # a layer without experts
    assert torch.equal(y, after)


def test_a_tile_has_the_fewest_ranks_that_hold_an_experts() -> None:
    assert [tile_height(rank) for rank in (1, 2, 3, 4, 5, 8, 9, 64)] == [1, 2, 4, 4, 8, 8, 8, 8]


def test_a_step_without_adapters_on_experts_needs_no_pass(kernels: Kernels) -> None:
    arena = make_arena(torch.float32)
    assert begin(kernels, arena, lengths([(BASE, 2), (EMPTY, 3)]), 5) is None
    assert begin(kernels, arena, [], 5) is None


@pytest.mark.parametrize(
    "segments", [[(0, 0, 3), (1, 2, 1)], [(0, 3, 3)], [(len(RANKS), 0, 1)]], ids=["overlap", "rows", "slot"]
)
def test_segments_of_other_rows_are_refused(kernels: Kernels, segments: list[Segment]) -> None:
    with pytest.raises(ValueError, match=r"overlap others or exceed the 5|holds no adapter"):
        begin(kernels, make_arena(torch.float32), segments, 5)


def test_operands_of_another_step_are_refused(kernels: Kernels) -> None:
    lora = begin(kernels, make_arena(torch.float32), lengths([(0, 4)]), 4)
    assert lora is not None
    rows = rows_of(kernels, 4)
    for x, y, given in (
        (drawn(8, 63), drawn(8, 96), rows),
        (drawn(8, 64), drawn(8, 95), rows),
        (drawn(7, 64), drawn(8, 96), rows),
        (drawn(10, 64), drawn(10, 96), rows_of(kernels, 5)),
    ):
        with pytest.raises(ValueError, match=r"'experts\.gate_up' of a pass over 4 rows got x"):
            lora.apply(0, "experts.gate_up", x, y, given)
    with pytest.raises(KeyError):
        lora.apply(0, "gate_up", drawn(8, 64), drawn(8, 96), rows)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("sizes", [(64, 48), (37, 41)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    kernels, arena = BACKENDS["numba"], make_arena(dtype, *sizes)
    each, slots = kernels.ops.experts, torch.tensor([0] * 11 + [BASE] * 3 + [1] * 37 + [2] * 5 + [3] * 14)
    scores = torch.rand(len(slots), EXPERTS, generator=torch.Generator().manual_seed(3))
    ids = scores.topk(2).indices
    for group in arena.weights.groups:
        given = drawn(len(slots), group.in_features).to(dtype)

        def adapted(
            chosen: torch.Tensor, group: ExpertSiteGroup = group, given: torch.Tensor = given
        ) -> torch.Tensor:
            """[n, 2, N]: what these rows get at the places of their experts."""
            rows = each.group(Routes(ids[chosen], torch.ones(len(chosen), 2)), EXPERTS)
            x = each.gather(given[chosen], rows)
            y = torch.ones(len(x), group.out_features).to(dtype)
            lora = begin(kernels, arena, lengths([(int(slot), 1) for slot in slots[chosen]]), len(chosen))
            if lora is not None:
                lora.apply(0, group.key, x, y, rows)
            return y[rows.place_of]

        alone = torch.cat([adapted(torch.tensor([row])) for row in range(len(slots))])
        assert not torch.equal(alone[0], torch.ones_like(alone[0]))
        generator = torch.Generator().manual_seed(0)
        for count, number in ((70, 1), (70, 3), (23, 2), (5, 3)):
            torch.set_num_threads(number)
            for chosen in (torch.arange(count), torch.randperm(70, generator=generator)[:count]):
                assert torch.equal(adapted(chosen), alone[chosen])


def test_a_recorded_call_serves_any_routes_and_adapters() -> None:
    kernels, arena, num_rows = BACKENDS["numba"], make_arena(torch.float32), 9
    each, group = kernels.ops.experts, arena.weights.groups[0]
    x, before = drawn(2 * num_rows, group.in_features), drawn(2 * num_rows, group.out_features, seed=1)
    ids, y = torch.empty(num_rows, 2, dtype=torch.int64), before.clone()
    routes = Routes(ids, torch.ones(num_rows, 2))
    first = begin(kernels, arena, lengths([(4, num_rows)]), num_rows)  # an adapter of other sites
    assert isinstance(first, NumbaExpertLoraPass)
    to_record = first.to_record()
    with record_calls() as calls:
        rows = each.group(routes, EXPERTS)
        to_record.apply(0, group.key, x, y, rows)
        to_record.apply(1, group.key, x, y, rows)  # a layer without experts
    recorded = CallList(calls, (rows, to_record))
    for seed, segments in enumerate(([(4, 9)], [(0, 9)], [(BASE, 2), (3, 4), (1, 3)], [(2, 9)])):
        lora = begin(kernels, arena, lengths(segments), num_rows)
        assert isinstance(lora, NumbaExpertLoraPass)
        ids.copy_(
            torch.rand(num_rows, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(2).indices
        )
        y.copy_(before)
        recorded.run(lora.step_values())
        want = before.clone()
        lora.apply(0, group.key, x, want, each.group(routes, EXPERTS))
        assert torch.equal(y, want)
        assert torch.equal(want, before) == (seed == 0)


def test_columns_that_lie_apart_and_tables_of_pieces_are_refused() -> None:
    kernels, arena = BACKENDS["numba"], make_arena(torch.float32)
    lora = begin(kernels, arena, lengths([(0, 4)]), 4)
    assert lora is not None
    x = drawn(64, 8).T
    with pytest.raises(ValueError, match="columns lie apart"):
        lora.apply(0, "experts.gate_up", x, drawn(8, 96), rows_of(kernels, 4))
    pieces = replace(arena.weights, tables=arena.weights.tables[:, :, ::2])
    with pytest.raises(ValueError, match="contiguous"):
        begin(kernels, ManualExpertArena(pieces), lengths([(0, 4)]), 4)
