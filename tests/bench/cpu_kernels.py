"""Linears, attention, LoRA and the fused kernels of a CPU beside torch's and oneDNN's:
`python tests/bench/cpu_kernels.py [threads [dtype]]`.

SmolLM2-135M's shapes, in bfloat16 unless another dtype is named. Turns of both follow each other; figures are of single
calls, the median and the least, in milliseconds for 30 layers. With one thread it is the processor's time, which holds
on a busy machine too; with more it is the clock's, which is worth nothing there. The load of the machine is printed,
before and after.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from loraplex.kernels.attention.numba_attention import build_attention_batch as numba_batch
from loraplex.kernels.attention.numba_attention import paged_attention as numba_attention
from loraplex.kernels.attention.torch_attention import build_attention_batch as torch_batch
from loraplex.kernels.attention.torch_attention import paged_attention as torch_attention
from loraplex.kernels.lora.dispatch import LoraPass, Scratch, Segment, begin_pass
from loraplex.kernels.lora.numba_lora import NumbaLoraPass
from loraplex.kernels.lora.reference import TorchLoraPass
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.numba_backend import numba_ops
from loraplex.kernels.ops import Ops
from loraplex.kernels.torch_backend import torch_ops
from support.kernels.lora_arena import ManualArena, make_arena

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER = 30, 9, 3, 64, 576, 1536
TURNS = 15
DTYPE: torch.dtype = getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "bfloat16")
CPU = torch.device("cpu")
GROUPS = (
    SiteGroup("qkv", ("q_proj", "k_proj", "v_proj"), HIDDEN, (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)),
    SiteGroup("o", ("o_proj",), HEADS * DIM, (HIDDEN,)),
    SiteGroup("gate_up", ("gate_proj", "up_proj"), HIDDEN, (INNER, INNER)),
    SiteGroup("down", ("down_proj",), INNER, (HIDDEN,)),
)
RANK, MAX_ADAPTERS = 16, 32


def compare(name: str, ours: Callable[[int], object], torchs: Callable[[int], object]) -> None:
    """Each is called with the number of a layer."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 2):
        for function, found in zip((ours, torchs), times, strict=True):
            for layer in range(LAYERS):
                begin = now()
                function(layer)
                if turn >= 2:
                    found.append((now() - begin) * 1e3 * LAYERS)
    (a, b), (least_a, least_b) = (tuple(map(take, times)) for take in (statistics.median, min))
    print(
        f"{name:44} {a:9.2f} {b:9.2f} {b / a:6.1f} × {least_a:9.2f} {least_b:9.2f} {least_b / least_a:6.1f} ×"
    )


def attention(name: str, rows: list[int], lens: list[int]) -> None:
    """Each layer has a cache of its own, as in a step: what one reads, the last has not left in the processor's."""
    needed = [-(-length // 16) for length in lens]
    blocks = list(range(sum(needed)))
    random.Random(0).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    caches = torch.randn(LAYERS, sum(needed), 16, 2, KV_HEADS, DIM, dtype=DTYPE)
    qkv = torch.randn(sum(rows), HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE)
    cos = sin = torch.full((sum(rows), 1, DIM // 2), 0.7)
    theirs = torch_batch(rows, lens, tables, block_size=16, max_gather_blocks=5000, device=CPU)
    ours = numba_batch(rows, lens, tables)
    q, options = qkv[:, :HEADS], {"scale": DIM**-0.5, "window": None, "softcap": None}
    compare(
        f"attention {name}",
        lambda layer: numba_attention(q, caches[layer], ours, **options),
        lambda layer: torch_attention(q, caches[layer], theirs, **options),
    )
    none = {"q_norm": None, "k_norm": None, "eps": 0.0}
    compare(
        f"rotate and write {name}",
        lambda layer: OURS.rotate_and_write(qkv, HEADS, cos, sin, caches[layer], ours, **none),
        lambda layer: TORCH.rotate_and_write(qkv, HEADS, cos, sin, caches[layer], theirs, **none),
    )


def around(rows: int) -> None:
    x, residual = (torch.randn(rows, HIDDEN, dtype=DTYPE) for _ in range(2))
    gate_up, weight = torch.randn(rows, 2 * INNER, dtype=DTYPE), torch.ones(HIDDEN, dtype=DTYPE)
    for name, arguments in (
        ("rms_norm", (x, weight, 1e-5)),
        ("add_rms_norm", (torch.zeros_like(x), residual, weight, 1e-5)),
        ("silu_and_mul", (gate_up,)),
        ("gelu_tanh_and_mul", (gate_up,)),
    ):
        ours, theirs = getattr(OURS, name), getattr(TORCH, name)
        compare(
            f"{name} {rows}",
            lambda _, call=ours, given=arguments: call(*given),
            lambda _, call=theirs, given=arguments: call(*given),
        )


def lora(name: str, arena: ManualArena, rows: int, adapters: int) -> None:
    """The rows are dealt out evenly. Each adapter has all sites of all layers."""
    each = rows // adapters
    segments: list[Segment] = [(slot, slot * each, each) for slot in range(adapters)]
    ours, theirs = (
        begin_pass(make, arena.weights, Scratch(CPU), segments, rows)
        for make in (NumbaLoraPass, TorchLoraPass)
    )
    assert ours is not None
    assert theirs is not None
    operands = [
        (
            group.key,
            torch.randn(rows, group.in_features, dtype=DTYPE),
            torch.zeros(rows, sum(group.out_features), dtype=DTYPE),
        )
        for group in GROUPS
    ]

    def layer_of(lora_pass: LoraPass, layer: int) -> None:
        for key, x, y in operands:
            lora_pass.apply(layer, key, x, y)

    compare(f"LoRA {name}", lambda layer: layer_of(ours, layer), lambda layer: layer_of(theirs, layer))


def linear(rows: int) -> None:
    """The four linears of a layer; the weights of all layers, so that they come from memory as in a step."""
    shapes = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)
    inputs = {columns: torch.randn(rows, columns, dtype=DTYPE) for columns in (HIDDEN, INNER)}
    packed = [
        [[ops.pack_weight(torch.randn(shape, dtype=DTYPE)) for shape in shapes] for _ in range(LAYERS)]
        for ops in (OURS, TORCH)
    ]

    def layer_of(ops: Ops, weights: list[list[Any]], layer: int) -> None:
        for (_, columns), weight in zip(shapes, weights[layer], strict=True):
            ops.linear(inputs[columns], weight)

    compare(
        f"linears {rows}",
        lambda layer: layer_of(OURS, packed[0], layer),
        lambda layer: layer_of(TORCH, packed[1], layer),
    )


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(f"threads {torch.get_num_threads()}, load {os.getloadavg()}")
    print(f"{'median, least':44} {'numba':>9} {'torch':>9} {'':8} {'numba':>9} {'torch':>9}")
    attention("decode 1×128", [1], [128])
    attention("decode 16×128", [1] * 16, [128] * 16)
    attention("decode 16×1024", [1] * 16, [1024] * 16)
    attention("prefill 512", [512], [512])
    attention("chunk 128 of 1024, 8 decode", [128] + [1] * 8, [1024] + [256] * 8)
    arena = make_arena(GROUPS, LAYERS, DTYPE, [RANK] * MAX_ADAPTERS)
    lora("1 row", arena, 1, 1)
    for rows, adapters in ((16, 1), (16, 8), (16, 16), (32, 32), (512, 1)):
        lora(f"{rows} rows, {adapters} adapters", arena, rows, adapters)
    for rows in (1, 16, 512):
        around(rows)
    for rows in (1, 2, 4, 8, 16, 32, 64, 512):
        linear(rows)
    print(f"load {os.getloadavg()}")


OURS, TORCH = numba_ops(), torch_ops()

if __name__ == "__main__":
    with torch.inference_mode():
        main()
