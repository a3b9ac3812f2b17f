"""Two ways to run the same step, in turns: what `--ab` of the suite compares."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.decoding.weight_forms import Codes, Floats, StoredAs
from bench.gpu.kv.codes import copy_to_codes
from bench.gpu.rig import RigSize
from bench.gpu.steps import FULL, SMALL, StepBench, StepsShape
from bench.gpu.timing import Ceilings, relative_error
from loraplex.kernels.lora.triton_tiling import LoraTiling

FULL_AB = replace(
    FULL,
    size=RigSize(
        max_rows=2048, max_sequences=256, max_len=1040, sizes=(64, 256), arena_bytes=6 << 30, slots=64, max_rank=16
    ),
)  # fmt: skip
SMALL_AB = SMALL
FULL_KV = tuple(
    replace(
        FULL,
        context=context,
        size=RigSize(
            max_rows=2048, max_sequences=64, max_len=context + 16, sizes=(64,), arena_bytes=1 << 30, slots=8,
            max_rank=16,
        ),
    )
    for context in (1024, 4096)
)  # fmt: skip
"""Both pools of the longer context and the model take 70 GB."""
FULL_WEIGHTS = replace(
    FULL,
    size=RigSize(
        max_rows=2048, max_sequences=64, max_len=1040, sizes=(1, 16, 64), arena_bytes=1 << 30, slots=8, max_rank=16
    ),
)  # fmt: skip
_ERROR = 0.1
"""The largest difference of the logits of a whole model, whose sums are taken in another order: five switches that
change nothing else differ by 0.04 to 0.05 in 32 layers of random bfloat16 weights, each kernel right beside float64 on
both sides."""
_CODES_ERROR = 0.3
"""The same where one side also rounds keys and values to 8-bit codes."""
_FLOATS_ERROR = 1.0
"""The same where one side also rounds the inputs of all linears to 8-bit floats."""


@dataclass(frozen=True)
class Switch:
    """`make` builds each side from the options of `StepBench`; the first is named `a`. `runs` gives the step that is
    timed, without adapters and with them. `begin` gets both benches before. `shares_kv`: both sides have one pool.
    `error`: of the logits, at most."""

    a: str
    b: str
    make_a: Callable[..., StepBench]
    make_b: Callable[..., StepBench]
    runs: Callable[[StepBench, int, int, int], list[Callable[[], torch.Tensor]]] = StepBench.decoding_runs
    begin: Callable[[StepBench, StepBench], None] = lambda a, b: None
    shares_kv: bool = True
    error: float = _ERROR


def _tiled(**changes: Any) -> Callable[..., StepBench]:
    def make(*arguments: Any, **options: Any) -> StepBench:
        return StepBench(*arguments, tiling=LoraTiling(**changes), **options)

    return make


def _prompts_recorded(shape: StepsShape, *arguments: Any, **options: Any) -> StepBench:
    size = replace(shape.size, prompt_sizes=tuple(2 * rows for rows in shape.size.sizes))
    return StepBench(replace(shape, size=size), *arguments, **options)


def _kv_in_codes(*arguments: Any, **options: Any) -> StepBench:
    return StepBench(*arguments, kv_dtype=torch.int8, **options)


def _copy_kv(a: StepBench, b: StepBench) -> None:
    copy_to_codes(a.rig.kv, b.rig.kv)


def _longest_prompt(
    bench: StepBench, rows: int, adapters: int, rank: int
) -> list[Callable[[], torch.Tensor]]:
    """A prompt of one adapter that fills a step."""
    return bench.prompt_runs(bench.shape.size.max_rows, rank)


SWITCHES: Mapping[str, Switch] = {
    "prompt-recordings": Switch(
        "prompt chunks launched one by one",
        "prompt chunks recorded",
        StepBench,
        _prompts_recorded,
        StepBench.mixed_runs,
    ),
    "columns": Switch(
        "B sides by 256 columns",
        "B sides by 512 columns",
        _tiled(block_n=256),
        _tiled(block_n=512),
    ),
    "gemv": Switch(
        "B sides of pieces of up to 16 rows",
        "B sides of up to 4 rows, a warp a program",
        _tiled(),
        _tiled(row_programs=12),
    ),
    "shrink": Switch(
        "A sides on tensor cores, B sides by rows",
        "A sides of one and two rows by rows too",
        _tiled(row_programs=12),
        _tiled(row_programs=12, row_block_k=1024),
    ),
    "early": Switch(
        "A sides begin when x is there, B sides by rows",
        "A sides begin early, and load their tiles first",
        _tiled(row_programs=12),
        _tiled(row_programs=12, early=True),
    ),
    "strips": Switch(
        "B sides of prompts by tiles",
        "B sides of prompts by strips",
        _tiled(),
        _tiled(strip_stages=3),
        _longest_prompt,
    ),
    "planes": Switch(
        "the A side by 256 of K in up to 16 planes",
        "the A side by 512 of K in up to 8 planes",
        _tiled(block_k=256, max_splits=16),
        _tiled(block_k=512, max_splits=8),
    ),
    "prompt-rows": Switch(
        "prompts expanded by 32 rows",
        "prompts expanded by 16 rows",
        _tiled(expand_rows=32),
        _tiled(expand_rows=16),
        _longest_prompt,
    ),
    "kv-codes": Switch(
        "keys and values in the model's dtype",
        "keys and values in 8-bit codes",
        StepBench,
        _kv_in_codes,
        begin=_copy_kv,
        shares_kv=False,
        error=_CODES_ERROR,
    ),
    "int4": Switch(
        "weights in the model's dtype",
        "the same in 4-bit codes",
        StoredAs(Codes(7, widened=True)),
        StoredAs(Codes(7, widened=False)),
    ),
    "humming": Switch(
        "weights in 4-bit codes, by Triton",
        "the same, by humming-kernels",
        StoredAs(Codes(7, widened=False)),
        StoredAs(Codes(7, widened=False, by_library=True)),
    ),
    "int8": Switch(
        "weights in the model's dtype",
        "the same in 8-bit codes",
        StoredAs(Codes(127, widened=True)),
        StoredAs(Codes(127, widened=False)),
    ),
    "fp8": Switch(
        "weights in the model's dtype",
        "the same in 8-bit floats, and activations",
        StoredAs(Floats(widened=True)),
        StoredAs(Floats(widened=False)),
        error=_FLOATS_ERROR,
    ),
}


class SwitchBench:
    """Both sides of one switch after the other, over one model and one KV cache."""

    def __init__(self, shape: StepsShape, device: torch.device, ceilings: Ceilings) -> None:
        self._made_from = shape, device, ceilings
        self._shared: dict[str, Any] = {}
        self._name = ""
        self._sides: tuple[StepBench, ...] = ()

    def compare(self, name: str, rows: int, adapters: int, rank: int) -> dict[str, Any]:
        """Times of one step in turns. `a_to_b`: how often as fast b is."""
        switch = SWITCHES[name]
        one, other = self._sides_of(name)
        base, a = switch.runs(one, rows, adapters, rank)
        _, b = switch.runs(other, rows, adapters, rank)
        with torch.inference_mode():
            before, after = a().clone(), b().clone()
            base_ms, a_ms, b_ms = one.watch.interleaved_ms([base, a, b])
        error = relative_error(after, before)
        return {
            "rows": rows,
            "adapters": adapters,
            "rank": rank,
            "context": one.shape.context,
            "a": switch.a,
            "b": switch.b,
            "base_ms": base_ms,
            "a_ms": a_ms,
            "b_ms": b_ms,
            "a_to_b": a_ms / b_ms,
            "error": error,
            "ok": error <= switch.error,
        }

    def _sides_of(self, name: str) -> tuple[StepBench, ...]:
        """The benches of a switch; those of another one give their memory back first."""
        if name != self._name:
            self._sides = ()
            gc.collect()
            switch = SWITCHES[name]
            one = switch.make_a(*self._made_from, **self._shared)
            self._shared = {"model": one.rig.model, "kv": one.rig.kv}
            shared = self._shared if switch.shares_kv else {"model": one.rig.model}
            other = switch.make_b(*self._made_from, **shared)
            switch.begin(one, other)
            self._sides, self._name = (one, other), name
        return self._sides
