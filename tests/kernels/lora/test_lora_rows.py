"""B sides of few rows without tensor cores, as a tiling with `row_programs` has them, against the float64 formula."""

from __future__ import annotations

import pytest
import torch

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


@pytest.fixture(scope="module")
def rig() -> Rig:
    return rig_of(torch.float32)


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
    check_step(rig_of(dtype, LoraTiling(row_programs=12)), batch, (QKV, DOWN), dtype, fixed=True, seed=2)


def test_twenty_replays_of_one_recording_leave_no_trace_of_each_other(rig: Rig) -> None:
    batches = [*BATCHES.values()][:3]
    for replay in range(20):
        segments = batches[replay % 3]
        check_step(rig, segments, (DOWN,), torch.float32, fixed=True, seed=replay)


def test_the_same_bits_however_many_programs_share_a_step() -> None:
    segments, found = BATCHES["pieces of four rows and their rests"], []
    rows = sum(count for _, _, count in segments)
    for programs in (200, 333):  # both cut K alike
        x, y = inputs(QKV, rows, torch.float32, 3)
        rig_of(torch.float32, programs=programs).step(segments, rows, fixed=True)(0, QKV, x, y)
        found.append(y)
    assert torch.equal(found[0], found[1])


def test_no_launch_of_small_pieces_takes_tensor_cores(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a B side on tensor cores")

    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.expand", refuse)
    check_step(rig, BATCHES["a row each"], (QKV,), torch.float32, fixed=True, seed=4)


def test_bits_that_depend_on_the_step_are_refused_where_they_must_not() -> None:
    with pytest.raises(ValueError, match="another order"):
        LoraTiling(row_programs=12, batch_invariant=True)
    assert INVARIANT_TILING.row_programs == 0


def test_a_thread_gets_the_registers_that_let_all_programs_fit() -> None:
    found = {
        programs: LoraTiling(row_programs=programs).expand_registers(True) for programs in (1, 8, 12, 16)
    }
    assert found == {1: 248, 8: 248, 12: 168, 16: 128}
