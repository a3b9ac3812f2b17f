"""Cases of the first ten minutes on a GPU, in their order: the forms of batched LoRA, apart and in steps.

The catalogue functions take the titles of the wheels of `bench.gpu.lora_peers`.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu.case import Bench, Case, Row, Skipped
from bench.gpu.catalogue import ceilings, switched
from bench.gpu.decoding.switches import FULL_AB, SMALL_AB
from bench.gpu.lora import (
    LLAMA_8B,
    SMALL,
    TOLERANCE,
    Batch,
    LoraCase,
    cold_layers,
    distinct,
    engine_cases,
    run_case,
    small_cases,
)  # fmt: skip
from bench.gpu.lora_peers import cases as peers
from bench.gpu.timing import relative_error
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_lora import LoraLauncher
from loraplex.kernels.lora.triton_tiling import LoraTiling
from support.kernels.lora_arena import make_arena

BLOCKS = {
    "compiled": 60.0,
    "right": 70.0,
    "kernels": 120.0,
    "counters": 50.0,
    "peers": 50.0,
    "strips": 60.0,
    "ab": 140.0,
}
"""Seconds by section. Cases that one leaves come last, in the time that is left of the ten minutes."""
AS_IT_IS = "as it is"
FORMS: Mapping[str, Mapping[str, Any]] = {
    AS_IT_IS: {},
    "B sides with 128 registers": {"expand_programs": 4},
    "B sides by rows, 12 programs": {"row_programs": 12},
    "B sides by rows, 8 programs": {"row_programs": 8},
    "B sides by rows, 16 programs": {"row_programs": 16},
}
"""Forms of small pieces: what each changes of the default tiling."""
NEW = "B sides by rows, 12 programs"
"""The form that is predicted to win."""
ROWS_A, EARLY_A = "A sides by rows", "A sides early"
FORMS_A: Mapping[str, Mapping[str, Any]] = {
    ROWS_A: {"row_block_k": 1024},
    EARLY_A: {"early": True},
    "both sides by rows, A sides early": {"row_programs": 12, "row_block_k": 1024, "early": True},
}
"""Forms of A sides."""
PROMPT_FORMS: Mapping[str, Mapping[str, Any]] = {
    AS_IT_IS: {},
    "strips, 3 stages": {"strip_stages": 3},
    "strips, 2 stages": {"strip_stages": 2},
    "strips, 1 stage": {"strip_stages": 1},
    "strips by 64 columns, 3 stages": {"strip_stages": 3, "large_block_n": 64},
}
"""Forms of large pieces."""
STRIPS = "strips, 3 stages"
SWITCHES = ("gemv",)
"""Switches of decoding steps."""
SWITCHES_A = ("early",)
"""Switches of decoding steps of 64 rows."""
PROMPT_SWITCHES = ("strips",)
CELLS = ((64, 64, 16), (64, 8, 16), (256, 64, 16), (64, 64, 64))
"""(rows, adapters, rank) of kernels apart."""
STEPS = ((64, 8, 16), (64, 64, 16), (256, 64, 16), (256, 8, 16))
"""(rows, adapters, rank) of whole steps."""
_METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "scoreboard": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
}
_REPLAYS = 20
_REPLAYS_INTERPRETED = 3
_COUNTING_S = 40.0
"""Seconds that Nsight Compute may take for a case: its process ends with the worker's."""


def full(*titles: str) -> list[Case]:
    groups = {group.key: group for group in LLAMA_8B}
    kernels = [_decoding(groups["gate_up"], cell, form) for cell in CELLS for form in FORMS]
    kernels += [_decoding(groups["gate_up"], cell, form) for cell in CELLS[:2] for form in FORMS_A]
    kernels += [_decoding(groups[key], CELLS[0], form) for key in ("qkv", "down") for form in (AS_IT_IS, NEW)]
    prompts = [
        LoraCase(
            f"{rows} rows, rank {rank}: {form}", LLAMA_8B, (rank,), ((0, rows),), tiling=_tiling(changes)
        )
        for rows, rank in ((2048, 16), (512, 16), (2048, 64))
        for form, changes in PROMPT_FORMS.items()
    ]
    steps = switched([FULL_AB], SWITCHES, STEPS) + switched([FULL_AB], SWITCHES_A, STEPS[:2])
    steps += switched([FULL_AB], PROMPT_SWITCHES, [(64, 1, 16)])
    return _blocks("full", titles, engine_cases(small=False), kernels, prompts, steps)


def small(*titles: str) -> list[Case]:
    """All kinds of cases, on tiny shapes, interpreted."""
    kernels = [replace(_decoding(SMALL[0], (4, 2, 8), form), dtype=torch.float32) for form in (AS_IT_IS, NEW)]
    prompts = [
        LoraCase(
            f"40 rows, rank 16: {form}", SMALL[:1], (16,), ((0, 40),), dtype=torch.float32, tiling=tiling
        )
        for form, tiling in ((form, _tiling(PROMPT_FORMS[form])) for form in (AS_IT_IS, STRIPS))
    ]
    steps = switched([SMALL_AB], SWITCHES, [(2, 2, 8)]) + switched([SMALL_AB], PROMPT_SWITCHES, [(2, 1, 8)])
    (decode, _) = small_cases()
    by_rows = replace(decode.tiling, row_programs=12, row_block_k=64, early=True)
    by_strips = replace(decode.tiling, strip_stages=3)
    gated = SiteGroup("gate_up", ("gate_proj", "up_proj"), 48, (48, 48))
    rows = ((0, 1), (1, 37), (-1, 2))
    right = [
        decode,
        replace(decode, name=f"{decode.name}, by rows", tiling=by_rows),
        LoraCase(
            "small mix, by strips",
            (gated,),
            (8, 24),
            rows,
            dtype=torch.float32,
            max_rank=32,
            tiling=by_strips,
        ),
    ]
    return _blocks("small", titles, right, kernels, prompts, steps)


def _blocks(
    size: str,
    titles: Sequence[str],
    right: Sequence[LoraCase],
    kernels: Sequence[LoraCase],
    prompts: Sequence[LoraCase],
    steps: Sequence[Case],
) -> list[Case]:
    def beside(section: str, case: LoraCase, run: Callable[[LoraCase, Bench], Row]) -> Case:
        return Case(section, case.name, partial(run, case), 120, alone=False)

    names = kernels[0].name, kernels[0].name.replace(AS_IT_IS, NEW)
    watched = [case for case in kernels if case.name in names]
    return [
        *(
            beside("compiled", case, compile_case)
            for case in [*kernels, *prompts, *_beside_peers(size, titles)]
        ),
        Case("compiled", "device", ceilings),
        *(beside("right", case, _check) for case in right),
        *(
            beside("right", replace(case, name=f"replays, {case.name}"), check_replays)
            for case in right
            if case.num_rows <= case.tiling.max_small_rows
        ),
        *(
            beside("right", replace(case, name=f"prompts recorded, {case.name}"), check_gate)
            for case in right
            if case.tiling.strip_stages and any(count > case.tiling.small_rows for _, count in case.rows)
        ),
        *(Case("kernels", case.name, partial(_time, case)) for case in kernels),
        *(
            Case("counters", case.name, partial(count, size, f"compiled/{case.name}"), _COUNTING_S)
            for case in watched
        ),
        *(peers.small(*titles) if size == "small" else peers.full(*titles)),
        *(Case("strips", case.name, partial(_time, case)) for case in prompts),
        *steps,
    ]


def _beside_peers(size: str, titles: Sequence[str]) -> list[LoraCase]:
    """The cases in which the kernels here run beside those of wheels."""
    cases = peers.small_cases() if size == "small" else peers.full_cases()
    return [
        replace(case, name=f"beside others, {case.name}: {name}", tiling=tiling)
        for case in (cases if titles else ())
        for name, tiling in peers.OURS.items()
    ]


def _decoding(group: SiteGroup, cell: tuple[int, int, int], form: str) -> LoraCase:
    rows, adapters, rank = cell
    name = f"{group.key}, {rows} rows of {adapters}, rank {rank}: {form}"
    tiling = _tiling({**FORMS, **FORMS_A}[form])
    return LoraCase(name, (group,), (rank,) * adapters, distinct(rows, adapters), tiling=tiling)


def _tiling(changes: Mapping[str, Any]) -> LoraTiling:
    return LoraTiling(**changes)


def _check(case: LoraCase, bench: Bench) -> Row:
    return run_case(case, bench.device)


def _time(case: LoraCase, bench: Bench) -> Row:
    return run_case(case, bench.device, bench.ceilings)


def compile_case(case: LoraCase, bench: Bench) -> Row:
    """Launch everything of a case once, over as many layers as when it is timed, which kernels are compiled for."""
    layers = cold_layers(case) if bench.device.type == "cuda" else 2
    batch = _batch(case, layers, bench.device)
    begun = time.perf_counter()
    for group, (x, y) in batch.tensors(0).items():
        batch.launcher.apply(0, group, x, y)
        batch.lora.recorded(batch.recorded, case.num_rows).apply(0, group, x, y)
    bench.watch.synchronize()
    return {"case": case.name, "seconds": time.perf_counter() - begun}


def check_replays(case: LoraCase, bench: Bench) -> Row:
    """Compare replays of a decoding step's recording with float64, as `_replayed` does."""
    batch = _batch(case, 2, bench.device)
    error = max(_replayed(batch, group, bench, prompts=False) for group in case.groups)
    return {"case": case.name, "error": error, "ok": error <= TOLERANCE[case.dtype]}


def check_gate(case: LoraCase, bench: Bench) -> Row:
    """Compare a step with prompts with float64, launched for the step itself over hidden values that are NaN, and
    recorded, as `_replayed` does. It is not `ok` either where gate and up do not go with their activation."""
    batch, errors, gated = _batch(case, 2, bench.device), [], False
    for group in case.groups:
        x, y = batch.tensors(0)[group.key]
        want = batch.arena.expected(0, group, case.segments, x, y)
        batch.poison()
        got = _launch(batch.launcher, group.key, x, y.clone())
        gated |= got.shape != want.shape
        errors += [_error(got, want), _replayed(batch, group, bench, prompts=True)]
    return {"case": case.name, "error": max(errors), "ok": gated and max(errors) <= TOLERANCE[case.dtype]}


def _replayed(batch: Batch, group: SiteGroup, bench: Bench, *, prompts: bool) -> float:
    """The largest error of replays of one recording, made while its list was empty; before each, hidden values, x, y
    and the activation are NaN. The kernels right before make x, then y, so that an A side that begins early must wait
    for both. `prompts`: the recording has launches for large pieces."""
    case = batch.case
    launcher = batch.lora.recorded(batch.recorded, case.num_rows, prompts=prompts)
    given = [tensor.clone() for tensor in batch.tensors(0)[group.key]]
    made = [tensor.clone() for tensor in given]
    found: list[torch.Tensor] = []

    def layer() -> None:
        for source, tensor in zip(given, made, strict=True):
            torch.mul(source, 1.0, out=tensor)
        found[:] = [_launch(launcher, group.key, *made)]

    batch.recorded.zero_()
    replay = bench.record(layer)
    batch.lora.plan(case.segments, case.num_rows, batch.host, fixed=True, prompts=prompts)
    batch.recorded.copy_(torch.from_numpy(batch.host))
    errors = []
    for seed in range(_REPLAYS if bench.device.type == "cuda" else _REPLAYS_INTERPRETED):
        for source, drawn in zip(given, batch.tensors(seed)[group.key], strict=True):
            source.copy_(drawn)
        want = batch.arena.expected(0, group, case.segments, *given)
        for tensor in (*made, *found):
            tensor.fill_(float("nan"))
        batch.poison()
        replay()
        errors.append(_error(found[0], want))
    return max(errors)


def _launch(launcher: LoraLauncher, group: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Launch what the engine does for a layer's group. Return the activation of gate and up where it is offered, else
    y."""
    gated = launcher.gate(0, group, x, y, gelu=False)
    if gated is None:
        launcher.apply(0, group, x, y)
    return y if gated is None else gated


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The error of y, or of the activation of gate and up, where `want` is y in float64."""
    if got.shape != want.shape:
        gate, up = want.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
    return relative_error(got, want)


def _batch(case: LoraCase, layers: int, device: torch.device) -> Batch:
    arena = make_arena(
        case.groups, layers, case.dtype, case.ranks, max_rank=case.max_rank, dora=case.dora, device=device
    )
    return Batch(case, arena, device)


def count(size: str, key: str, bench: Bench) -> list[Row]:
    """Counters of the kernels that the case `key` launches, by Nsight Compute: a row for the first launch of each
    kernel, as later ones have empty lists. Raises Skipped where that is not installed, or may not count. It has no
    limit of its own: its processes are of the worker's group, which the suite ends whole."""
    tool = shutil.which("ncu")
    if tool is None:
        raise Skipped("ncu, Nsight Compute's command, is not installed")
    bench.drop()
    command = [
        tool, "--csv", "--page", "raw", "--clock-control", "none", "--target-processes", "all",
        "--kernel-name", "regex:shrink|expand", "--launch-count", "4", "--metrics", ",".join(_METRICS.values()),
        sys.executable, "-m", "bench.gpu.worker", f"{__name__}:{size}",
    ]  # fmt: skip
    done = subprocess.run(command, input=json.dumps(key) + "\n", capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise Skipped(f"ncu counted nothing: {(done.stdout + done.stderr)[-400:].strip()}")
    found: dict[str, Row] = {}
    for line in csv.DictReader(lines):
        if line["ID"]:  # the line below the heading has units
            values = {name: float(line[metric].replace(",", "")) for name, metric in _METRICS.items()}
            kernel = line["Kernel Name"]
            found.setdefault(kernel, {"case": key.partition("/")[2], "kernel": kernel, **values})
    return list(found.values())
