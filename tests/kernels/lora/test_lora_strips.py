"""B sides of prompts by strips of columns, as a tiling with `strip_stages` has them, against the float64 formula."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.lora.site_groups import HEAD, SiteGroup
from loraplex.kernels.lora.triton_tiling import STRIP_TILES, LoraTiling
from loraplex.kernels.lora.types import Segment
from support.kernels.lora_arena import lengths
from support.kernels.triton_interpreter import repair_bfloat16
from support.lora_rig import Rig, check_step, inputs

WIDE = STRIP_TILES * 32 + 48
"""A strip and a part of one."""
QKV = SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (WIDE, 16, 16))
DOWN = SiteGroup("down", ("down_proj",), 80, (75,))
HEAD_GROUP = SiteGroup(HEAD, (f"{HEAD}.0", f"{HEAD}.1"), 40, (48, 19))
GROUPS = (QKV, DOWN, HEAD_GROUP)
# Small, so that small matrices have several units and planes.
TILING = LoraTiling(
    block_k=32, block_n=32, max_splits=2, planes=2, large_rows=32, large_block_k=16, large_block_n=32,
    expand_rows=16, strip_stages=3,
)  # fmt: skip
RANKS = (8, 16, 24, 32, 64, 40, {"q_proj": 8, "v_proj": 64})
DORA = (1, 4)
BATCHES: dict[str, list[Segment]] = {
    "prompts of one adapter each": lengths([(4, 21), (-1, 2), (1, 33), (6, 18)]),
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
