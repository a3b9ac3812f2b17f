"""How many answers of the real model have the same bits beside random neighbours as alone, on a CPU.

    PYTHONPATH=tests python -m bench.same_bits MODEL [--dtypes bfloat16,float32] [--requests 72] [--threads N]

MODEL is the directory of SmolLM2-135M-Instruct. Each request is asked of an engine alone, and then of another engine
that serves up to eight at a time, on four adapters while two fit its memory, in steps of up to 70 tokens. Compared
are the tokens, and the bytes of all logits and log probabilities. Another tree's code runs with its own folders before
these in PYTHONPATH; what it costs is `bench.cpu_profile` of both.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from support.engine.same_bits import Answer, Asked, Question
from support.servers.live_server import write_real_adapter

SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS, RANK, MAX_TOKENS = 4, 8, 16


def questions(count: int, rng: random.Random) -> list[Question]:
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(100, 40_000) for _ in range(rng.choice([3, 20, 64, 150, 600])))
        options: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {"logprobs": 2}
        adapter = number % (NUM_ADAPTERS + 1)
        made.append(
            Question(prompt, f"a{adapter}" if adapter else None, {"max_tokens": MAX_TOKENS, **options})
        )
    return made


def compare(model: Path, work: Path, adapters: dict[str, Path], dtype: str, count: int) -> None:
    rng = random.Random(0)
    probes, others = questions(count, rng), questions(count, rng)
    common: dict[str, Any] = {"dtype": dtype, "max_model_len": 1024, "kv_cache_memory": 256 << 20}
    lone = Asked(model, work / f"lone-{dtype}", adapters, adapter_memory=64 << 20, **common)
    expected = {probe: lone.alone(str(number), probe) for number, probe in enumerate(probes)}
    lone.close()
    size = 12 << 20 if dtype == "bfloat16" else 24 << 20
    crowd = Asked(
        model,
        work / f"crowd-{dtype}",
        adapters,
        adapter_memory=size,
        max_num_batched_tokens=70,
        lookahead=1,
        **common,
    )
    found: dict[str, int] = {"bits": 0, "tokens": 0}

    def check(question: Question, answer: Answer) -> None:
        if question in expected:
            found["bits"] += answer == expected[question]
            found["tokens"] += answer.tokens == expected[question].tokens

    asked = [*probes, *others]
    rng.shuffle(asked)
    crowd.among_neighbours(asked, rng, check)
    crowd.close()
    print(f"| {dtype} | {found['bits']} of {count} | {found['tokens']} of {count} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits of answers alone and beside neighbours.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--requests", type=int, default=72)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        adapters = {
            f"a{number}": write_real_adapter(
                work / f"a{number}", rank=RANK, targets=SITES, seed=number, scale=0.01
            )
            for number in range(1, NUM_ADAPTERS + 1)
        }
        print("| dtype | same bits | same tokens |\n|---|---|---|")
        for dtype in arguments.dtypes.split(","):
            compare(arguments.model, work, adapters, dtype, arguments.requests)


if __name__ == "__main__":
    main()
