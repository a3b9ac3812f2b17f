"""Batched LoRA in Triton against the formula in float64, interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from loraplex.adapters.device.layout import ArenaLayout
from loraplex.kernels.lora.dispatch import begin_pass
from loraplex.kernels.lora.reference import TorchLoraPass
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_lora import LoraLauncher, TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import LoraWeights, Scratch, Segment
from support.adapters.lora_zoo import Zoo, make_adapter
from support.kernels.lora_arena import ManualArena, decode, lengths, make_arena
from support.kernels.triton_interpreter import repair_bfloat16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("down", ("down_proj",), 80, (48,)),
)
ODD_GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 37, (41, 13, 7)),
    SiteGroup("down", ("down_proj",), 101, (37,)),
)
HEAD_GROUP = SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1", f"{HEAD}.2"), 40, (48, 48, 19))
LAYERS = 2
# Small, so that small matrices have several of everything; K of the second group is more than max_splits planes.
TILING = LoraTiling(
    block_k=32, block_n=32, max_splits=2, planes=2, large_rows=32, large_block_k=32, large_block_n=32,
    large_blocks_r=(16, 32), expand_rows=16, max_small_rows=24,
)  # fmt: skip
RANKS = (8, 16, 24, 64, 8, 256, {"q_proj": 8, "v_proj": 32, "down_proj": 16}, {"down_proj": 24}, 0)
SPARSE, EMPTY = 4, 8

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def has(slot: int, layer: int, _site: str) -> bool:
    """The adapter in slot 4 lacks the last layer."""
    return slot != SPARSE or layer == 0


def arena_of(dtype: torch.dtype, groups: Sequence[SiteGroup] = GROUPS) -> ManualArena:
    return make_arena(groups, LAYERS, dtype, RANKS, has=has, dora=(2, 6), device=DEVICE)


@pytest.fixture(scope="module")
def arenas() -> dict[str, ManualArena]:
    return {
        "float32": arena_of(torch.float32),
        "float16": arena_of(torch.float16),
        "bfloat16": arena_of(torch.bfloat16),
        "odd": arena_of(torch.float32, ODD_GROUPS),
    }


def zipf(rows: int) -> list[int]:
    rng = np.random.default_rng(5)
    weights = 1 / np.arange(1, 9)
    return sorted(int(slot) for slot in rng.choice(8, size=rows, p=weights / weights.sum()))


BATCHES: dict[str, list[Segment]] = {
    "one row": decode([1]),
    "distinct": decode(range(8)),
    "identical": decode([3] * 19),
    "uniform": decode([row % 4 for row in range(12)]),
    "zipf": decode(zipf(24)),
    "skewed": lengths([(1, 17), (0, 1), (2, 1), (3, 1)]),
    "mostly base": decode([-1] * 9 + [5] + [-1] * 3),
    "few rows each": lengths([(0, 2), (3, 3), (2, 4), (1, 5)]),
    "one prompt": lengths([(3, 70)]),
    "prompts and decode": lengths([(2, 33), (1, 1), (-1, 1), (6, 1), (-1, 5), (0, 17), (7, 2)]),
    "a prompt of the highest rank": lengths([(5, 21), (0, 1)]),
    "in parts": lengths([(2, 5), (6, 3), (2, 1), (-1, 4), (2, 18)]),
    "many small": lengths([(slot, 1 + slot) for slot in range(8)]),
}
FEW = ("few rows each", "prompts and decode")


def inputs(
    group: SiteGroup, num_rows: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, group.in_features, generator=generator)
    y = torch.randn(num_rows, sum(group.out_features), generator=generator)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def poisoned() -> Scratch:
    """Memory for hidden values that is full of NaN."""
    scratch = Scratch(DEVICE)
    scratch.buffer("lora hidden", (1 << 20,), torch.float32).fill_(float("nan"))
    return scratch


def one_pass(
    weights: LoraWeights,
    segments: Sequence[Segment],
    num_rows: int,
    tiling: LoraTiling = TILING,
    programs: int = 5,
) -> LoraLauncher:
    """The pass of a step alone, of an arena that has room for no larger one. Hidden values are NaN at first."""
    scratch = Scratch(DEVICE)
    lora = TritonLora(
        weights, scratch, max_rows=num_rows, max_segments=len(segments), tiling=tiling, programs=programs
    )
    scratch.buffer("lora hidden", (lora.hidden_size,), torch.float32).fill_(float("nan"))
    slots = [slot for slot, _, _ in segments if slot >= 0]
    for slot in slots:
        lora.write(slot)
    numbers = np.zeros(lora.work_size, np.int32)
    step = lora.plan(segments, num_rows, numbers)
    assert step.size <= lora.work_size
    assert step.hidden <= lora.hidden_size
    return lora.launcher(torch.from_numpy(numbers).to(DEVICE), step, slots)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once: as near to the float64 sum as a number of this dtype is, except what float32 sums lose."""
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[got.dtype]
    error = (got.double() - want).abs()
    assert bool(got.isfinite().all())
    assert bool((error <= rounding * want.abs() + 2e-5 * want.abs().max()).all()), float(error.max())


def run_all(
    arena: ManualArena, segments: list[Segment], dtype: torch.dtype, layers: Sequence[int] = (0,)
) -> None:
    num_rows = sum(count for _, _, count in segments)
    lora = one_pass(arena.weights, segments, num_rows)
    for layer in layers:
        for group in arena.weights.groups:
            x, y = inputs(group, num_rows, dtype)
            want = arena.expected(layer, group, segments, x, y)
            lora.apply(layer, group.key, x, y)
            check(y, want)


@pytest.mark.parametrize("batch", FEW)
@pytest.mark.parametrize("name", ["float32", "odd"])
def test_equals_the_formula(arenas, name: str, batch: str) -> None:
    run_all(arenas[name], BATCHES[batch], torch.float32)


@pytest.mark.soak
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_formula_over_every_kind_of_batch(arenas, batch: str) -> None:
    run_all(arenas["odd"], BATCHES[batch], torch.float32, range(LAYERS))


@pytest.mark.parametrize("batch", FEW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(arenas, monkeypatch, dtype: torch.dtype, batch: str) -> None:
    repair_bfloat16(monkeypatch)
    run_all(arenas[str(dtype).removeprefix("torch.")], BATCHES[batch], dtype)


def test_inputs_of_another_dtype_than_the_tiles(arenas, monkeypatch) -> None:
    repair_bfloat16(monkeypatch)
    run_all(arenas["bfloat16"], BATCHES["few rows each"], torch.float32)


def test_tiles_as_they_run_on_a_gpu(arenas, monkeypatch) -> None:
    repair_bfloat16(monkeypatch)
    arena, segments = arenas["bfloat16"], lengths([(3, 1), (1, 3), (2, 9), (0, 65)])
    lora = one_pass(arena.weights, segments, 78, LoraTiling())
    for group in GROUPS:
        x, y = inputs(group, 78, torch.bfloat16)
        want = arena.expected(0, group, segments, x, y)
        lora.apply(0, group.key, x, y)
        check(y, want)


def test_the_head_has_rows_of_its_own() -> None:
    arena = make_arena([HEAD_GROUP], 1, torch.float32, [8, 40, 16], dora=[2], device=DEVICE)
    segments = lengths([(0, 1), (-1, 2), (1, 3), (2, 1)])
    x, y = inputs(HEAD_GROUP, 7, torch.float32)
    want = arena.expected(0, HEAD_GROUP, segments, x, y)
    one_pass(arena.weights, segments, 7).apply(0, HEAD, x, y)
    check(y, want)


def test_rows_of_the_base_and_sites_that_an_adapter_lacks_keep_their_bits(arenas) -> None:
    arena, qkv = arenas["float32"], GROUPS[0]
    segments = [(6, 1, 2), (7, 4, 1), (SPARSE, 5, 1)]
    x, y = inputs(qkv, 7, torch.float32)
    before = y.clone()
    x[0] = y[0] = before[0] = float("nan")
    one_pass(arena.weights, segments, 7).apply(1, "qkv", x, y)
    for row in (3, 4, 5, 6):  # the base, one without these sites, one without this layer, the base
        assert torch.equal(y[row], before[row])
    assert torch.equal(y[1:3, 48:64], before[1:3, 48:64])  # k_proj
    assert not torch.equal(y[1:3, :48], before[1:3, :48])
    assert bool(y[0].isnan().all())


def test_a_row_that_is_not_finite_stays_alone(arenas) -> None:
    """Its neighbours in a piece, of one row's arithmetic, of a few rows', and of tensor cores'."""
    arena = arenas["float32"]
    for count in (3, 9, 40):
        segments = [(1, 0, count)]
        x, y = inputs(GROUPS[1], count, torch.float32)
        want = arena.expected(0, GROUPS[1], segments, x, y)
        x[1] = float("inf")
        one_pass(arena.weights, segments, count).apply(0, "down", x, y)
        rest = [row for row in range(count) if row != 1]
        check(y[rest], want[rest])


def test_columns_beside_the_operands_are_not_touched(arenas) -> None:
    """x and y as parts of wider tensors."""
    arena, group, segments = arenas["odd"], ODD_GROUPS[0], lengths([(0, 1), (2, 6)])
    x, y = inputs(group, 7, torch.float32)
    wide_x = torch.full((7, 50), float("nan"), device=DEVICE)
    wide_y = torch.full((9, 80), float("nan"), device=DEVICE)
    wide_x[:, 5:42] = x
    wide_y[1:8, 3:64] = y
    one_pass(arena.weights, segments, 7).apply(0, "qkv", wide_x[:, 5:42], wide_y[1:8, 3:64])
    check(wide_y[1:8, 3:64], arena.expected(0, group, segments, x, y))
    wide_y[1:8, 3:64] = float("nan")
    assert bool(wide_y.isnan().all())


def test_the_same_batch_gives_the_same_bits_however_many_programs_share_it(arenas) -> None:
    arena, segments = arenas["float32"], lengths([(2, 33), (1, 3), (6, 1), (0, 5)])
    num_rows = sum(count for _, _, count in segments)
    found = []
    for programs in (200, 333):  # both split prompts alike
        x, y = inputs(GROUPS[0], num_rows, torch.float32)
        one_pass(arena.weights, segments, num_rows, programs=programs).apply(0, "qkv", x, y)
        found.append(y)
    assert torch.equal(found[0], found[1])


def test_recorded_launches_serve_any_set_of_adapters(arenas) -> None:
    """As a CUDA graph replays them: the same buffers at the same places, other lists in them."""
    arena, rows = arenas["float32"], 12
    lora = TritonLora(arena.weights, Scratch(DEVICE), max_rows=40, max_segments=12, tiling=TILING, programs=5)
    for slot in range(EMPTY):
        lora.write(slot)
    buffer = np.zeros(lora.work_size, np.int32)
    work = torch.zeros(lora.work_size, dtype=torch.int32, device=DEVICE)
    recorded = lora.recorded(work, rows)
    group = GROUPS[1]
    x, y = inputs(group, rows, torch.float32)
    static_x, static_y = torch.empty_like(x), torch.empty_like(y)
    places = {tensor.data_ptr() for tensor in (work, static_x, static_y)}
    graph = None
    if DEVICE.type == "cuda":
        recorded.apply(0, "down", static_x, static_y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded.apply(0, "down", static_x, static_y)
    for seed, segments in enumerate(
        (decode(range(8)), [], decode([5] * 12), lengths([(1, 9), (3, 1)]), decode([-1] * 11 + [0]))
    ):
        buffer[:] = 99  # whatever the step before left behind its list
        step = lora.plan(segments, rows, buffer, fixed=True)
        work.copy_(torch.from_numpy(buffer))
        assert step.size <= lora.work_size
        x, y = inputs(group, rows, torch.float32, seed)
        static_x.copy_(x)
        static_y.copy_(y)
        if graph is None:
            recorded.apply(0, "down", static_x, static_y)
        else:
            graph.replay()
        check(static_y, arena.expected(0, group, segments, x, y))
        assert {tensor.data_ptr() for tensor in (work, static_x, static_y)} == places


def test_a_pass_over_the_device_s_own_tables(arenas) -> None:
    """Planned into the middle of a packed copy, with its two halves called apart."""
    arena, segments = arenas["float32"], BATCHES["prompts and decode"]
    num_rows = sum(count for _, _, count in segments)
    lora = TritonLora(arena.weights, poisoned(), max_rows=80, max_segments=12, tiling=TILING, programs=5)
    for slot in range(EMPTY):
        lora.write(slot)
    packed = np.zeros(32 + lora.work_size, np.int32)
    step = lora.plan(segments, num_rows, packed[32:])
    moved = torch.from_numpy(packed[: 32 + step.size]).to(DEVICE)
    launcher = lora.launcher(moved[32:], step, [slot for slot, _, _ in segments if slot >= 0])
    group = GROUPS[0]
    x, y = inputs(group, num_rows, torch.float32)
    want = arena.expected(1, group, segments, x, y)
    launcher.shrink(1, "qkv", x)
    launcher.expand(1, "qkv", y)
    check(y, want)


def test_a_slot_that_is_written_again_serves_the_new_adapter() -> None:
    first = make_arena(GROUPS, LAYERS, torch.float32, [64, 8], device=DEVICE)
    lora = TritonLora(first.weights, poisoned(), max_rows=8, max_segments=4, tiling=TILING, programs=2)
    for slot in (0, 1):
        lora.write(slot)
    tables = first.weights
    # The adapter of slot 1, of a lower rank, moves into slot 0.
    for array in (tables.tables, tables.num_chunks, tables.present, tables.vectors):
        array[0] = array[1]
    lora.write(0)
    packed = np.zeros(lora.work_size, np.int32)
    step = lora.plan([(0, 0, 2)], 2, packed)
    x, y = inputs(GROUPS[0], 2, torch.float32)
    want = first.expected(0, GROUPS[0], [(1, 0, 2)], x, y)
    lora.launcher(torch.from_numpy(packed).to(DEVICE), step, [0]).apply(0, "qkv", x, y)
    check(y, want)


def test_real_images_in_an_arena_of_pages(tmp_path: Path) -> None:
    """As `AdapterArena` lays them out, of true ranks, in pages between which everything is NaN: like the reference."""
    layout = ArenaLayout(GROUPS, LAYERS, torch.float32, max_rank=40)
    zoo = Zoo(
        layout,
        [
            make_adapter(tmp_path / str(seed), GROUPS, rank=rank, layers=range(1 + seed % LAYERS), seed=seed)
            for seed, rank in enumerate((1, 9, 3, 40))
        ],
    )
    weights, segments = zoo.arena.layers, lengths([(0, 1), (3, 2), (-1, 1), (1, 18), (2, 1)])
    reference = begin_pass(TorchLoraPass, weights, Scratch(torch.device("cpu")), segments, 23)
    lora = one_pass(weights, segments, 23, programs=3)
    assert reference is not None
    for layer in range(LAYERS):
        for group in GROUPS:
            x = torch.randn(23, group.in_features)
            y = torch.randn(23, sum(group.out_features))
            want = y.clone()
            reference.apply(layer, group.key, x, want)
            lora.apply(layer, group.key, x, y)
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, int]]]:
    """What is launched, with its constants, instead of launching it."""
    launched: list[tuple[str, dict[str, int]]] = []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]):  # type: ignore[no-untyped-def]
            return lambda *args, **constants: launched.append((self.name, constants))

    for name in ("shrink", "expand"):
        monkeypatch.setattr(f"loraplex.kernels.lora.triton_lora.{name}", Counting(name))
    return launched


def test_two_launches_a_group_whatever_the_batch(arenas, monkeypatch) -> None:
    launched = counted(monkeypatch)
    arena = arenas["float32"]
    for segments in (decode([0]), decode([0, 1, 2, 3, -1]), decode([1] * 8), lengths([(3, 60)])):
        launched.clear()
        rows = sum(count for _, _, count in segments)
        x, y = inputs(GROUPS[0], rows, torch.float32)
        one_pass(arena.weights, segments, rows).apply(0, "qkv", x, y)
        assert [name for name, _ in launched] == ["shrink", "expand"]
    launched.clear()
    # An adapter without a site in this layer, and one without a site of this group.
    for layer, segments in ((1, decode([SPARSE])), (0, decode([7]))):
        x, y = inputs(GROUPS[0], 1, torch.float32)
        one_pass(arena.weights, segments, 1).apply(layer, "qkv", x, y)
    assert launched == []


def test_warming_up_launches_all_that_a_step_may_and_changes_nothing(arenas, monkeypatch) -> None:
    arena = arenas["float32"]
    lora = TritonLora(arena.weights, poisoned(), max_rows=80, max_segments=12, tiling=TILING, programs=2)
    lora.warm_up(torch.float32)  # runs
    launched = counted(monkeypatch)
    lora.warm_up(torch.float32)
    warm = {(name, *sorted(constants.items())) for name, constants in launched}
    launched.clear()
    for slot in range(EMPTY):
        lora.write(slot)
    packed = np.zeros(lora.work_size, np.int32)
    for segments in ([(0, 0, 1), (1, 1, 70)], [(3, 0, 70)], [(5, 0, 33)]):
        step = lora.plan(segments, 71, packed)
        launcher = lora.launcher(torch.from_numpy(packed), step, [slot for slot, _, _ in segments])
        for group in GROUPS:
            launcher.apply(0, group.key, *inputs(group, 71, torch.float32))
    assert {(name, *sorted(constants.items())) for name, constants in launched} == warm


def test_bad_calls_are_refused(arenas) -> None:
    arena = arenas["float32"]
    lora = one_pass(arena.weights, decode([0, 1]), 2)
    x, y = inputs(GROUPS[0], 2, torch.float32)
    with pytest.raises(ValueError, match="rows got x"):
        lora.apply(0, "qkv", x[:1], y)
    with pytest.raises(ValueError, match="rows got y"):
        lora.apply(0, "qkv", x, y[:, :79])
    with pytest.raises(ValueError, match="adjacent columns"):
        lora.apply(0, "qkv", x.T.contiguous().T, y)
    with pytest.raises(KeyError):
        lora.apply(0, "o", x, y)
    whole = TritonLora(arena.weights, Scratch(DEVICE), max_rows=4, max_segments=4, tiling=TILING, programs=2)
    into = np.zeros(whole.work_size, np.int32)
    with pytest.raises(ValueError, match="4 are the most"):
        whole.plan(decode([0]), 5, into)
    with pytest.raises(ValueError, match="holds no adapter"):
        whole.plan(decode([EMPTY]), 1, into)
    with pytest.raises(ValueError, match="overlap"):
        whole.plan([(0, 0, 2), (1, 1, 1)], 4, into)
