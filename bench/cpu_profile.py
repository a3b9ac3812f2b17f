"""Where a step's time goes on a CPU, part by part, beside the least it could take.

    PYTHONPATH=tests python -m bench.cpu_profile MODEL [--kernels numba,torch] [--batch 1,16,64] [--adapters 0,16]
        [--context 128] [--prompt 512] [--dtype bfloat16] [--threads N] [--temperature 1]
        [--batch-invariant]

MODEL is the directory of SmolLM2-135M-Instruct. The engine is the real one, in this process, with adapters of rank 16
on all seven sites.
An engine of numba's kernels repeats the layers of small steps from a recording, where nothing can be timed; "numba" is
that engine, "numba by part" one that does not record. Engines take turns, step by step; figures are medians in
milliseconds. The floor of a part is the time to read its weights, adapters and KV at the memory bandwidth that is
measured at the start, or to compute its products at the rate of a large product, whichever is more. That rate is the
best of three: the library's in this dtype, the library's in float32, our own in this dtype. "host" is what the engine's
process does besides: planning, the prefix cache, a step's inputs and events. Detokenising is the API process's
work, beside the next step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the engine's process has it

import torch

from loraplex.engine import device_parts, devices
from loraplex.kernels.backend import resolve_kernels
from loraplex.kernels.linear import dense, numba_dense
from loraplex.serving.text.detokenize import TextStream
from loraplex.serving.text.processor import TextProcessor
from support.engine.local_engine import LocalEngine
from support.servers.live_server import write_real_adapter

RANK = 16
TURNS = 12
PARTS = (
    "linears",
    "adapters",
    "attention",
    "rotate and write",
    "norms",
    "activation",
    "head",
    "rest of the pass",
    "sampling",
    "host",
)


SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS, HIDDEN, QUERY, KEY_VALUE, INNER, VOCABULARY = 30, 576, 576, 192, 1536, 49152
MAX_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes that it reads and floating point operations that it does in a second."""

    read: float
    products: float


class Clock:
    """Adds up the time of parts, without what is called from within them."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                own = took - self._inner.pop()
                self._inner[-1] += took
                self.spent[part] += own

        return timed


class Engine:
    """A real engine. `by_part`: the parts of its forward pass are timed, and no layers are recorded."""

    def __init__(self, kernels: str, arguments: argparse.Namespace, work: Path, *, by_part: bool) -> None:
        self.clock = clock = Clock()
        parts = {
            "rms_norm": "norms",
            "add_rms_norm": "norms",
            "act_and_mul": "activation",
            "rotate_and_write": "rotate and write",
        }

        def timed_ops(ops: Any) -> Any:
            if not by_part:
                return ops
            changed: Any = {name: clock.around(part, getattr(ops, name)) for name, part in parts.items()}

            def pack(*given: Any) -> Any:
                packed = ops.pack(*given)
                return clock.around("head" if packed.shape[0] == VOCABULARY else "linears", packed)

            changed["pack"] = pack
            return dataclasses.replace(ops, **changed, record_layers=None)

        def timed_kernels(*args: Any, **kwargs: Any) -> Any:
            kernels = resolve_kernels(*args, **kwargs)

            def timed_attention(*asked: Any) -> Any:
                choice: Any = kernels.choose_attention(*asked)
                if by_part:
                    choice.kernel.run = clock.around("attention", choice.kernel.run)
                return choice

            return dataclasses.replace(kernels, ops=timed_ops(kernels.ops), choose_attention=timed_attention)

        class TimedPass:
            def __init__(self, lora: Any) -> None:
                self.apply = clock.around("adapters", lora.apply)

        class Timed:
            def __init__(self, model: Any) -> None:
                self._model = model
                self._forward = clock.around("rest of the pass", model.forward)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._model, name)

            def forward(self, batch: Any) -> torch.Tensor:
                if by_part and batch.lora is not None:
                    batch = dataclasses.replace(batch, lora=TimedPass(batch.lora))
                logits: torch.Tensor = self._forward(batch)
                return logits

        def timed_sampler(*args: Any, **kwargs: Any) -> Any:
            sampler = make(*args, **kwargs)
            sampler.sample = clock.around("sampling", sampler.sample)
            return sampler

        make = device_parts.make_sampler
        with (
            mock.patch.object(devices, "resolve_kernels", timed_kernels),
            mock.patch.object(device_parts, "make_sampler", timed_sampler),
        ):
            self.engine = LocalEngine(
                arguments.model,
                work,
                wrap_model=Timed,
                kernels=kernels,
                dtype=arguments.dtype,
                num_threads=arguments.threads,
                batch_invariant=arguments.batch_invariant,
                kv_cache_memory=2 << 30,
                adapter_memory=1 << 30,
                max_adapter_rank=RANK,
                max_num_seqs=MAX_BATCH,
                max_num_batched_tokens=2048,
            )

    def step(self) -> tuple[float, dict[str, float]]:
        """(milliseconds, those of its parts)."""
        self.clock.spent.clear()
        begin = time.perf_counter()
        self.engine.step()
        took = (time.perf_counter() - begin) * 1e3
        parts = {name: value * 1e3 for name, value in self.clock.spent.items()}
        parts["host"] = took - sum(parts.values())
        return took, parts


def save_adapters(count: int, out: Path) -> list[Path]:
    """Adapters of rank RANK on all seven sites, of random numbers."""
    return [
        write_real_adapter(out / f"a{number}", rank=RANK, targets=SITES, seed=number, scale=0.01)
        for number in range(count)
    ]


def bandwidth() -> float:
    """Bytes a second that reading takes, of all threads together."""
    numbers = torch.ones(1 << 28)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - begin)
    return numbers.numel() * 4 / min(times)


def product_rate(dtype: torch.dtype) -> float:
    """Floating point operations a second of a large product, by what multiplies fastest here. Where a processor has no
    instructions for 16 bits, the library is slower in them than in float32."""
    x, weight = torch.randn(1024, 1536), torch.randn(1536, 1536)
    ways: list[Callable[[], object]] = [
        partial(dense.pack_weight(weight.to(each)), x.to(each)) for each in {dtype, torch.float32}
    ]
    ways.append(partial(numba_dense.pack_weight(weight.to(dtype)), x.to(dtype)))
    times = []
    for multiply in ways:
        for _ in range(10):
            begin = time.perf_counter()
            multiply()
            times.append(time.perf_counter() - begin)
    return 2 * 1024 * 1536 * 1536 / min(times)


def floors(
    rows: int, adapters: int, positions: int, pairs: int, machine: Machine, dtype: torch.dtype
) -> dict[str, float]:
    """The least milliseconds of the parts that read much or compute much. `positions`: of KV, of all sequences;
    `pairs`: of a row and a position that it sees."""
    size = dtype.itemsize
    weights = 2 * HIDDEN * QUERY + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * INNER
    # A of q, k, v, gate, up · o · down, and B of q · k, v · gate, up · o, down
    lora = RANK * ((5 * HIDDEN + QUERY + INNER) + (QUERY + 2 * KEY_VALUE + 2 * INNER + 2 * HIDDEN))
    head = HIDDEN * VOCABULARY
    read = {
        "linears": LAYERS * weights,
        "adapters": LAYERS * lora * adapters,
        "attention": LAYERS * 2 * KEY_VALUE * positions,
        "head": head,
    }
    sampled = rows if rows <= MAX_BATCH else 1
    products = {
        "linears": LAYERS * weights * rows,
        "attention": LAYERS * 2 * QUERY * pairs,
        "head": head * sampled,
    }
    if adapters:
        products["adapters"] = LAYERS * lora * rows
    return {
        part: 1e3 * max(read[part] * size / machine.read, 2 * products.get(part, 0) / machine.products)
        for part in read
    }


def report(
    title: str, found: dict[str, list[tuple[float, dict[str, float]]]], least: dict[str, float]
) -> None:
    print(f"\n{title}\n| ms | {' | '.join(found)} | floor |\n|---|{'---|' * (len(found) + 1)}")
    for part in PARTS:
        medians = [statistics.median(step[1].get(part, 0.0) for step in steps) for steps in found.values()]
        floor = f"{least[part]:.1f}" if least.get(part) else ""
        print(f"| {part} | {' | '.join(f'{value:.2f}' for value in medians)} | {floor} |")
    totals = [statistics.median(step[0] for step in steps) for steps in found.values()]
    print(
        f"| **step** | {' | '.join(f'**{value:.1f}**' for value in totals)} | {sum(least.values()):.1f} |",
        flush=True,
    )


def decode(
    engines: dict[str, Engine],
    folders: list[Path],
    batch: int,
    adapters: int,
    machine: Machine,
    arguments: argparse.Namespace,
) -> None:
    """Steps of `batch` sequences around a context of `context`, each with the next of `adapters` adapters."""
    rng = random.Random(0)
    context = arguments.context
    names = []
    for number in range(batch):
        names.append(f"d{batch}-{adapters}-{number}")
        prompt = [rng.randrange(100, 40_000) for _ in range(context - TURNS // 2)]
        for timed in engines.values():
            ref = timed.engine.publish(folders[number % adapters]) if adapters else None
            timed.engine.add(
                names[-1], prompt, ref, max_tokens=4 * TURNS, temperature=arguments.temperature, seed=number
            )
    for timed in engines.values():
        while len(timed.engine.events.keys() & names) < batch:
            timed.engine.step()
        timed.engine.step()
    found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in engines}
    for _ in range(TURNS):
        for name, timed in engines.items():
            found[name].append(timed.step())
    for timed in engines.values():
        timed.engine.run()
    seen = batch * context
    least = floors(batch, adapters, seen, seen, machine, engines_dtype(engines))
    report(f"decode, batch {batch}, {adapters} adapters, context {context}", found, least)
    print(f"detokenising a step's {batch} tokens: {detokenising(batch, arguments.model):.2f} ms", flush=True)


def detokenising(batch: int, model: Path) -> float:
    """Milliseconds for one token of each of `batch` texts, with a stop string each."""
    table = TextProcessor(model, max_model_len=2048).table
    texts = [TextStream(table, ["never said"]) for _ in range(batch)]
    rng = random.Random(2)
    times = []
    for _ in range(8 * TURNS):
        tokens = [(rng.randrange(100, 40_000),) for _ in texts]
        begin = time.perf_counter()
        for text, token in zip(texts, tokens, strict=True):
            text.push(token)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def prefill(
    engines: dict[str, Engine], folders: list[Path], adapters: int, prompt: int, machine: Machine
) -> None:
    """One step of a prompt that nothing was found of, with one adapter if there are any."""
    rng = random.Random(1)
    found: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in engines}
    for turn in range(TURNS // 2 + 1):
        tokens = [rng.randrange(100, 40_000) for _ in range(prompt)]
        for name, timed in engines.items():
            ref = timed.engine.publish(folders[0]) if adapters else None
            timed.engine.add(f"p{adapters}-{turn}", tokens, ref, max_tokens=1)
            while timed.engine.core.has_work:
                step = timed.step()
                if "rest of the pass" in step[1] and turn:
                    found[name].append(step)
    pairs = prompt * (prompt + 1) // 2
    least = floors(prompt, min(adapters, 1), prompt, pairs, machine, engines_dtype(engines))
    report(f"prefill of {prompt} tokens, {min(adapters, 1)} adapters", found, least)


def engines_dtype(engines: dict[str, Engine]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, next(iter(engines.values())).engine.built.info.dtype)
    return dtype


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a step's time goes on a CPU.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", default="numba,torch")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--adapters", default="0,16")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="as clients leave it where they do not say"
    )
    parser.add_argument("--batch-invariant", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with ThreadPoolExecutor(1) as pool:  # the threads of its operations end with it
        machine = pool.submit(
            lambda: Machine(bandwidth(), product_rate(getattr(torch, arguments.dtype)))
        ).result()
    print(
        f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}; reads {machine.read / 1e9:.1f} GB/s, "
        f"products {machine.products / 1e9:.0f} GFLOP/s"
    )
    with tempfile.TemporaryDirectory() as work:
        engines = {}
        for kernels in arguments.kernels.split(","):
            ways = {kernels: False, f"{kernels} by part": True} if kernels == "numba" else {kernels: True}
            for name, by_part in ways.items():
                home = Path(work) / name
                home.mkdir()
                engines[name] = Engine(kernels, arguments, home, by_part=by_part)
        counts = [int(count) for count in arguments.adapters.split(",")]
        folders = save_adapters(max(counts), Path(work))
        for batch in map(int, arguments.batch.split(",")):
            for adapters in counts:
                if adapters <= batch:
                    decode(engines, folders, batch, adapters, machine, arguments)
        for adapters in counts:
            prefill(engines, folders, adapters, arguments.prompt, machine)
        for timed in engines.values():
            timed.engine.close()
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
