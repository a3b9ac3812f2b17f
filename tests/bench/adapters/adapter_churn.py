"""Throughput with many adapters on small memory, beside a few that fit: what a churn of loads costs.

    PYTHONPATH=tests python -m bench.adapters.adapter_churn MODEL [--many 200] [--few 4] [--hot 8] [--warm 16]
        [--rounds 3] [--requests 120] [--new 24] [--rank 16] [--sites all|qv] [--stored F32] [--images 2048]
        [--dtype bfloat16]

MODEL is the directory of SmolLM2-135M-Instruct. The engine is the real one, in this process, with a thread of its own.
Device memory holds `--hot` adapters of `--rank`, host memory `--warm`. `--images` is the size of the
cache of laid-out adapters in MiB, 0 for none.

Each of `--requests` names an adapter by Zipf(1.1), of the `--many` or of the `--few`; 16 are in flight. `resident` is
the same as `many` on an engine with memory for all of them: what is lost between `few` and `resident` is the cost of
more adapters in a step, and what is lost between `resident` and `many` that of the loads. The three take turns, and a
ratio is of neighbours. Before the first round every adapter is asked for once. Printed: output tokens a second, loads,
and milliseconds of a load.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the engine's process has it

from loraplex.adapters.ref import AdapterRef
from support.adapters.drafts import ALL_SITES
from support.engine.local_engine import LocalEngine
from support.servers.live_server import write_real_adapter

IN_FLIGHT = 16
PROMPT = 24
PER_RANK, PER_RANK_QV = 610_560, 115_200
"""Bytes of an adapter for each rank in bfloat16, on all seven sites and on q_proj and v_proj."""


class Churn:
    def __init__(self, engine: LocalEngine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._options = options
        self._count = 0

    def round(self, refs: list[AdapterRef], seed: int) -> tuple[float, int, float]:
        """Output tokens a second, loads, and milliseconds of a load."""
        rng = random.Random(seed)
        weights = [1 / (place + 1) ** 1.1 for place in range(len(refs))]
        asked = rng.choices(refs, weights, k=self._options.requests)
        before, spent = self._engine.core.stats(), self._load_seconds()
        took = self.serve(asked, rng)
        after = self._engine.core.stats()
        loads = after.adapter_loads - before.adapter_loads
        tokens = after.generation_tokens - before.generation_tokens
        return tokens / took, loads, (self._load_seconds() - spent) / max(1, loads) * 1e3

    def serve(self, asked: list[AdapterRef], rng: random.Random, new: int | None = None) -> float:
        """Seconds until all have been answered, with `new` tokens each."""
        core, waiting, live = self._engine.core, list(reversed(asked)), 0
        begin = time.monotonic()
        while waiting or core.has_work:
            while waiting and live < IN_FLIGHT:
                self._count += 1
                prompt = [rng.randrange(1000, 40_000) for _ in range(PROMPT)]
                # Of different lengths, or all would end and begin in the same steps.
                max_tokens = (
                    rng.randint(self._options.new // 2, 3 * self._options.new // 2) if new is None else new
                )
                self._engine.add(f"r{self._count}", prompt, waiting.pop(), max_tokens=max_tokens)
                live += 1
            events = core.step()
            for event in events:
                assert event.error is None, event.error
            live -= sum(event.finish_reason is not None for event in events)
            if not events and core.idle_s() != 0.0:
                time.sleep(0.0005)
        return time.monotonic() - begin

    def close(self) -> None:
        self._engine.close()

    def _load_seconds(self) -> float:
        return self._engine.core._cache.usage().load_seconds["disk"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    for name, default in (
        ("many", 200), ("few", 4), ("hot", 8), ("warm", 16), ("rounds", 3), ("requests", 120),
        ("new", 24), ("rank", 16), ("images", 2048),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sites", choices=["all", "qv"], default="all")
    parser.add_argument("--stored", default="F32")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options)


def run(root: Path, options: argparse.Namespace) -> None:
    refs: list[AdapterRef] = []
    targets = ALL_SITES if options.sites == "all" else ["q_proj", "v_proj"]
    one = options.rank * (PER_RANK if options.sites == "all" else PER_RANK_QV) * 5 // 4

    def make(hot: int, warm: int) -> Churn:
        engine = LocalEngine(
            options.model,
            root,
            dtype=options.dtype,
            kv_cache_memory=256 << 20,
            adapter_memory=hot * one,
            adapter_cpu_memory=warm * one,
            image_dir=str(root / "images"),
            adapter_image_cache=options.images << 20,
            max_num_seqs=IN_FLIGHT,
        )
        for seed in range(len(refs), options.many):
            folder = root / f"a{seed}"
            write_real_adapter(
                folder, rank=options.rank, lora_alpha=options.rank, targets=targets, dtype=options.stored, seed=seed
            )  # fmt: skip
            refs.append(engine.publish(folder, put=os.rename))
        churn = Churn(engine, options)
        for _ in range(2 if options.images else 1):
            churn.serve(refs, random.Random(0), 1)
        return churn

    small, roomy = make(options.hot, options.warm), make(options.many, options.many)
    arms = {"few": (small, refs[: options.few]), "resident": (roomy, refs), "many": (small, refs)}
    print(f"{'':8} {'tokens/s':>9} {'loads':>6} {'ms/load':>8}")
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
        for name, (churn, asked) in arms.items():
            rate, loads, load_ms = churn.round(asked, number)
            rates[name].append(rate)
            print(f"{name:8} {rate:9.1f} {loads:6d} {load_ms:8.1f}", flush=True)
    for other in ("few", "resident"):
        ratios = [a / b for a, b in zip(rates["many"], rates[other], strict=True)]
        print(f"many/{other:8} {statistics.median(ratios):.3f}  ({', '.join(f'{r:.3f}' for r in ratios)})")
    small.close()
    roomy.close()


if __name__ == "__main__":
    main()
