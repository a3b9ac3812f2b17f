"""B sides of prompts by strips of columns, as a tiling with `strip_stages` has them, against the float64 formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from bench.gpu.steps import SMALL, StepBench
from bench.gpu.timing import Ceilings
from loraplex.kernels.layers.triton_activation import act_and_mul
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_lora import LoraLauncher
from loraplex.kernels.lora.triton_tiling import STRIP_TILES, LoraTiling
from loraplex.kernels.lora.types import Segment
from support.kernels.lora_arena import lengths
from support.kernels.triton_interpreter import repair_bfloat16
from support.lora_rig import ROUNDING, Rig, check_step, inputs

WIDE = STRIP_TILES * 32 + 48
"""A strip and a part of one."""
QKV = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (WIDE, 16, 16))
DOWN = SiteGroup("down", ("down_proj",), 80, (75,))
HEAD_GROUP = SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1"), 40, (48, 19))
GATE_UP = SiteGroup("gate_up", ("gate_proj", "up_proj"), 40, (WIDE, WIDE))
GROUPS = (QKV, DOWN, GATE_UP, HEAD_GROUP)
# Small, so that small matrices have several units and planes.
TILING = LoraTiling(
    block_k=32, block_n=32, max_splits=2, planes=2, large_rows=32, large_block_k=16, large_block_n=32,
    expand_rows=16, strip_stages=3,
)  # fmt: skip
RANKS = (8, 16, 24, 32, 64, 40, {"q_proj": 8, "v_proj": 64, "up_proj": 24})
DORA = (1, 4)
BATCHES: dict[str, list[Segment]] = {
    "prompts of one adapter each": lengths([(4, 21), (-1, 2), (1, 33), (6, 18)]),
    "a prompt alone": lengths([(5, 40)]),
    "ranks of 16 alone": lengths([(0, 40), (-1, 1), (1, 17)]),
    "beside decoding rows": lengths([(2, 3), (5, 50), (1, 5), (-1, 1), (0, 1), (3, 20)]),
}

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def rig_of(dtype: torch.dtype, tiling: LoraTiling = TILING, programs: int = 5) -> Rig:
    return Rig(GROUPS, RANKS, dtype, tiling, dora=DORA, programs=programs, max_rows=96)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return rig_of(torch.float32)


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse B sides by tiles of large pieces."""
    from loraplex.kernels.lora import triton_lora

    expand = triton_lora.expand

    class SmallAlone:
        def __getitem__(self, grid: tuple[int]) -> object:
            def launch(*arguments: object, **options: object) -> None:
                assert options["BLOCK_M"] == TILING.small_rows
                assert options["BY_ROWS"]
                expand[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(triton_lora, "expand", SmallAlone())


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_formula(rig: Rig, batch: str) -> None:
    """Ranks 8 to 64, mixed within an adapter too, DoRA's vectors, rows of the base, the head's shared hidden values,
    odd widths."""
    check_step(rig, BATCHES[batch], GROUPS, torch.float32, fixed=False, seed=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The tiles are those that run on a GPU."""
    repair_bfloat16(monkeypatch)
    rig = rig_of(dtype, LoraTiling(strip_stages=3))
    check_step(rig, BATCHES["prompts of one adapter each"], (QKV, DOWN), dtype, fixed=False, seed=2)


def test_the_same_bits_however_many_programs_share_a_step() -> None:
    segments, found = BATCHES["beside decoding rows"], []
    rows = sum(count for _, _, count in segments)
    for programs in (200, 333):  # both cut K alike
        x, y = inputs(QKV, rows, torch.float32, 3)
        rig_of(torch.float32, programs=programs).step(segments, rows, fixed=False)(0, QKV, x, y)
        found.append(y)
    assert torch.equal(found[0], found[1])


def test_wider_adapters_than_a_strip_takes_go_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a strip")

    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.expand_strips", refuse)
    rig = Rig((DOWN,), (72, 8), torch.float32, TILING, max_rows=48)
    check_step(rig, lengths([(0, 21), (1, 20)]), (DOWN,), torch.float32, fixed=False, seed=4)


def plan(rig: Rig, segments: list[Segment], rows: int) -> None:
    """Put the list of a recorded step with prompt chunks where its launches read it."""
    rig.numbers[:] = 99
    rig.lora.plan(segments, rows, rig.numbers, fixed=True, prompts=True)
    rig.work.copy_(torch.from_numpy(rig.numbers))


def check_gate(
    rig: Rig,
    segments: list[Segment],
    dtype: torch.dtype,
    *,
    gelu: bool,
    seed: int,
    recorded: LoraLauncher | None = None,
) -> None:
    """Check that each number is the activation of what `apply` makes of y, up to a rounding of each of its factors, and
    that rows of the base have the very bits. `recorded`: launches that serve any step of these rows."""
    rows = sum(count for _, _, count in segments)
    x, y = inputs(GATE_UP, rows, dtype, seed)
    want = rig.arena.expected(1, GATE_UP, segments, x, y)
    base = [row for slot, first, count in segments if slot < 0 for row in range(first, first + count)]
    before = act_and_mul(y[base], gelu)
    if recorded is None:
        recorded = rig.launcher(segments, rows, fixed=False)
    else:
        plan(rig, segments, rows)
    rig.poison()
    found = recorded.gate(1, GATE_UP.key, x, y, gelu=gelu)
    assert found is not None
    assert torch.equal(found[base], before)
    gate, up = want[:, :WIDE], want[:, WIDE:]
    expected = (
        torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    ) * up
    slack = 2 * ROUNDING[dtype] * (expected.abs() + gate.abs() * up.abs()) + 1e-4 * want.abs().max()
    assert bool(((found.double() - expected).abs() <= slack).all())


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gate_and_up_with_their_activation(rig: Rig, batch: str, gelu: bool) -> None:
    """Strips and rows of the base and of decoding, which the same launch reads."""
    check_gate(rig, BATCHES[batch], torch.float32, gelu=gelu, seed=5)


def test_gate_and_up_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    repair_bfloat16(monkeypatch)
    rig = rig_of(torch.bfloat16, LoraTiling(strip_stages=3))
    check_gate(rig, BATCHES["beside decoding rows"], torch.bfloat16, gelu=False, seed=6)


def test_where_no_prompt_has_an_adapter_the_activation_is_left_to_its_own_launch(rig: Rig) -> None:
    segments = lengths([(0, 3), (-1, 30), (4, 2)])
    x, y = inputs(GATE_UP, 35, torch.float32, 7)
    before = y.clone()
    launcher = rig.launcher(segments, 35, fixed=False)
    assert launcher.gate(1, GATE_UP.key, x, y, gelu=False) is None
    assert torch.equal(y, before)
    x, y = inputs(QKV, 35, torch.float32, 7)
    assert launcher.gate(1, QKV.key, x, y, gelu=False) is None


def test_one_recording_serves_prompts_of_other_lengths_and_decoding_rows_alone(rig: Rig) -> None:
    """Hidden values are NaN before each launch. Steps of other lengths, other ranks, and without any prompt."""
    rows = 72
    recorded = rig.lora.recorded(rig.work, rows, prompts=True)
    steps = [
        lengths([(5, 50), (-1, 2), (3, 20)]),
        lengths([(-1, 30), (0, 17), (-1, 25)]),
        lengths([(4, 1), (1, 3), (6, 16), (-1, 52)]),
        lengths([(-1, 72)]),
        lengths([(2, 72)]),
    ]
    for replay, segments in enumerate(steps):
        check_gate(rig, segments, torch.float32, gelu=False, seed=replay, recorded=recorded)
        for group in (QKV, DOWN):
            x, y = inputs(group, rows, torch.float32, replay)
            want = rig.arena.expected(1, group, segments, x, y)
            rig.poison()
            recorded.apply(1, group.key, x, y)
            assert float((y.double() - want).abs().max()) <= 2e-5 * float(want.abs().max())


def test_recordings_of_decoding_rows_launch_no_large_pieces(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a strip")

    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.expand_strips", refuse)
    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.gated_strips", refuse)
    segments = lengths([(0, 3), (5, 30), (-1, 2)])
    check_step(rig, segments, (DOWN,), torch.float32, fixed=True, seed=8)
    x, y = inputs(GATE_UP, 35, torch.float32, 8)
    assert rig.launcher(segments, 35, fixed=True).gate(1, GATE_UP.key, x, y, gelu=False) is None


@pytest.mark.slow
def test_a_recorded_prompt_takes_one_launch_for_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's step of a prompt's chunk, recorded, by strips and by tiles: the same logits."""
    size = replace(SMALL.size, prompt_sizes=(24,))
    shape = replace(SMALL, size=size)
    tiles = StepBench(shape, torch.device("cpu"), Ceilings())
    strips = StepBench(shape, torch.device("cpu"), Ceilings(), model=tiles.rig.model, tiling=TILING)
    launches: Counter[str] = Counter()
    run_grid = GridExecutor.__call__

    def launch(self: GridExecutor, *arguments: object, **options: object) -> None:
        launches[self.fn.__name__] += 1
        run_grid(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    found = []
    for bench in (tiles, strips):
        launches.clear()
        with torch.inference_mode():
            found.append(bench.prompt_runs(20, 8)[1]().clone())
    torch.testing.assert_close(found[1], found[0])
    # Small pieces of each group and of the head are launched too, whatever the step.
    expected = {"gated_strips": 1, "expand_strips": 3, "expand": 5, "gated_program": 0}
    assert {name: launches[name] for name in expected} == expected
