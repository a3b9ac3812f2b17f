"""Checks over one conversation by activated LoRAs beside plain LoRAs, on the real model:

    PYTHONPATH=tests python -m bench.cpu.alora MODEL [--tokens 4096] [--adapters 8] [--rounds 3]

MODEL is the directory of SmolLM2-135M-Instruct. The base has read a conversation, and random adapters of rank 32 on
attention are asked about it, one after the other and all at once. Prints the time to the first token, and how many KV
blocks the conversation's requests hold, both beside the base's own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.gpu.engine.checkpoint import write_adapter
from loraplex.adapters.ref import AdapterRef
from support.engine.local_engine import LocalEngine

INVOCATION = (9, 8, 7)
QUESTION_TOKENS = 8
OUTPUT = 16
RANK = 32
SITES = ("q_proj", "k_proj", "v_proj")


class Asker:
    """Requests over one conversation to one engine."""

    def __init__(self, engine: LocalEngine, conversation: Sequence[int]) -> None:
        self._engine = engine
        self._conversation = conversation
        self._rng = random.Random(1)
        self._number = 0

    def ask(self, adapters: Sequence[AdapterRef | None]) -> tuple[list[float], int]:
        """One request to each, all at once: seconds to each first token, and the most KV blocks held."""
        begun, most = time.perf_counter(), 0
        waiting = {self._add(adapter) for adapter in adapters}
        seconds = []
        while self._engine.core.has_work:
            events = self._engine.step()
            now = time.perf_counter()
            most = max(most, self._engine.core.stats().num_kv_blocks_used)
            for event in events:
                if event.error is not None:
                    raise RuntimeError(event.error.message)
                if event.token_ids and event.request_id in waiting:
                    waiting.remove(event.request_id)
                    seconds.append(now - begun)
        return seconds, most

    def _add(self, adapter: AdapterRef | None) -> str:
        self._number += 1
        name = str(self._number)
        question = [self._rng.randrange(1000, 20_000) for _ in range(QUESTION_TOKENS)]
        self._engine.add(name, [*self._conversation, *INVOCATION, *question], adapter, max_tokens=OUTPUT)
        return name


def write_adapters(model: Path, folder: Path, count: int) -> Iterator[tuple[str, Path]]:
    """Plain and activated ones, with random numbers."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for kind in ("plain", "activated"):
        for number in range(count):
            made = folder / f"{kind}-{number}"
            write_adapter(made, config, RANK, torch.bfloat16, torch.device("cpu"), sites=SITES, seed=number)
            if kind == "activated":
                path = made / "adapter_config.json"
                fields = json.loads(path.read_text("utf-8")) | {"alora_invocation_tokens": list(INVOCATION)}
                path.write_text(json.dumps(fields), "utf-8")
            yield kind, made


@contextmanager
def started(model: Path, work: Path, tokens: int, count: int) -> Iterator[LocalEngine]:
    engine = LocalEngine(
        model, work, max_model_len=tokens + 256, max_num_seqs=16, num_threads=os.cpu_count(),
        kv_cache_memory=(count + 4) * (tokens + 256) * 30 * 2 * 3 * 64 * 2,
        adapter_memory=256 << 20, adapter_cpu_memory=256 << 20, dtype="bfloat16",
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def measure(model: Path, tokens: int, count: int, seed: int) -> dict[str, float]:
    """Seconds and blocks by name."""
    rng = random.Random(seed)
    conversation = [rng.randrange(1000, 20_000) for _ in range(tokens)]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = list(write_adapters(model, folder, count))
        with started(model, folder / "engine", tokens, count) as engine:
            refs: dict[str, list[AdapterRef]] = {"plain": [], "activated": []}
            for kind, path in made:
                refs[kind].append(engine.publish(path))
            resident = Asker(engine, conversation[:16])
            for adapters in refs.values():
                resident.ask(adapters)
            asker = Asker(engine, conversation)
            (found["base, cold"],), _ = asker.ask([None])
            warm = [asker.ask([None])[0][0] for _ in range(count)]
            found["base, warm"] = statistics.median(warm)
            alone = [asker.ask([ref])[0][0] for ref in refs["activated"]]
            found["activated, one by one"] = statistics.median(alone)
            _, found["blocks of one, base"] = asker.ask([None])
            seconds, found["blocks, activated"] = asker.ask(refs["activated"])
            found["activated, all at once"] = max(seconds)
            found["plain, one by one"] = statistics.median(
                asker.ask([ref])[0][0] for ref in refs["plain"][:2]
            )
            other = Asker(engine, [*conversation[1:], conversation[0]])
            seconds, found["blocks, plain"] = other.ask(refs["plain"])
            found["plain, all at once"] = max(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rounds = [measure(given.model, given.tokens, given.adapters, seed) for seed in range(given.rounds)]
    load = os.getloadavg()[0]
    print(f"{given.tokens} tokens, {given.adapters} adapters, {os.cpu_count()} processors, load {load:.1f}\n")
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        if name.startswith("blocks"):
            print(f"{name:<26} {statistics.median(values):8.0f}")
        else:
            spread = f"{min(values) * 1e3:.0f} to {max(values) * 1e3:.0f}"
            print(f"{name:<26} {statistics.median(values) * 1e3:8.0f} ms  ({spread})")
    of = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    print(f"\nactivated ÷ base, both warm: {of['activated, one by one'] / of['base, warm']:.2f}")
    print(f"plain, cold ÷ activated: {of['plain, one by one'] / of['activated, one by one']:.0f}")
    print(
        f"blocks of all ÷ blocks of one: {of['blocks, activated'] / of['blocks of one, base']:.2f} activated, "
        f"{of['blocks, plain'] / of['blocks of one, base']:.2f} plain"
    )


if __name__ == "__main__":
    main()
