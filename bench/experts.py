"""Milliseconds of a mixture's parts beside its experts' linears, on one thread, in bfloat16, of Qwen3-30B-A3B's layer:

    .venv/bin/python bench/experts.py [--rows 1 16 64] [--steps 8]

Routes are uniform, the worst case, and new in each step. Calls are recorded. One layer's weights are 1.2 GB, which no
cache holds. The floor is the time to read the touched experts once, by what a plain sum reads from memory here."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import torch

from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.experts.types import ExpertActivation, RouterKind
from loraplex.kernels.numba_runtime.recording import CallList
from loraplex.kernels.numba_runtime.thread_team import record_calls
from loraplex.kernels.weight_form import FLOATS

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
DTYPE = torch.bfloat16
KIND = RouterKind("softmax", EXPERTS, TOP_K, normalise=True, weights_in_float32=False)


class Mixture:
    def __init__(self) -> None:
        self.ops = resolve_kernels("numba", torch.device("cpu")).ops
        self.router = self.ops.pack(torch.randn(EXPERTS, HIDDEN).mul_(0.05).to(DTYPE), FLOATS, DTYPE)
        self.gate_up, self.down = (
            self.ops.experts.pack([torch.randn(n, k).mul_(0.02).to(DTYPE)] * EXPERTS, FLOATS, DTYPE)
            for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def parts(self, x: torch.Tensor, logits: torch.Tensor) -> list[tuple[str, CallList]]:
        """A step of rows x, which are routed by `logits`."""
        each, lists = self.ops.experts, []

        def record(name: str, compute: Callable[[], Any]) -> Any:
            with record_calls() as calls:
                made = compute()
            lists.append((name, CallList(calls, (made, x, logits, self))))
            return made

        record("router", lambda: self.router(x))
        routes = record("route", lambda: each.route(logits, KIND))
        rows = record("group", lambda: each.group(routes, EXPERTS))
        xs = record("gather", lambda: each.gather(x, rows))
        y = record("linears", lambda: self.gate_up(xs, rows))
        h = record("act", lambda: each.act(y, ExpertActivation()))
        z = record("linears", lambda: self.down(h, rows))
        record("combine", lambda: each.combine(z, routes, rows))
        return lists


def measure(mixture: Mixture, rows: int, steps: int) -> dict[str, float]:
    """Milliseconds of each part, by the thread's own clock, and the experts that were touched."""
    spent: collections.Counter[str] = collections.Counter()
    for step in range(steps + 1):
        logits = torch.randn(rows, EXPERTS)
        for name, calls in mixture.parts(torch.randn(rows, HIDDEN).to(DTYPE), logits):
            begun = time.thread_time_ns()
            calls.run({})
            spent[name] += (time.thread_time_ns() - begun) * (step > 0)
        spent["touched"] += len(logits.topk(TOP_K).indices.unique()) * 1e6 * (step > 0)
    return {name: total / steps / 1e6 for name, total in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = torch.ones(1 << 26)
    numbers.sum()
    begun = time.thread_time_ns()
    numbers.sum()
    rate = numbers.nbytes / (time.thread_time_ns() - begun) * 1e6
    mixture = Mixture()
    for rows in given.rows:
        found = measure(mixture, rows, given.steps)
        touched, linears = found.pop("touched"), found["linears"]
        floor = touched * 3 * HIDDEN * WIDTH * DTYPE.itemsize / rate
        beside = sum(found[name] for name in ("router", "route", "group", "gather", "combine"))
        shown = "  ".join(f"{part} {took:.3f}" for part, took in found.items())
        print(
            f"{rows} rows, {touched:.0f} experts: {shown}  floor {floor:.2f}  routing/linears {beside / linears:.3f}"
        )


if __name__ == "__main__":
    main()
