"""A and B sides of few rows without tensor cores, and A sides that begin early, against the float64 formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.language.extra import cuda

from loraplex.kernels.lora import triton_lora, triton_shrink
from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_tiling import INVARIANT_TILING, LoraTiling
from loraplex.kernels.lora.types import Segment
from support.kernels.lora_arena import decode, lengths
from support.kernels.triton_interpreter import repair_bfloat16
from support.lora_rig import Rig, check_step, inputs

QKV = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16))
DOWN = SiteGroup("down", ("down_proj",), 80, (75,))
HEAD_GROUP = SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1"), 40, (48, 19))
GROUPS = (QKV, DOWN, HEAD_GROUP)
# Small, so that small matrices have several units and planes.
TILING = LoraTiling(
    block_k=32, block_n=32, max_splits=2, large_rows=32, large_block_k=32, large_block_n=32,
    large_blocks_r=(16, 32), expand_rows=16, row_programs=12,
)  # fmt: skip
BOTH_SIDES = replace(TILING, row_block_k=64)
RANKS = (8, 16, 24, 32, 64, 40, {"q_proj": 8, "v_proj": 32})
DORA = (1, 4)
BATCHES: dict[str, list[Segment]] = {
    "a row each": decode([*range(7), -1]),
    "pieces of four rows and their rests": lengths(
        [(4, 9), (-1, 2), (1, 4), (0, 1), (3, 7), (6, 2), (1, 16)]
    ),
    "base alone": decode([-1, -1]),
    "beside a prompt": lengths([(2, 3), (5, 21), (1, 5), (-1, 1), (0, 1)]),
}

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def rig_of(dtype: torch.dtype, tiling: LoraTiling = TILING, programs: int = 5) -> Rig:
    return Rig(GROUPS, RANKS, dtype, tiling, dora=DORA, programs=programs)


@pytest.fixture(scope="module", params=[TILING, BOTH_SIDES], ids=["B sides", "both sides"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return rig_of(torch.float32, request.param)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_formula(rig: Rig, batch: str, fixed: bool) -> None:
    """Ranks 8 to 64, mixed within an adapter too, DoRA's vectors, rows of the base, the head's shared hidden values."""
    check_step(rig, BATCHES[batch], GROUPS, torch.float32, fixed=fixed, seed=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The tiles are those that run on a GPU."""
    repair_bfloat16(monkeypatch)
    batch = BATCHES["pieces of four rows and their rests"]
    tiling = LoraTiling(row_programs=12, row_block_k=1024)
    check_step(rig_of(dtype, tiling), batch, (QKV, DOWN), dtype, fixed=True, seed=2)


def test_twenty_replays_of_one_recording_leave_no_trace_of_each_other(rig: Rig) -> None:
    batches = [*BATCHES.values()][:3]
    for replay in range(20):
        segments = batches[replay % 3]
        check_step(rig, segments, (DOWN,), torch.float32, fixed=True, seed=replay)


@pytest.mark.parametrize("tiling", [TILING, BOTH_SIDES], ids=["B sides", "both sides"])
def test_the_same_bits_however_many_programs_share_a_step(tiling: LoraTiling) -> None:
    segments, found = BATCHES["pieces of four rows and their rests"], []
    rows = sum(count for _, _, count in segments)
    for programs in (200, 333):  # both cut K alike
        x, y = inputs(QKV, rows, torch.float32, 3)
        rig_of(torch.float32, tiling, programs).step(segments, rows, fixed=True)(0, QKV, x, y)
        found.append(y)
    assert torch.equal(found[0], found[1])


def test_no_launch_of_small_pieces_takes_tensor_cores(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a B side on tensor cores")

    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.expand", refuse)
    check_step(rig, BATCHES["a row each"], (QKV,), torch.float32, fixed=True, seed=4)


def test_a_sides_of_one_and_two_rows_take_no_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk: list[int] = []

    def refuse(*arguments: object) -> None:
        shrunk.append(int(arguments[5]))  # num_rows
        raise ValueError("on tensor cores")

    monkeypatch.setattr(triton_shrink, "_shrunk", refuse)
    rig = rig_of(torch.float32, BOTH_SIDES)
    check_step(rig, lengths([(0, 1), (4, 2), (-1, 1), (3, 1)]), (QKV,), torch.float32, fixed=True, seed=5)
    with pytest.raises(Exception, match="on tensor cores"):
        check_step(rig, lengths([(1, 3)]), (QKV,), torch.float32, fixed=True, seed=6)
    assert shrunk == [3]


@pytest.mark.parametrize("tiling", [{"row_programs": 12}, {"row_block_k": 512}])
def test_bits_that_depend_on_the_step_are_refused_where_they_must_not(tiling: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="another order"):
        LoraTiling(**tiling, batch_invariant=True)
    assert INVARIANT_TILING.row_programs == INVARIANT_TILING.row_block_k == 0


@pytest.mark.parametrize("columns", [256, 768])
def test_blocks_by_rows_are_whole_blocks(columns: int) -> None:
    with pytest.raises(ValueError, match="columns by rows"):
        LoraTiling(row_block_k=columns)


def test_planes_are_of_whole_blocks_by_rows() -> None:
    tiling = LoraTiling(row_block_k=1024)
    assert [tiling.split(4096, wanted) for wanted in (1, 3, 9)] == [(4096, 1), (1024, 4), (1024, 4)]
    assert tiling.split(14336, 9) == (2048, 7)


class LaunchBefore:
    """The kernel before the one that runs, which ends when that waits for it: then `left` gets what it holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        monkeypatch.setattr(cuda, "gdc_wait", self._end)
        monkeypatch.setattr(cuda, "gdc_launch_dependents", lambda: None)
        monkeypatch.setattr(triton_shrink, "_fetch", lambda *_: None)  # moves nothing that is read
        monkeypatch.setattr(triton_lora, "_launches_dependents", lambda _: True)

    def leaves(self, *tensors: torch.Tensor) -> None:
        """These are NaN until it has ended."""
        self._left = [(tensor, tensor.clone()) for tensor in tensors]
        self.waits = 0
        for tensor in tensors:
            tensor.fill_(float("nan"))

    def _end(self) -> None:
        self.waits += 1
        for tensor, values in self._left:
            tensor.copy_(values)
        self._left = []


EARLY = {
    "as today": LoraTiling(),
    "B sides by rows": LoraTiling(row_programs=12),
    "early": LoraTiling(early=True),
    "early, both sides by rows": LoraTiling(row_programs=12, row_block_k=1024, early=True),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_the_launch_before_leaves_is_read_behind_the_wait_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x by an A side that begins early; y, which the base's product has left before it, and hidden values by a B side.
    Each program waits, whether it has an item or not: what comes next relies upon it."""
    before, tiling = LaunchBefore(monkeypatch), EARLY[name]
    rig = rig_of(torch.float32, tiling)
    hidden = rig.scratch.buffer("lora hidden", (rig.lora.hidden_size,), torch.float32)
    programs = 5
    # Pieces of one kind each, so that the first program is one of that kind.
    for slot, count in ((1, 1), (0, 2), (3, 5), (-1, 1)):
        segments = [(slot, 0, count), (-1, count, 6 - count)]
        launcher = rig.launcher(segments, 6, fixed=True)
        x, y = inputs(QKV, 6, torch.float32, 7)
        want = rig.arena.expected(1, QKV, segments, x, y)
        if tiling.early:
            before.leaves(x)
        launcher.shrink(1, "qkv", x)
        assert before.waits >= (programs if tiling.early else 0)
        before.leaves(y, hidden)
        launcher.expand(1, "qkv", y)
        assert before.waits >= programs
        assert bool(((y.double() - want).abs() <= 1e-4 * want.abs().max()).all())


def test_a_thread_gets_the_registers_that_let_all_programs_fit() -> None:
    found = {
        programs: LoraTiling(row_programs=programs).expand_registers(True) for programs in (1, 8, 12, 16)
    }
    assert found == {1: 248, 8: 248, 12: 168, 16: 128}
