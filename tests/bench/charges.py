"""What an adapter costs a CPU beside the base model, in the units that the fair queue charges.

    PYTHONPATH=tests python -m bench.charges MODEL [--ranks 8,16,32,64] [--rows 16] [--prompt 256] [--threads N]

MODEL is the directory of SmolLM2-135M-Instruct. The engine is the real one, in this process; each rank's adapters are
on all seven sites, and every row has one of its own. Figures are medians of interleaved rounds: a prompt token and an
output token (in a step of `--rows`) on the base model and, over those, on an adapter of each rank; and the processor's
time of a cold load, in prompt tokens. The last lines are fit by least squares: what `loraplex.engine.config.Charges`
should hold.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the engine's process has it

from loraplex.adapters.ref import AdapterRef
from support.adapters.drafts import ALL_SITES
from support.engine.local_engine import LocalEngine
from support.servers.live_server import write_real_adapter

ROUNDS = 5
DECODED = 24
VOCABULARY = 49_152


class Rig:
    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self._random = random.Random(0)
        self._rows, self._prompt = arguments.rows, arguments.prompt
        ranks = [int(rank) for rank in arguments.ranks.split(",")]
        self.engine = LocalEngine(
            arguments.model,
            work,
            max_model_len=self._prompt + DECODED + 16,
            max_num_seqs=self._rows,
            max_num_batched_tokens=self._prompt,
            adapter_memory=1 << 31,
            adapter_cpu_memory=1 << 31,
            num_threads=arguments.threads,
        )
        self.adapters: dict[int, list[AdapterRef | None]] = {0: [None] * self._rows}
        for rank in ranks:
            self.adapters[rank] = []
            for number in range(self._rows):
                folder = write_real_adapter(
                    work / f"r{rank}-{number}", rank=rank, targets=ALL_SITES, seed=1000 * rank + number
                )
                self.adapters[rank].append(self.engine.publish(folder))
        self._names = iter(range(10**9))

    def _add(self, adapter: AdapterRef | None, num_prompt: int, max_tokens: int) -> None:
        prompt = [self._random.randrange(10, VOCABULARY) for _ in range(num_prompt)]
        self.engine.add(f"r{next(self._names)}", prompt, adapter, max_tokens=max_tokens)

    def load(self, rank: int) -> float:
        """Seconds of the processor for each of the adapters, from the disk to the device; then they stay there."""
        began = time.process_time()
        for adapter in self.adapters[rank]:
            self._add(adapter, 1, 1)
        self.engine.run()
        return (time.process_time() - began) / self._rows

    def prefill(self, rank: int) -> float:
        """Seconds for a prompt token."""
        self._add(self.adapters[rank][0], self._prompt, 1)
        began = time.perf_counter()
        self.engine.run()
        return (time.perf_counter() - began) / self._prompt

    def decode(self, rank: int) -> float:
        """Seconds for an output token."""
        for adapter in self.adapters[rank]:
            self._add(adapter, 4, DECODED)
        for _ in range(4):
            self.engine.step()  # the prompts
        taken = []
        while self.engine.core.has_work:
            began = time.perf_counter()
            self.engine.step()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[: DECODED // 2]) / self._rows


def slope(points: dict[int, float]) -> float:
    """Of the line through the origin with the least squares."""
    return sum(x * y for x, y in points.items()) / sum(x * x for x in points)


def main() -> None:
    parser = argparse.ArgumentParser(description="What an adapter costs beside the base model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rig = Rig(arguments, Path(work))
        try:
            measure(rig)
        finally:
            rig.engine.close()


def measure(rig: Rig) -> None:
    empty = rig.load(0)  # what the requests take that bring the adapters
    loads = {rank: rig.load(rank) - empty for rank in rig.adapters if rank}
    prefills, decodes = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for _ in range(ROUNDS):
        for rank in rig.adapters:
            prefills[rank].append(rig.prefill(rank))
            decodes[rank].append(rig.decode(rank))
    prefill = {rank: statistics.median(taken) for rank, taken in prefills.items()}
    decode = {rank: statistics.median(taken) for rank, taken in decodes.items()}
    print(
        f"on the base model: a prompt token {prefill[0] * 1e3:.3f} ms, an output token {decode[0] * 1e3:.3f} ms"
    )
    print("rank  prompt token  output token  load")
    for rank, seconds in loads.items():
        print(
            f"{rank:4} {prefill[rank] / prefill[0]:13.3f} {decode[rank] / decode[0]:13.3f} {seconds / prefill[0]:5.0f}"
        )
    ranks = {
        "prompt tokens": slope({rank: prefill[rank] / prefill[0] - 1 for rank in loads}),
        "output tokens": slope({rank: decode[rank] / decode[0] - 1 for rank in loads}),
    }
    print("per_rank: " + ", ".join(f"{value:.4f} by {name}" for name, value in ranks.items()))
    print(f"load_per_rank: {slope({rank: seconds / prefill[0] for rank, seconds in loads.items()}):.2f}")


if __name__ == "__main__":
    main()
