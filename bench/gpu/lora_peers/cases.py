"""LoRA kernels of vLLM and of SGLang beside those here: one group's A and B sides, right beside float64, then in turns.

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
from typing import Any

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
OURS = {
    "as it is": LoraTiling(),
    "by rows and by strips": LoraTiling(row_programs=12, row_block_k=1024, strip_stages=3),
}
_ROUNDINGS = 3
"""They round hidden values, updates and sums to 16 bits, where those here round sums alone."""


def small(*titles: str) -> list[Case]:
    """Tiny shapes, for the interpreter: mixed ranks, and rows of the base."""
    rows = ((0, 1), (-1, 2), (1, 3))
    return [
        *_cases(SMALL[0], titles, [("ranks 8 and 24", (8, 24), rows)], torch.float16),
        *_cases(SMALL[1], titles, [("20 rows of rank 16", (16,), ((0, 20),))], torch.float16),
    ]


def full(*titles: str) -> list[Case]:
    """Llama-3.1-8B's shapes. All cells of the widest group, and one of two others."""
    groups = {group.key: group for group in LLAMA_8B}
    cells = [
        (f"{rows} rows of {adapters}, rank {rank}", (rank,) * adapters, distinct(rows, adapters))
        for rows, adapters, rank in ((64, 64, 16), (64, 8, 16), (256, 64, 16), (64, 64, 64), (2048, 1, 16))
    ]
    return [
        *_cases(groups["gate_up"], titles, cells, torch.bfloat16),
        *_cases(groups["qkv"], titles, cells[:1], torch.bfloat16),
        *_cases(groups["down"], titles, cells[:1], torch.bfloat16),
    ]


def _cases(
    group: SiteGroup,
    titles: Sequence[str],
    cells: Sequence[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]]],
    dtype: torch.dtype,
) -> list[Case]:
    cases = [
        LoraCase(f"{group.key}, {words}", (group,), ranks, rows, dtype=dtype) for words, ranks, rows in cells
    ]
    return [Case("peers", case.name, partial(run_case, case, titles), limit_s=300) for case in cases]


def run_case(case: LoraCase, titles: Sequence[str], bench: Bench) -> list[Row]:
    """A row for each contender: `error` beside float64, `ok`, and on a GPU the µs of a layer's A side, B side, and of
    both, recorded, and `today`: how often as fast as the kernels here as they are. Raises Skipped without a wheel, and
    WheelError."""
    if not titles:
        raise Skipped("no wheel of vLLM or SGLang was given: --wheel PATH")
    (group,) = case.groups
    cuda = bench.device.type == "cuda"
    layers = cold_layers(case) if cuda else 2
    arena = make_arena(
        case.groups, layers, case.dtype, case.ranks, max_rank=max(case.ranks), device=bench.device
    )
    x, y = draw(case, bench.device)
    matrices = read_matrices(arena, group, layers, case.ranks)
    with ExitStack() as stack:
        contenders = [
            ours(name, Batch(replace(case, tiling=tiling), arena, bench.device), group.key, x)
            for name, tiling in OURS.items()
        ]
        for wheel in unpacked(Path(os.environ[FOLDER])):
            modules = stack.enter_context(imported(wheel))
            contenders += theirs(wheel, modules, case, matrices, x)
        want = arena.expected(layers - 1, group, case.segments, x, y)
        base = [
            row for slot, first, count in case.segments if slot < 0 for row in range(first, first + count)
        ]
        rows = [compare(contender, layers - 1, want, y, base, case.dtype) for contender in contenders]
        if cuda:
            measured = measure(contenders, layers, y, bench)
            today = measured[0]["both_us"]
            rows = [
                row | times | {"today": today / times["both_us"]}
                for row, times in zip(rows, measured, strict=True)
            ]
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
    contenders: Sequence[Contender], layers: int, y: torch.Tensor, bench: Bench
) -> list[dict[str, Any]]:
    """µs of a layer, by contender: recordings of all layers' A sides, B sides, and both one behind the other, in
    turns."""
    runs = [bench.record(work) for contender in contenders for work in _works(contender, layers, y.clone())]
    found = [ms * 1e3 / layers for ms in bench.watch.interleaved_ms(runs, rounds=11, times=1)]
    columns = ("a_us", "b_us", "both_us")
    return [dict(zip(columns, found[at : at + 3], strict=True)) for at in range(0, len(found), 3)]


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
