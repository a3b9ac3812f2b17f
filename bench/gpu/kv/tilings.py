"""Attention over keys and values in 8-bit codes on a GPU, in several tilings: right, and how fast beside the tiling
that is served, over codes and over the model's dtype.

    export PYTHONPATH=tests:server:adapters:kernels
    python3 -m bench.gpu.kv.tilings --compile; python3 -m bench.gpu.kv.tilings --seconds 50 --out build/gpu

Each result is a line of JSON in `kv-tilings.jsonl`, and the best three of each step a line of the table. What has not
run after `--seconds` is counted. `--small`: tiny shapes, interpreted, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.attention import TOLERANCE, AttentionCase, attention_options, make_plan, make_step
from bench.gpu.kv.codes import attention_cases, in_codes
from bench.gpu.timing import median_ms, relative_error
from loraplex.kernels.attention import triton_attention
from loraplex.kernels.attention.triton_tiling import Tiling, Tilings
from support.kernels.paged import PagedStep, expected_attention

_BEST = 3


def forms(case: AttentionCase, device: torch.device, *, small: bool = False) -> list[Tilings]:
    """The tilings to compare, that of the server first. Those of prompts decide steps with more rows a sequence."""
    served = make_plan(case, device).tilings
    decodes = max(case.num_rows) == 1
    if small:
        tried = [Tiling(16, 16, 4, 2, 32), Tiling(32, 16, 4, 2, 32)]
    elif decodes:
        tried = [
            Tiling(16, columns, warps, stages, split)
            for split in (256, 512, 1024)
            for columns in (64, 128, 32)
            for warps in (4, 2, 8)
            for stages in (3, 2, 4)
            if split == 256 or (warps == 4 and stages == 3)
        ]
    else:
        # One stage from 64 rows on: see Tiling.check.
        tried = [
            *(Tiling(64, columns, warps, 1, 512) for columns in (32, 128, 64) for warps in (4, 8)),
            *(Tiling(128, columns, 8, 1, 512) for columns in (32, 64, 128)),
            *(Tiling(32, columns, warps, stages, 512) for columns in (64, 32) for warps in (4, 2) for stages in (3, 2)),
        ]  # fmt: skip
    sides = [Tilings(one, served.prefill) if decodes else Tilings(served.decode, one) for one in tried]
    return [served, *(one for one in sides if one != served)]


class CaseBench:
    """One step: its queries, and keys and values in codes and in the model's dtype."""

    def __init__(self, case: AttentionCase, device: torch.device) -> None:
        self._case, self._device = case, device
        self._options = attention_options(case)
        self._plain = make_step(case, device)
        self._coded = in_codes(self._plain)
        self._expected = expected_attention(self._coded, **self._options)

    def run(self, tilings: Tilings) -> dict[str, Any]:
        """`ok`: within the dtype's rounding of float64 over what the codes stand for, and the same bits again."""
        got, again = self._launch(tilings, self._coded), self._launch(tilings, self._coded)
        error = relative_error(got, self._expected)
        one = tilings.decode if max(self._case.num_rows) == 1 else tilings.prefill
        return {
            "case": self._case.name,
            **asdict(one),
            "error": error,
            "ok": error <= TOLERANCE[self._case.dtype] and torch.equal(got, again),
            "ms": self._time(tilings, self._coded),
        }

    def plain_ms(self, tilings: Tilings) -> float | None:
        """The time over the model's dtype."""
        return self._time(tilings, self._plain)

    def _time(self, tilings: Tilings, step: PagedStep) -> float | None:
        if self._device.type != "cuda":
            return None
        batch = self._batch(tilings, step)
        return median_ms(
            lambda: triton_attention.paged_attention(step.q, step.cache, batch, **self._options), self._device
        )

    def _launch(self, tilings: Tilings, step: PagedStep) -> torch.Tensor:
        return triton_attention.paged_attention(
            step.q, step.cache, self._batch(tilings, step), **self._options
        )

    def _batch(self, tilings: Tilings, step: PagedStep) -> triton_attention.TritonAttentionBatch:
        case = self._case
        plan = make_plan(replace(case, tilings=tilings), self._device)
        scratch = triton_attention.AttentionScratch.allocate(plan, self._device)
        return triton_attention.build_attention_batch(
            plan, scratch, case.num_rows, case.seq_lens, step.tables
        )


def compile_form(case: AttentionCase, tilings: Tilings) -> str:
    """Compile what a tiling launches, for a step of the same kind and few positions; what went wrong, or nothing."""
    short = replace(case, num_rows=case.num_rows[:1], seq_lens=(case.num_rows[0] + 64,))
    try:
        step = in_codes(make_step(short, torch.device("cuda")))
        plan = make_plan(replace(short, tilings=tilings), step.q.device)
        scratch = triton_attention.AttentionScratch.allocate(plan, step.q.device)
        batch = triton_attention.build_attention_batch(
            plan, scratch, short.num_rows, short.seq_lens, step.tables
        )
        triton_attention.paged_attention(step.q, step.cache, batch, **attention_options(short))
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: the other tilings are compiled too
        return f"{case.name}, {tilings}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def run_all(
    cases: Sequence[AttentionCase], device: torch.device, seconds: float, *, small: bool = False
) -> Iterator[dict[str, Any]]:
    """A row for each step and tiling, those of the same step one behind the other, each step for an even share of the
    time. The first row of a step has `plain_ms` too. Steps that are cut end with a row of `left`."""
    for number, case in enumerate(cases):
        begun, share = time.monotonic(), seconds / (len(cases) - number)
        bench, tried = CaseBench(case, device), forms(case, device, small=small)
        for index, tilings in enumerate(tried):
            if index and time.monotonic() - begun > share:
                yield {"case": case.name, "left": len(tried) - index}
                break
            try:
                row = bench.run(tilings)
                if not index:
                    row["plain_ms"] = bench.plain_ms(tilings)
            except Exception as error:  # of any kind: a tile may need too much shared memory
                row = {
                    "case": case.name,
                    "tilings": str(tilings),
                    "failed": f"{type(error).__name__}: {error}"[:300],
                }
            yield row
        seconds -= time.monotonic() - begun


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The served tiling and the best of each step."""
    lines = ["| step | over the dtype ms | tiling | ms | of the served one |", "|---|---|---|---|---|"]
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("ms") is not None and row["ok"]:
            by_case.setdefault(row["case"], []).append(row)
    for case, found in by_case.items():
        served = found[0]
        for row in [served, *sorted(found[1:], key=lambda row: float(row["ms"]))[:_BEST]]:
            tiling = f"{row['block_m']}, {row['block_n']}, {row['num_warps']}, {row['num_stages']}, {row['min_split']}"
            plain = f"{served['plain_ms']:.4f}" if row is served else ""
            lines.append(
                f"| {case} | {plain} | {tiling} | {row['ms']:.4f} | {row['ms'] / served['ms']:.2f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--compile", action="store_true", help="compile alone, beside each other")
    parser.add_argument("--small", action="store_true", help="tiny shapes, interpreted, without a GPU")
    given = parser.parse_args(argv)
    device = torch.device("cpu" if given.small else "cuda")
    cases = attention_cases(small=given.small)
    if given.compile:
        kinds = {tilings: case for case in cases for tilings in forms(case, device, small=given.small)}
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(compile_form, case, tilings) for tilings, case in kinds.items()]
            print(*filter(None, (job.result() for job in jobs)), sep="\n")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (given.out / "kv-tilings.jsonl").open("a") as file:
        for row in run_all(cases, device, given.seconds, small=given.small):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            print(row, flush=True)
    print(table(rows))
    return 0 if all(row.get("ok", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
