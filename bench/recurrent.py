"""Milliseconds of a gated delta net's kernels beside the linears of its layer, on one thread in its processor time, or
on several by the clock:

    .venv/bin/python bench/recurrent.py [--shape 0.8b|4b] [--rows 1 16 64] [--prompt 512] [--layers 6] [--threads 1]

Layers take turns, so that weights and states come from memory, as in a server. Calls are recorded. The floor of
decoding rows is the time to read their states once, by what a plain sum reads from memory here."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.numba_runtime.recording import CallList
from loraplex.kernels.numba_runtime.thread_team import record_calls
from loraplex.kernels.recurrent import WINDOW
from loraplex.kernels.recurrent.types import (
    RecurrentHeads,
    RecurrentMemory,
    RecurrentRows,
    RecurrentUnit,
    lay_out_units,
    recurrent_bytes,
    recurrent_memory,
)
from loraplex.kernels.weight_form import WeightForm

SHAPES = {
    "0.8b": (1024, 3584, RecurrentHeads(16, 16, 128, 128)),
    "4b": (2560, 9216, RecurrentHeads(16, 32, 128, 128)),
}
"""Hidden size, size of the feed-forward, heads."""
PARTS = ("linears", "rule", "convolution", "gates", "norm")
DTYPE = torch.bfloat16
Clock = Callable[[], int]
"""Nanoseconds."""


class Layer:
    """One layer's weights and memory, for `rows` rows."""

    def __init__(self, shape: str, rows: int, units: int) -> None:
        hidden, inner, self.heads = SHAPES[shape]
        self.ops = resolve_kernels("numba", torch.device("cpu")).ops
        values = self.heads.value_heads * self.heads.value_dim
        sizes = {
            "in": (self.heads.channels + values + 2 * self.heads.value_heads, hidden),
            "out": (hidden, values),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        form = WeightForm("floats")
        self.linears = {
            name: self.ops.pack(torch.randn(size).mul_(0.02).to(DTYPE), form, DTYPE)
            for name, size in sizes.items()
        }
        self.weight = torch.randn(self.heads.width, self.heads.channels)
        self.norm = torch.ones(self.heads.value_dim, dtype=DTYPE)
        self.a_log, self.dt_bias = torch.zeros(self.heads.value_heads), torch.zeros(self.heads.value_heads)
        self.x, self.inner = torch.randn(rows, hidden).to(DTYPE), torch.randn(rows, inner).to(DTYPE)
        storage = [
            torch.full((units, size), 0x3C, dtype=torch.uint8) for size in recurrent_bytes(self.heads, DTYPE)
        ]
        self.memory: RecurrentMemory = recurrent_memory(self.heads, DTYPE, *storage)

    def parts(self, rows: RecurrentRows) -> list[tuple[str, CallList]]:
        ops, heads, lists = self.ops.recurrent, self.heads, []

        def record(name: str, compute: Callable[[], Any]) -> Any:
            with record_calls() as calls:
                made = compute()
            lists.append((name, CallList(calls, (made, rows, self))))
            return made

        values = heads.value_heads * heads.value_dim
        y = record("linears", lambda: self.linears["in"](self.x, None))
        b, a = y[:, -2 * heads.value_heads :].chunk(2, 1)
        qkv = record(
            "convolution", lambda: ops.convolve(y[:, : heads.channels], self.weight, rows, self.memory)
        )
        beta, decay = record("gates", lambda: ops.delta_gates(b, a, self.a_log, self.dt_bias))
        out = record("rule", lambda: ops.rule(qkv, decay, beta, rows, self.memory, heads))
        z = y[:, heads.channels : heads.channels + values]
        normed = record("norm", lambda: ops.gated_norm(out, z, self.norm, 1e-6))
        record("linears", lambda: self.linears["out"](normed, None))
        record("linears", lambda: self.linears["gate_up"](self.x, None))
        record("linears", lambda: self.linears["down"](self.inner, None))
        return lists


def clock_of(threads: int) -> Clock:
    """The processor time of one thread; of several, the time that passes."""
    return time.process_time_ns if threads == 1 else time.perf_counter_ns


def measure(shape: str, units: int, rows: int, layers: int, now: Clock) -> dict[str, float]:
    """Milliseconds a layer of each part, of `units` sequences of `rows` rows each."""
    made = [Layer(shape, units * rows, units) for _ in range(layers)]
    phases = WINDOW if rows == 1 else 1
    steps = []
    for phase in range(phases):
        batch = []
        for unit in range(units):
            start = 32 + (phase + unit) % WINDOW if rows == 1 else 32
            ends = (start + rows) // WINDOW - start // WINDOW
            batch.append(
                RecurrentUnit(range(unit * rows, (unit + 1) * rows), start, unit, unit, (unit,) * ends)
            )
        table = lay_out_units(batch)
        steps.append([layer.parts(table) for layer in made])
    spent = dict.fromkeys(PARTS, 0.0)
    turns = phases if rows == 1 else 4
    for turn in range(turns + 1):
        for parts in steps[turn % phases]:
            for name, calls in parts:
                begun = now()
                calls.run({})
                spent[name] += (now() - begun) * (turn > 0)
    return {name: total / turns / layers / 1e6 for name, total in spent.items()}


def read_rate(now: Clock) -> float:
    """Bytes that a sum reads in a millisecond."""
    numbers = torch.ones(1 << 26)
    numbers.sum()
    begun = now()
    numbers.sum()
    return numbers.nbytes / (now() - begun) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, nargs="*", default=[16, 512])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    now = clock_of(given.threads)
    rate = read_rate(now)
    heads = SHAPES[given.shape][2]
    state = heads.value_heads * heads.key_dim * heads.value_dim * 4
    runs = [(f"{units} rows", units, 1) for units in given.rows]
    runs += [(f"a prompt of {rows}", 1, rows) for rows in given.prompt]
    for name, units, rows in runs:
        found = measure(given.shape, units, rows, given.layers, now)
        linears, mixer = found["linears"], sum(found.values()) - found["linears"]
        shown = "  ".join(f"{part} {took:.3f}" for part, took in found.items())
        floor = f"  floor {units * state / rate / linears:.3f}" if rows == 1 else ""
        print(
            f"{given.shape} {name}: {shown}  rule/linears {found['rule'] / linears:.3f}{floor}  "
            f"mixer/linears {mixer / linears:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
