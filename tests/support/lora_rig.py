"""Batched LoRA in Triton over an arena, against the float64 formula, over hidden values that are NaN before a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import LoraLauncher, TritonLora
from loraplex.kernels.lora.triton_tiling import LoraTiling
from loraplex.kernels.lora.types import Scratch, Segment
from support.kernels.lora_arena import ManualArena, Rank, make_arena

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}

Apply = Callable[[int, SiteGroup, torch.Tensor, torch.Tensor], None]


class Rig:
    """An arena of an adapter a slot and its launches, for steps of up to `max_rows` rows."""

    def __init__(
        self,
        groups: Sequence[SiteGroup],
        ranks: Sequence[Rank],
        dtype: torch.dtype,
        tiling: LoraTiling,
        *,
        dora: Collection[int] = (),
        programs: int = 5,
        max_rows: int = 48,
    ) -> None:
        self.arena: ManualArena = make_arena(groups, 2, dtype, ranks, dora=dora, device=DEVICE)
        self.scratch = Scratch(DEVICE)
        self.lora = TritonLora(
            self.arena.weights,
            self.scratch,
            max_rows=max_rows,
            max_segments=12,
            tiling=tiling,
            programs=programs,
        )
        for slot in range(len(ranks)):
            self.lora.write(slot)
        self.numbers = np.zeros(self.lora.work_size, np.int32)
        self.work = torch.zeros(self.lora.work_size, dtype=torch.int32, device=DEVICE)

    def poison(self) -> None:
        self.scratch.buffer("lora hidden", (self.lora.hidden_size,), torch.float32).fill_(float("nan"))

    def launcher(self, segments: Sequence[Segment], rows: int, *, fixed: bool) -> LoraLauncher:
        """The launches of a step, planned as for a recording or as for itself."""
        self.numbers[:] = 99  # whatever the step before left behind its list
        step = self.lora.plan(segments, rows, self.numbers, fixed=fixed)
        self.work.copy_(torch.from_numpy(self.numbers))
        slots = [slot for slot, _, _ in segments if slot >= 0]
        return self.lora.recorded(self.work, rows) if fixed else self.lora.launcher(self.work, step, slots)

    def step(self, segments: Sequence[Segment], rows: int, *, fixed: bool) -> Apply:
        """Plan a step, as for a recording or as for itself, and return what applies its adapters."""
        launcher = self.launcher(segments, rows, fixed=fixed)

        def apply(layer: int, group: SiteGroup, x: torch.Tensor, y: torch.Tensor) -> None:
            self.poison()
            launcher.apply(layer, group.key, x, y)

        return apply


def inputs(group: SiteGroup, rows: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, group.in_features, generator=generator)
    y = torch.randn(rows, sum(group.out_features), generator=generator)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def check_step(
    rig: Rig,
    segments: Sequence[Segment],
    groups: Sequence[SiteGroup],
    dtype: torch.dtype,
    *,
    fixed: bool,
    seed: int,
) -> None:
    """Check that y is as near to the float64 sum as its dtype is, except what float32 sums lose, and that rows of the
    base keep their bits."""
    rows = sum(count for _, _, count in segments)
    apply = rig.step(segments, rows, fixed=fixed)
    base = [row for slot, first, count in segments if slot < 0 for row in range(first, first + count)]
    for group in groups:
        x, y = inputs(group, rows, dtype, seed)
        before, want = y.clone(), rig.arena.expected(1, group, segments, x, y)
        apply(1, group, x, y)
        error = (y.double() - want).abs()
        assert bool(y.isfinite().all())
        assert bool((error <= ROUNDING[dtype] * want.abs() + 2e-5 * want.abs().max()).all()), float(
            error.max()
        )
        assert torch.equal(y[base], before[base])
