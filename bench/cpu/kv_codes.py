"""Keys and values as codes beside bfloat16 ones, on the real model:

    PYTHONPATH=tests python -m bench.cpu.kv_codes MODEL [--errors] [--places] [--attention] [--steps] [--turns 15]

MODEL is the directory of SmolLM2-135M-Instruct. `--errors`: the Kullback-Leibler divergence, in nats a token, of
--kv-cache-dtype int8 from keys and values in float32, both computed in float32, for the base and the example adapters,
over text of five kinds. `--places`: sequences of 1,024 tokens in a pool of 1 GiB. `--attention`: medians of the
processor time of the CPU's attention alone, over random numbers, and `--steps` of whole decoding steps, and of prompts,
of two engines; both in turns, in `--threads`, 1 unless given.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.cpu.quantised import logits, print_divergence, prompts_of
from loraplex.engine.execution.kv_cache import size_kv_cache
from loraplex.engine.model.outline import outline_model
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import SCALE_BYTES
from loraplex.kernels.attention.numba_attention import build_attention_batch, paged_attention
from support.engine.local_engine import LocalEngine

CONTEXT = 1024
POOL = 1 << 30
FORMS = ("auto", "int8")
CASES = (1, 16)
"""Sequences of a decoding step."""
ATTENTION = (
    ("16 of 1024, 9 heads and 3 of KV, 64", [1] * 16, [1024] * 16, 3, 3, 64, 15),
    ("16 of 1024, 32 heads and 8 of KV, 128", [1] * 16, [1024] * 16, 8, 4, 128, 6),
    ("16 of 1024, 4 heads and 4 of KV, 64", [1] * 16, [1024] * 16, 4, 1, 64, 15),
    ("16 of 1024, 14 heads and 2 of KV, 64", [1] * 16, [1024] * 16, 2, 7, 64, 15),
    ("1 of 1024, 9 heads and 3 of KV, 64", [1], [1024], 3, 3, 64, 15),
    ("a chunk of 256 behind 768, 9 heads and 3 of KV, 64", [256], [1024], 3, 3, 64, 2),
)
"""Name, rows and lengths of the sequences, KV heads, queries of each, size of a head, and layers in turn, so that none
is in a cache."""


def print_errors(model_dir: Path) -> None:
    prompts = prompts_of(model_dir)
    exact = logits(model_dir, prompts, quantise=False)
    print_divergence(prompts, exact, logits(model_dir, prompts, quantise=False, kv_dtype=torch.int8))


def print_places(model_dir: Path) -> None:
    shape = outline_model(model_dir, torch.device("cpu"), "bfloat16").shape
    places = []
    for dtype in (torch.bfloat16, torch.int8):
        size = size_kv_cache(
            shape,
            dtype,
            torch.device("cpu"),
            kv_cache_memory=POOL,
            max_model_len=CONTEXT,
            max_num_seqs=1 << 20,
        )
        places.append(size.num_blocks * 16 / CONTEXT)
    first, second = places
    print(
        f"{POOL >> 20} MiB, heads of {shape.head_dim}: {first:.1f} sequences of {CONTEXT} tokens in bfloat16, "
        f"{second:.1f} in int8: {second / first:.3f} times"
    )


def print_attention(turns: int) -> None:
    """Attention of a layer, in bfloat16 over bfloat16 and over codes."""
    for name, rows, lens, kv_heads, group, dim, layers in ATTENTION:
        blocks = [-(-length // BLOCK_SIZE) for length in lens]
        order = iter(torch.randperm(sum(blocks)).tolist())
        batch = build_attention_batch(rows, lens, [[next(order) for _ in range(count)] for count in blocks])
        sizes = (sum(blocks), BLOCK_SIZE, 2, kv_heads)
        plain = [torch.randn(*sizes, dim).bfloat16() for _ in range(layers)]
        codes = [torch.full((*sizes, dim + SCALE_BYTES), 32, dtype=torch.int8) for _ in range(layers)]
        queries = torch.randn(sum(rows), kv_heads * group, dim).bfloat16()
        seconds = []
        for _ in range(turns):
            taken = []
            for caches in (plain, codes):
                start = time.process_time()
                for cache in caches:
                    paged_attention(queries, cache, batch, scale=0.1)
                taken.append((time.process_time() - start) / layers)
            seconds.append(taken)
        print(f"{name}: {ratio(seconds)}")


def decoding(model_dir: Path, work: Path, form: Any, rows: int, threads: int) -> LocalEngine:
    """An engine with `rows` sequences that decode behind CONTEXT tokens, in bfloat16."""
    engine = LocalEngine(
        model_dir,
        work,
        dtype="bfloat16",
        kv_cache_dtype=form,
        max_model_len=2 * CONTEXT,
        max_num_seqs=rows,
        kv_cache_memory=1 << 30,
        adapter_memory=64 << 20,
        num_threads=threads,
    )
    for row in range(rows):
        prompt = [100 + row * 7 + place * 3 for place in range(CONTEXT)]
        engine.add(f"r{row}", prompt, max_tokens=CONTEXT)
    return engine


def print_steps(model_dir: Path, rows: int, turns: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as work:
        engines = [decoding(model_dir, Path(work) / form, form, rows, threads) for form in FORMS]
        prompts = []
        while any(len(engine.events) < rows for engine in engines):
            prompts.append([cost_of_step(engine) for engine in engines])
        steps = [[cost_of_step(engine) for engine in engines] for _ in range(turns)]
        for engine in engines:
            engine.close()
    print(f"{rows:3} rows at context {CONTEXT}, bfloat16 / int8: {ratio(steps)}")
    print(f"    their prompts, {len(prompts)} steps: {ratio(prompts)}")


def cost_of_step(engine: LocalEngine) -> float:
    """Seconds of processor time, of all threads."""
    start = time.process_time()
    engine.step()
    return time.process_time() - start


def ratio(seconds: list[list[float]]) -> str:
    first, second = (1e3 * statistics.median(each) for each in zip(*seconds, strict=True))
    return f"{first:6.2f} / {second:6.2f} ms, int8 takes {second / first:.2f} of it"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.errors:
        print_errors(options.model)
    if options.places:
        print_places(options.model)
    if options.attention:
        print_attention(options.turns)
    if options.steps:
        for rows in CASES:
            print_steps(options.model, rows, options.turns, options.threads)


if __name__ == "__main__":
    main()
