"""LoRA kernels of vLLM and of SGLang beside those here: one group's A and B sides, beside float64, then in turns.

The catalogue functions are called by `bench.gpu.worker` with the titles of the wheels, and find those unpacked in the
folder that FOLDER names in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.gpu.case import Bench, Case, Row, Skipped
from bench.gpu.lora import LLAMA_8B, SMALL, TOLERANCE, Batch, LoraCase, cold_layers, distinct
from bench.gpu.lora_peers.contenders import Contender, ours, read_matrices, theirs
from bench.gpu.lora_peers.wheels import imported, unpacked
from bench.gpu.timing import relative_error
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.triton_tiling import LoraTiling
from support.kernels.lora_arena import make_arena

FOLDER = "LORA_PEERS"
"""The environment's variable with the folder that `wheels.unpack` unpacked into."""
AS_IT_IS = "as it is"
OURS = {
    AS_IT_IS: LoraTiling(),
    "by rows and by strips": LoraTiling(row_programs=12, row_block_k=1024, strip_stages=3),
}
_ROUNDINGS = 3
"""Kernels of others round hidden values, updates and sums to 16 bits; those here round sums alone."""


def small(*titles: str) -> list[Case]:
    """Cases for the interpreter."""
    return _beside(small_cases(), titles)


def full(*titles: str) -> list[Case]:
    """Cases for a GPU."""
    return _beside(full_cases(), titles)


def small_cases() -> list[LoraCase]:
    """Tiny shapes: mixed ranks, and rows of the base."""
    rows = ((0, 1), (-1, 2), (1, 3))
    return [
        *_cases(SMALL[0], [("ranks 8 and 24", (8, 24), rows)], torch.float16),
        *_cases(SMALL[1], [("20 rows of rank 16", (16,), ((0, 20),))], torch.float16),
    ]


def full_cases() -> list[LoraCase]:
    """Llama-3.1-8B's shapes. All cells of the widest group, and one of two others."""
    groups = {group.key: group for group in LLAMA_8B}
    cells = [
        (f"{rows} rows of {adapters}, rank {rank}", (rank,) * adapters, distinct(rows, adapters))
        for rows, adapters, rank in ((64, 64, 16), (64, 8, 16), (256, 64, 16), (64, 64, 64), (2048, 1, 16))
    ]
    return [
        *_cases(groups["gate_up"], cells, torch.bfloat16),
        *_cases(groups["qkv"], cells[:1], torch.bfloat16),
        *_cases(groups["down"], cells[:1], torch.bfloat16),
    ]


def _cases(
    group: SiteGroup,
    cells: Sequence[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]],
    dtype: torch.dtype,
) -> list[LoraCase]:
    return [
        LoraCase(f"{group.key}, {words}", (group,), ranks, rows, dtype=dtype) for words, ranks, rows in cells
    ]


def _beside(cases: Sequence[LoraCase], titles: Sequence[str]) -> list[Case]:
    return [Case("peers", case.name, partial(run_case, case, titles), limit_s=300) for case in cases]


def run_case(case: LoraCase, titles: Sequence[str], bench: Bench) -> list[Row]:
    """A row for each contender: `error` beside float64, `ok`, and on a GPU the µs of a layer's A side, B side, and of
    both, recorded, and `today`: how often as fast as the kernels here as they are. A contender or a wheel that cannot
    be run has a row with a `note` instead. Raises Skipped without a wheel."""
    if not titles:
        raise Skipped("no wheel of vLLM or SGLang was given: --wheel PATH")
    (group,) = case.groups
    cuda = bench.device.type == "cuda"
    layers = cold_layers(case) if cuda else 2
    arena = make_arena(
        case.groups, layers, case.dtype, case.ranks, max_rank=case.max_rank, device=bench.device
    )
    x, y = draw(case, bench.device)
    matrices = read_matrices(arena, group, layers, case.ranks)
    with ExitStack() as stack:
        contenders = [
            ours(name, Batch(replace(case, tiling=tiling), arena, bench.device), group.key, x)
            for name, tiling in OURS.items()
        ]
        rows: list[Row] = []
        for wheel in unpacked(Path(os.environ[FOLDER])):
            try:
                modules = stack.enter_context(imported(wheel))
                contenders += list(theirs(wheel, modules, case, matrices, x))
            except Exception as error:  # another's code
                rows.append(_failed(wheel.title, error))
        want = arena.expected(layers - 1, group, case.segments, x, y)
        base = [
            row for slot, first, count in case.segments if slot < 0 for row in range(first, first + count)
        ]
        compared: list[tuple[Row, list[Callable[[], object]]]] = []
        for contender in contenders:
            try:
                row = compare(contender, layers - 1, want, y, base, case.dtype)
                works = _works(contender, layers, y.clone()) if cuda else ()
                compared.append((row, [bench.record(work) for work in works]))
            except Exception as error:
                rows.append(_failed(contender.name, error))
        if cuda:
            measure(compared, layers, bench)
        rows = [*(row for row, _ in compared), *rows]
    return [{"case": case.name, **row} for row in rows]


def draw(case: LoraCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x and y of the case's one group."""
    (group,) = case.groups
    generator = torch.Generator(device).manual_seed(1)
    widths = group.in_features, sum(group.out_features)
    x, y = (torch.randn(case.num_rows, n, generator=generator, device=device).to(case.dtype) for n in widths)
    return x, y


def compare(
    contender: Contender,
    layer: int,
    want: torch.Tensor,
    y: torch.Tensor,
    base: Sequence[int],
    dtype: torch.dtype,
) -> Row:
    """`ok`: y is as near to float64 as roundings allow, and rows without an adapter keep their bits."""
    got = y.clone()
    contender.shrink(layer)
    contender.expand(layer, got)
    error = relative_error(got, want)
    most = TOLERANCE[dtype] * (1 if contender.name in OURS else _ROUNDINGS)
    return {
        "contender": contender.name,
        "error": error,
        "ok": error <= most and torch.equal(got[base], y[base]),
    }


def measure(
    compared: Sequence[tuple[Row, Sequence[Callable[[], object]]]], layers: int, bench: Bench
) -> None:
    """Add to each contender's row the µs of a layer, by its recordings of all layers' A sides, B sides, and both one
    behind the other, all in turns."""
    runs = [run for _, recordings in compared for run in recordings]
    found = iter(bench.watch.interleaved_ms(runs, rounds=11, times=1))
    for row, recordings in compared:
        columns = ("a_us", "b_us", "both_us")
        row |= {name: next(found) * 1e3 / layers for name, _ in zip(columns, recordings, strict=True)}
    today = next((row["both_us"] for row, _ in compared if row["contender"] == AS_IT_IS), None)
    for row, _ in compared:
        row["today"] = None if today is None else today / row["both_us"]


def _failed(contender: str, error: Exception) -> Row:
    return {"contender": contender, "ok": False, "note": f"{type(error).__name__}: {error}"[:300]}


def _works(
    contender: Contender, layers: int, y: torch.Tensor
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    def a_sides() -> None:
        for layer in range(layers):
            contender.shrink(layer)

    def b_sides() -> None:
        for layer in range(layers):
            contender.expand(layer, y)

    def both() -> None:
        for layer in range(layers):
            contender.shrink(layer)
            contender.expand(layer, y)

    return a_sides, b_sides, both
