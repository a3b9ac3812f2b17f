"""Two ways to run the same step, in turns: what `--ab` of the suite compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.rig import RigSize
from bench.gpu.steps import FULL, SMALL, StepBench, StepsShape
from bench.gpu.timing import Ceilings, relative_error
from loraplex.kernels.lora.triton_tiling import LoraTiling

FULL_AB = replace(
    FULL,
    size=RigSize(
        max_rows=512, max_sequences=256, max_len=1040, sizes=(64, 256), arena_bytes=6 << 30, slots=64, max_rank=16
    ),
)  # fmt: skip
SMALL_AB = SMALL
_ERROR = 2e-2
"""Of the logits of a whole model: sums are taken in another order."""


@dataclass(frozen=True)
class Switch:
    """`make` builds each side from the options of `StepBench`; the first is named `a`. `mixed`: of steps with a prompt
    chunk, else of decoding."""

    a: str
    b: str
    make_a: Callable[..., StepBench]
    make_b: Callable[..., StepBench]
    mixed: bool = False


def _tiled(**changes: Any) -> Callable[..., StepBench]:
    def make(*arguments: Any, **options: Any) -> StepBench:
        return StepBench(*arguments, tiling=LoraTiling(**changes), **options)

    return make


def _on_a_stream(*arguments: Any, **options: Any) -> StepBench:
    bench = StepBench(*arguments, **options)
    bench.record_beside()
    return bench


def _prompts_recorded(shape: StepsShape, *arguments: Any, **options: Any) -> StepBench:
    size = replace(shape.size, prompt_sizes=tuple(2 * rows for rows in shape.size.sizes))
    return StepBench(replace(shape, size=size), *arguments, **options)


SWITCHES: Mapping[str, Switch] = {
    "programs": Switch(
        "3 LoRA programs a multiprocessor",
        "4 LoRA programs a multiprocessor",
        _tiled(shrink_programs=3, expand_programs=3),
        _tiled(shrink_programs=4, expand_programs=4),
    ),
    "splits": Switch(
        "planes of K by the site",
        "planes of K by the step's pieces",
        _tiled(splits_by_work=False),
        _tiled(splits_by_work=True),
    ),
    "rows": Switch(
        "the A side of single rows without tensor cores",
        "the A side on tensor cores",
        _tiled(shrink_by_rows=True),
        _tiled(shrink_by_rows=False),
    ),
    "fused": Switch(
        "B sides by themselves",
        "B sides in what reads them",
        _tiled(fuse_rotary=False, fuse_gated=False, fuse_norm_rows=0),
        _tiled(fuse_norm_rows=256),
    ),
    "pdl": Switch(
        "the B side behind the A side",
        "the B side launched while the A side runs",
        _tiled(dependent_launch=False),
        _tiled(dependent_launch=True),
    ),
    "side-stream": Switch("A side in line", "A side on a stream of its own", StepBench, _on_a_stream),
    "prompt-recordings": Switch(
        "prompt chunks launched one by one",
        "prompt chunks recorded",
        StepBench,
        _prompts_recorded,
        mixed=True,
    ),
}


class SwitchBench:
    """Both sides of a switch over one model and one KV cache."""

    def __init__(self, name: str, shape: StepsShape, device: torch.device, ceilings: Ceilings) -> None:
        self._switch = SWITCHES[name]
        self._a = self._switch.make_a(shape, device, ceilings)
        rig = self._a.rig
        self._b = self._switch.make_b(shape, device, ceilings, model=rig.model, kv=rig.kv)

    def compare(self, rows: int, adapters: int, rank: int) -> dict[str, Any]:
        """Times of one step in turns. `a_to_b`: how often as fast b is."""
        make = StepBench.mixed_runs if self._switch.mixed else StepBench.decoding_runs
        base, a = make(self._a, rows, adapters, rank)
        _, b = make(self._b, rows, adapters, rank)
        with torch.inference_mode():
            before, after = a().clone(), b().clone()
            base_ms, a_ms, b_ms = self._a.watch.interleaved_ms([base, a, b])
        error = relative_error(after, before)
        return {
            "rows": rows,
            "adapters": adapters,
            "rank": rank,
            "a": self._switch.a,
            "b": self._switch.b,
            "base_ms": base_ms,
            "a_ms": a_ms,
            "b_ms": b_ms,
            "a_to_b": a_ms / b_ms,
            "error": error,
            "ok": error <= _ERROR,
        }
