"""Batched LoRA in Triton with a batch-invariant tiling: a row has the same bits in every step that computes it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Scratch, Segment
from support.kernels.lora_arena import ManualArena, lengths, make_arena

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), 48, (48, 16, 16)),
    SiteGroup("down", ("down_proj",), 300, (48,)),
)
RANKS = (8, 40, 8, 72, {"q_proj": 8, "down_proj": 16})
OWN = 1
BY_STEP = LoraTiling(
    block_k=32, block_n=32, max_splits=2, planes=2, large_rows=32, large_block_k=16, large_block_n=32,
    large_blocks_r=(16, 32), expand_rows=16, max_small_rows=24,
)  # fmt: skip
INVARIANT = replace(BY_STEP, batch_invariant=True)
PROMPT = 37

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def lora_of(arena: ManualArena, tiling: LoraTiling, programs: int) -> TritonLora:
    scratch = Scratch(DEVICE)
    lora = TritonLora(arena.weights, scratch, max_rows=80, max_segments=12, tiling=tiling, programs=programs)
    scratch.buffer("lora hidden", (lora.hidden_size,), torch.float32).fill_(float("nan"))
    for slot in range(len(RANKS)):
        lora.write(slot)
    return lora


def apply(
    lora: TritonLora,
    group: SiteGroup,
    segments: Sequence[Segment],
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    fixed: bool,
) -> torch.Tensor:
    """As a step plans and launches it, or as a recorded one does."""
    numbers = np.zeros(lora.work_size, np.int32)
    step = lora.plan(segments, x.shape[0], numbers, fixed=fixed)
    work = torch.from_numpy(numbers).to(DEVICE)
    slots = [slot for slot, _, _ in segments if slot >= 0]
    launcher = lora.recorded(work, x.shape[0]) if fixed else lora.launcher(work, step, slots)
    y = y.clone()
    launcher.apply(0, group.key, x, y)
    return y


def differing(tiling: LoraTiling, dtype: torch.dtype, seed: int = 0) -> set[int]:
    """The rows of a prompt whose bits differ between the whole prompt alone, and parts of it among others."""
    rng = random.Random(seed)
    arena = make_arena(GROUPS, 1, dtype, RANKS, dora=(OWN,), device=DEVICE)
    wrong: set[int] = set()
    for group in GROUPS:
        x = torch.randn(PROMPT, group.in_features, generator=torch.Generator().manual_seed(seed))
        y = torch.randn(PROMPT, sum(group.out_features), generator=torch.Generator().manual_seed(seed + 1))
        x, y = x.to(DEVICE, dtype), y.to(DEVICE, dtype)
        whole = apply(lora_of(arena, tiling, 3), group, [(OWN, 0, PROMPT)], x, y, fixed=False)
        assert whole.isfinite().all()
        for first, count in ((0, 1), (3, 17), (9, 28)):
            before, *behind = rng.sample(
                [(0, 1), (0, 21), (2, 2), (3, 5), (3, 1), (4, 1), (-1, 3), (OWN, 2)], 4
            )
            parts = [before, (OWN, count), *behind]
            rows = sum(number for _, number in parts)
            start = before[1]
            wide_x = torch.randn(rows, x.shape[1]).to(DEVICE, dtype)
            wide_y = torch.randn(rows, y.shape[1]).to(DEVICE, dtype)
            wide_x[start : start + count] = x[first : first + count]
            wide_y[start : start + count] = y[first : first + count]
            lora = lora_of(arena, tiling, rng.choice((1, 3, 200)))
            for fixed in (False, True):
                got = apply(lora, group, lengths(parts), wide_x, wide_y, fixed=fixed)
                same = (got[start : start + count] == whole[first : first + count]).all(-1)
                wrong |= {first + int(at) for at in (~same).nonzero()}
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_whole_in_chunks_and_beside_any_adapters(dtype: torch.dtype) -> None:
    assert differing(INVARIANT, dtype) == set()


def test_a_tiling_by_the_step_has_others() -> None:
    """What the test above would find."""
    assert len(differing(BY_STEP, torch.float32)) > 20


def test_one_shrink_and_one_expand_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set()

    class Launch:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]):  # type: ignore[no-untyped-def]
            return lambda *args, **constants: launched.add((self.name, *sorted(constants.items())))

    arena = make_arena(GROUPS, 1, torch.float32, RANKS, device=DEVICE)
    lora = lora_of(arena, INVARIANT, 3)
    for name in ("shrink", "expand"):
        monkeypatch.setattr(f"loraplex.kernels.lora.triton_lora.{name}", Launch(name))
    lora.warm_up(torch.float32)
    warm = set(launched)
    assert len(warm) == 2
    x, y = torch.zeros(70, 48), torch.zeros(70, 80)
    for rows, slot in ((1, 0), (3, 3), (70, 1)):
        for fixed in (False, True):
            apply(lora, GROUPS[0], [(slot, 0, rows)], x[:rows], y[:rows], fixed=fixed)
    assert launched == warm
