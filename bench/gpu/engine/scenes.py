"""What the product goes through on a GPU: answers, adapters that come and go beside decoding, a step that finds no
memory, and a KV cache that is too small."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bench.gpu.engine.answers import Answer
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.logprobs import join_scores
from loraplex.engine.types import TokenEvent
from support.engine.local_engine import LocalEngine
from support.simulator.core_integrity import check_core

Row = dict[str, Any]
_TOP = 5
_STARVED_STEPS = 20
_STARVED_ROWS = 4
_LEFT_BYTES = tuple(mib << 20 for mib in (64, 32, 16, 8))
"""Device memory that a step is left with, until one finds too little."""


@dataclass(frozen=True)
class Load:
    """`requests` with a prompt of `prompt` tokens and an answer of `output` each, `beside` of them at a time."""

    requests: int
    prompt: int
    output: int
    beside: int


class Starving:
    """A model that finds no memory for more than `most_rows` rows: for where there is no GPU to fill."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.most_rows: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> torch.Tensor:
        if self.most_rows is not None and batch.token_ids.shape[0] > self.most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        logits: torch.Tensor = self._model.forward(batch)
        return logits


def ask(
    engine: LocalEngine,
    adapters: Mapping[Path, AdapterRef],
    asked: Sequence[tuple[Path | None, int]],
    output: int,
) -> list[Answer]:
    """Greedy answers with log probabilities to random prompts of these lengths, all at once."""
    rng = random.Random(11)
    prompts = {}
    for number, (folder, length) in enumerate(asked):
        prompts[f"answer {number}"] = folder, tuple(_tokens(engine, rng, length))
    for name, (folder, prompt) in prompts.items():
        ref = None if folder is None else adapters[folder]
        engine.add(name, prompt, ref, max_tokens=output, logprobs=_TOP, prompt_logprobs=_TOP)
    engine.run()
    found = []
    for name, (folder, prompt) in prompts.items():
        tokens = tuple(engine.tokens(name))
        scores = join_scores([e.scores for e in engine.events[name] if e.scores is not None])
        if scores is None or scores.output is None or scores.prompt is None:
            raise RuntimeError(f"{name} has no log probabilities")
        found.append(
            Answer(f"{name}, {len(prompt)} tokens", folder, prompt, tokens, scores.output, scores.prompt)
        )
    return found


def churn(engine: LocalEngine, adapters: Sequence[AdapterRef], resident: int, load: Load) -> list[Row]:
    """The same load twice: with `resident` adapters that are all on the device, and with all `adapters` at random, so
    that loads and copies go on beside decoding. Times of a step from one plan to the next, prompts included."""
    rows = []
    for name, chosen in (("resident adapters", adapters[:resident]), ("churning adapters", adapters)):
        drive(engine, chosen, load, f"{name}, first")
        before = engine.core.stats()
        begun = time.perf_counter()
        times, errors = drive(engine, chosen, load, name)
        seconds = time.perf_counter() - begun
        after = engine.core.stats()
        moved = {
            "loads": after.adapter_loads - before.adapter_loads,
            "copies": after.adapter_copies - before.adapter_copies,
            "evictions": after.device_evictions - before.device_evictions,
        }
        ordered = sorted(times)
        rows.append(
            {
                "case": name,
                "adapters": len(chosen),
                "requests": load.requests,
                "steps": len(times),
                "p50_ms": statistics.median(ordered) * 1e3,
                "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
                "tokens_per_s": load.requests * load.output / seconds,
                **moved,
                "errors": len(errors),
                "note": next(iter(errors), ""),
                "ok": not errors and bool(moved["evictions"]) == (len(chosen) > resident),
            }
        )
    return rows


def out_of_memory(engine: LocalEngine, adapter: AdapterRef, load: Load, starving: Starving | None) -> Row:
    """A step that finds no device memory: it is computed in smaller ones, and all are answered as before. `starving`
    where there is no GPU."""
    expected = _answers(engine, adapter, load, "before")
    found: dict[str, list[int]] = {}
    ran_out = engine.core.stats().num_out_of_memory
    left = 0
    for left in _LEFT_BYTES:
        taken = _without_memory(starving, torch.device(engine.built.info.device), left)
        found = _answers(engine, adapter, load, f"with {left}", taken)
        if engine.core.stats().num_out_of_memory > ran_out:
            break
    stats = engine.core.stats()
    check_core(engine.core)
    times = stats.num_out_of_memory - ran_out
    return {
        "case": "a step without memory",
        "left_bytes": left,
        "times": times,
        "same_tokens": _same(expected, found),
        "ok": times > 0 and (stats.num_kv_blocks_used, stats.num_leases) == (0, 0),
    }


def preemption(engine: LocalEngine, adapter: AdapterRef, load: Load) -> Row:
    """More sequences than the KV cache holds: some are preempted, all are answered as if they were alone."""
    together = _answers(engine, adapter, load, "together")
    preempted = engine.core.stats().num_preemptions
    alone = _answers(engine, adapter, Load(load.requests, load.prompt, load.output, 1), "alone")
    check_core(engine.core)
    return {
        "case": "a small KV cache",
        "preemptions": preempted,
        "same_tokens": _same(together, alone),
        "ok": preempted > 0,
    }


def drive(
    engine: LocalEngine, adapters: Sequence[AdapterRef], load: Load, name: str
) -> tuple[list[float], list[str]]:
    """Seconds of each step that had something to tell, and the errors that requests ended in."""
    rng = random.Random(name)
    numbers = count()
    left = load.requests

    def add() -> None:
        nonlocal left
        left -= 1
        prompt = _tokens(engine, rng, load.prompt)
        adapter = adapters[rng.randrange(len(adapters))]
        engine.add(f"{name} {next(numbers)}", prompt, adapter, max_tokens=load.output)

    for _ in range(min(left, load.beside)):
        add()
    times: list[float] = []
    errors: list[str] = []
    while engine.core.has_work:
        begun = time.perf_counter()
        events = engine.step()
        if events:
            times.append(time.perf_counter() - begun)
        elif engine.core.idle_s() != 0.0:
            time.sleep(0.0005)  # only a loader thread can move things now
        for event in events:
            if event.finish_reason is not None:
                errors += _errors(event)
                if left:
                    add()
    return times, errors


def _answers(
    engine: LocalEngine,
    adapter: AdapterRef,
    load: Load,
    name: str,
    without_memory: AbstractContextManager[None] | None = None,
) -> dict[str, list[int]]:
    """Tokens of each request; the same prompts whatever the name. The first steps are taken `without_memory`, until
    one has found none."""
    rng = random.Random(13)
    asked = [_tokens(engine, rng, load.prompt) for _ in range(load.requests)]
    ran_out = engine.core.stats().num_out_of_memory
    for first in range(0, len(asked), load.beside):
        for number, prompt in enumerate(asked[first : first + load.beside], first):
            engine.add(f"{name} {number}", prompt, adapter if number % 2 else None, max_tokens=load.output)
        if without_memory is not None:
            with without_memory:
                for _ in range(_STARVED_STEPS):
                    if engine.core.stats().num_out_of_memory > ran_out or not engine.core.has_work:
                        break
                    engine.step()
            without_memory = None
        engine.run()
    return {str(number): engine.tokens(f"{name} {number}") for number in range(len(asked))}


@contextmanager
def _without_memory(starving: Starving | None, device: torch.device, left_bytes: int) -> Iterator[None]:
    """While in it, a GPU has so much memory left."""
    if starving is not None:
        starving.most_rows = _STARVED_ROWS
        try:
            yield
        finally:
            starving.most_rows = None
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    taken = torch.empty(max(0, free - left_bytes), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del taken
        torch.cuda.empty_cache()


def _tokens(engine: LocalEngine, rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, engine.built.info.vocab_size) for _ in range(length)]


def _errors(event: TokenEvent) -> list[str]:
    return [] if event.error is None else [f"{event.error.code}: {event.error.message}"]


def _same(one: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> float:
    """The share of the answers whose tokens are all the same. On a GPU it may be below 1: the library's products and
    the order of sums depend on the batch, unless the engine was started with --batch-invariant."""
    return sum(one[name] == other[name] for name in one) / len(one)
