"""Milliseconds of a mixture's parts beside its experts' linears, on one thread, in bfloat16, of Qwen3-30B-A3B's layer:

    .venv/bin/python bench/experts.py [--rows 1 16 64] [--steps 8] [--lora RANK ADAPTERS] [--experts 128]

Routes are uniform, the worst case, and new in each step. Calls are recorded. One layer's weights are 1.2 GB, which no
cache holds. The floor is the time to read the touched experts once, by what a plain sum reads from memory here. With
adapters, which rows have in turn and which have gate and up in one matrix, the floor of theirs is the share of the
experts' bytes that theirs are."""

from __future__ import annotations

import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.experts.lora_types import (
    ExpertLoraPass,
    ExpertLoraWeights,
    ExpertSiteGroup,
    begin_expert_pass,
    tile_height,
)
from loraplex.kernels.experts.types import ExpertActivation, RouterKind
from loraplex.kernels.host_memory import untouched_zeros
from loraplex.kernels.lora.types import GRANULE_BYTES
from loraplex.kernels.numba_runtime.recording import CallList
from loraplex.kernels.numba_runtime.thread_team import record_calls
from loraplex.kernels.weight_form import FLOATS

HIDDEN, WIDTH, TOP_K = 2048, 768, 8
DTYPE = torch.bfloat16


class Mixture:
    def __init__(self, experts: int) -> None:
        self.kernels = resolve_kernels("numba", torch.device("cpu"))
        self.ops, self.experts = self.kernels.ops, experts
        self.kind = RouterKind("softmax", experts, TOP_K, normalise=True, weights_in_float32=False)
        self.router = self.ops.pack(torch.randn(experts, HIDDEN).mul_(0.05).to(DTYPE), FLOATS, DTYPE)
        self.gate_up, self.down = (
            self.ops.experts.pack([torch.randn(n, k).mul_(0.02).to(DTYPE)] * experts, FLOATS, DTYPE)
            for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def parts(
        self, x: torch.Tensor, logits: torch.Tensor, lora: ExpertLoraPass | None
    ) -> list[tuple[str, CallList]]:
        """A step of rows x, which are routed by `logits`."""
        each, lists = self.ops.experts, []

        def record(name: str, compute: Callable[[], Any]) -> Any:
            with record_calls() as calls:
                made = compute()
            lists.append((name, CallList(calls, (made, x, logits, lora, self))))
            return made

        record("router", lambda: self.router(x))
        routes = record("route", lambda: each.route(logits, self.kind))
        rows = record("group", lambda: each.group(routes, self.experts))
        xs = record("gather", lambda: each.gather(x, rows))
        y = record("linears", lambda: self.gate_up(xs, rows))
        if lora is not None:
            record("lora", lambda: lora.apply(0, "experts.gate_up", xs, y, rows))
        h = record("act", lambda: each.act(y, ExpertActivation()))
        z = record("linears", lambda: self.down(h, rows))
        if lora is not None:
            record("lora", lambda: lora.apply(0, "experts.down", h, z, rows))
        record("combine", lambda: each.combine(z, routes, rows))
        return lists


def make_adapters(rank: int, slots: int, experts: int) -> ExpertLoraWeights:
    """The tiles of each expert of one layer, one behind the other, as an adapter's pages have them."""
    groups = (
        ExpertSiteGroup("experts.gate_up", ("gate_up",), HIDDEN, ((0, 2 * WIDTH),), experts, (0,)),
        ExpertSiteGroup("experts.down", ("down",), WIDTH, ((0, HIDDEN),), experts, (0,)),
    )
    height, granule = tile_height(rank), GRANULE_BYTES // DTYPE.itemsize
    chunks = -(-rank // height)
    tables, place = np.zeros((slots, 1, 2, experts, chunks + 1, 2), np.int32), 1
    for slot, site, expert, chunk in np.ndindex(slots, 2, experts, chunks):
        for side, width in enumerate((groups[site].in_features, groups[site].out_features)):
            tables[slot, 0, site, expert, chunk, side] = place
            place += height * width // granule
    storage = untouched_zeros((place * granule,), DTYPE)
    storage.normal_(0, 0.02)
    heights = np.full((slots, 1, 2), height, np.int32)
    return ExpertLoraWeights(storage, groups, np.arange(slots, dtype=np.int32), tables, heights)


def measure(
    mixture: Mixture, rows: int, steps: int, adapters: ExpertLoraWeights | None
) -> tuple[dict[str, float], float, float]:
    """Milliseconds of each part, by the thread's own clock; the experts that were touched, and the pairs of an adapter
    and an expert."""
    spent: collections.Counter[str] = collections.Counter()
    touched = pairs = 0
    for step in range(steps + 1):
        logits, lora = torch.randn(rows, mixture.experts), None
        ids = logits.topk(TOP_K).indices
        if adapters is not None and mixture.kernels.expert_lora_pass is not None:
            slots = (torch.arange(rows) % len(adapters.heights)).sort().values
            segments = [(int(slot), row, 1) for row, slot in enumerate(slots)]
            make = mixture.kernels.expert_lora_pass
            lora = begin_expert_pass(make, adapters, segments, rows)
            pairs += len((ids + slots[:, None] * mixture.experts).unique()) * (step > 0)
        for name, calls in mixture.parts(torch.randn(rows, HIDDEN).to(DTYPE), logits, lora):
            begun = time.thread_time_ns()
            calls.run({})
            spent[name] += (time.thread_time_ns() - begun) * (step > 0)
        touched += len(ids.unique()) * (step > 0)
    return {name: total / steps / 1e6 for name, total in spent.items()}, touched / steps, pairs / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--lora", type=int, nargs=2, metavar=("RANK", "ADAPTERS"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = torch.ones(1 << 26)
    numbers.sum()
    begun = time.thread_time_ns()
    numbers.sum()
    rate = numbers.nbytes / (time.thread_time_ns() - begun) * 1e6
    mixture = Mixture(given.experts)
    adapters = make_adapters(*given.lora, given.experts) if given.lora else None
    for rows in given.rows:
        found, touched, pairs = measure(mixture, rows, given.steps, adapters)
        linears = found["linears"]
        floor = touched * 3 * HIDDEN * WIDTH * DTYPE.itemsize / rate
        beside = sum(found[name] for name in ("router", "route", "group", "gather", "combine"))
        shown = "  ".join(f"{part} {took:.3f}" for part, took in found.items())
        print(
            f"{rows} rows, {touched:.0f} experts: {shown}  floor {floor:.2f}  routing/linears {beside / linears:.3f}"
        )
        if given.lora:
            rank = -(-given.lora[0] // tile_height(given.lora[0])) * tile_height(given.lora[0])
            share = pairs * rank * (2 * HIDDEN + 3 * WIDTH) / (touched * 3 * HIDDEN * WIDTH)
            print(f"    {pairs:.0f} pairs: lora/linears {found['lora'] / linears:.3f}, floor {share:.3f}")


if __name__ == "__main__":
    main()
