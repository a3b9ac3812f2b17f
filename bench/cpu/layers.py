"""The parts of SmolLM2-135M's thirty layers on a CPU, without an engine:

    PYTHONPATH=tests python -m bench.cpu.layers [ROWS:ADAPTERS:CONTEXT ...] [--turns 7] [--threads 2]

CONTEXT 0 is a prompt of ROWS tokens, any other number as many decoding rows behind it. Rows are dealt out evenly among
ADAPTERS of rank 16. Weights are random, in bfloat16. Prints medians in milliseconds, and a digest of the last layer's
output: two commits that print the same one compute the same bits. It needs no checkpoint and starts in seconds, so two
commits can take turns, each in a process of its own with its sources in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from loraplex.kernels.attention.numba_attention import build_attention_batch, paged_attention
from loraplex.kernels.lora.dispatch import LoraPass, Scratch, begin_pass
from loraplex.kernels.lora.numba_lora import NumbaLoraPass
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.numba_backend import numba_ops
from support.kernels.lora_arena import ManualArena, make_arena

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER, RANK = 30, 9, 3, 64, 576, 1536, 16
DTYPE = torch.bfloat16
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), HIDDEN, (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)),
    SiteGroup("o", ("o_proj",), HEADS * DIM, (HIDDEN,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), HIDDEN, (INNER, INNER)),
    SiteGroup("down", ("down_proj",), INNER, (HIDDEN,)),
)
PARTS = ("linears", "adapters", "attention", "rotate and write", "norms", "activation")
DEFAULT = ["512:0:0", "512:1:0", "32:1:128", "16:0:128", "16:1:128", "16:16:128", "1:0:128"]


class Layers:
    """Weights of all layers, so that they come from memory as in a step, and the clocks of the parts."""

    def __init__(self) -> None:
        ops = numba_ops()
        self.spent: dict[str, float] = defaultdict(float)
        self._norm = self._timed("norms", ops.rms_norm)
        self._add_norm = self._timed("norms", ops.add_rms_norm)
        self._activate = self._timed("activation", ops.silu_and_mul)
        self._linear = self._timed("linears", ops.linear)
        self._rotate = self._timed("rotate and write", ops.rotate_and_write)
        self._attend = self._timed("attention", paged_attention)
        self._adapt = self._timed("adapters", lambda lora, *given: lora.apply(*given))
        shapes = (
            ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            (HIDDEN, HIDDEN),
            (2 * INNER, HIDDEN),
            (HIDDEN, INNER),
        )
        self._weights = [
            [ops.pack_weight(torch.randn(shape, dtype=DTYPE) * 0.03) for shape in shapes]
            for _ in range(LAYERS)
        ]
        self._ones = torch.ones(HIDDEN, dtype=DTYPE)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **kwargs)
            self.spent[part] += time.perf_counter() - begin
            return result

        return timed

    def run(
        self, residual: torch.Tensor, caches: torch.Tensor, batch: Any, lora: LoraPass | None
    ) -> torch.Tensor:
        """What thirty layers make of `residual` [T, C], which they change."""
        rows = len(residual)
        cos = torch.full((rows, 1, DIM // 2), 0.7)

        def linear(x: torch.Tensor, layer: int, number: int) -> torch.Tensor:
            y = self._linear(x, self._weights[layer][number])
            if lora is not None:
                self._adapt(lora, layer, GROUPS[number].key, x, y)
            return y

        x = self._norm(residual, self._ones, 1e-5)
        for layer in range(LAYERS):
            heads = linear(x, layer, 0).view(rows, HEADS + 2 * KV_HEADS, DIM)
            none = {"q_norm": None, "k_norm": None, "eps": 0.0}
            self._rotate(heads, HEADS, cos, cos, caches[layer], batch, **none)
            x = self._attend(
                heads[:, :HEADS], caches[layer], batch, scale=DIM**-0.5, window=None, softcap=None
            )
            x = self._add_norm(linear(x.view(rows, HEADS * DIM), layer, 1), residual, self._ones, 1e-5)
            x = linear(self._activate(linear(x, layer, 2)), layer, 3)
            x = self._add_norm(x, residual, self._ones, 1e-5)
        return x


def measure(layers: Layers, arena: ManualArena, rows: int, adapters: int, context: int, turns: int) -> None:
    counts, lengths = ([1] * rows, [context] * rows) if context else ([rows], [rows])
    needed = [-(-length // 16) for length in lengths]
    tables = [list(range(sum(needed[:i]), sum(needed[: i + 1]))) for i in range(len(needed))]
    caches = torch.randn(LAYERS, sum(needed), 16, 2, KV_HEADS, DIM, dtype=DTYPE)
    batch = build_attention_batch(counts, lengths, tables)
    each = rows // max(adapters, 1)
    segments = [(slot, slot * each, each) for slot in range(adapters)]
    lora = begin_pass(NumbaLoraPass, arena.weights, Scratch(torch.device("cpu")), segments, rows)
    start = torch.randn(rows, HIDDEN, dtype=DTYPE)
    totals, parts = [], []
    for turn in range(turns + 2):
        layers.spent.clear()
        residual = start.clone()
        begin = time.perf_counter()
        x = layers.run(residual, caches, batch, lora)
        if turn >= 2:
            totals.append(time.perf_counter() - begin)
            parts.append(dict(layers.spent))
    digest = hashlib.sha256(x.view(torch.int16).numpy().tobytes()).hexdigest()[:8]
    figures = [f"{statistics.median(part.get(name, 0.0) for part in parts) * 1e3:.2f}" for name in PARTS]
    total = statistics.median(totals) * 1e3
    print(
        f"| {rows} rows, {adapters} adapters, {context} | {' | '.join(figures)} | {total:.1f} | {digest} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of thirty layers on a CPU, without an engine.")
    parser.add_argument("cases", nargs="*", default=DEFAULT)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cases = [tuple(map(int, case.split(":"))) for case in arguments.cases]
    layers = Layers()
    arena = make_arena(GROUPS, LAYERS, DTYPE, [RANK] * max(1, *(adapters for _, adapters, _ in cases)))
    print(f"| ms | {' | '.join(PARTS)} | all | bits |\n|---|{'---|' * (len(PARTS) + 2)}")
    for rows, adapters, context in cases:
        measure(layers, arena, rows, adapters, context, arguments.turns)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
