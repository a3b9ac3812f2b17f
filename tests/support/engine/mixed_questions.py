"""Questions to a tiny base and its adapters in one engine; the answers are those of transformers and PEFT."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import block_needs, blocks_for
from loraplex.engine.kv.states import slot_bytes
from support.adapters.peft_zoo import PeftReference
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import VOCAB
from support.models.loading import outline_model

NUM_BLOCKS = 14
LONGEST = 100
LONGEST_START = 35
"""Tokens that prompts may have in common: far beyond the windows of the tiny families."""

Answered = list[tuple[str | None, list[int], list[int]]]
"""Of each question: the adapter's name, the prompt, the answer."""


def cramped_engine(base: Path, work: Path, *, num_blocks: int = NUM_BLOCKS, **settings: Any) -> LocalEngine:
    """In float32, with a pool so small that sequences start over: of as many of the longest sequences as `num_blocks`
    hold where all layers see everything, beside states for all that run."""
    caches = outline_model(base, torch.device("cpu"), "float32").shape.caches
    most_ahead = 40 * (1 + settings.get("lookahead", 0))
    num_blocks = num_blocks * block_needs(caches, most_ahead).of(LONGEST) // blocks_for(LONGEST)
    states = 2 * settings.get("max_num_seqs", 4) * slot_bytes(caches)
    return LocalEngine(
        base,
        work,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_batched_tokens=40,
        kv_cache_memory=num_blocks * block_bytes(caches, torch.float32) + states,
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
        **settings,
    )


def ask_mixed(
    engine: LocalEngine,
    adapters: Mapping[str, Path],
    *,
    seed: str,
    requests: int,
    tokens: int,
    loaded: bool = False,
    finds: bool = False,
    **sampling: Any,
) -> Answered:
    """Questions to the base, to `all` and to `many-ranks` in turns, many of them with a common start; all at once.
    `loaded`: steps depend on the seed alone, as the adapters are on the device before; and every other answer has a
    token more, so that some go on when others have ended. `finds`: when all have ended, each is asked twice for
    something behind the common start, and finds it. `sampling` as for `LocalEngine.add`."""
    rng = random.Random(seed)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    if loaded:
        engine.pin(*refs.values())
    shared = [rng.randrange(3, VOCAB) for _ in range(LONGEST_START)]
    asked = []
    for number in range(requests):
        name = [None, "all", "many-ranks"][number % 3]
        prompt = shared[: rng.choice([0, 16, LONGEST_START])]
        prompt += [rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 9]))]
        asked.append((name, prompt))
        most = tokens + number % 2 if loaded else tokens
        engine.add(str(number), prompt, refs[name] if name else None, max_tokens=most, **sampling)
    engine.run()
    for name in (None, "all", "many-ranks") if finds else ():
        for number in range(2):
            engine.add(
                str(len(asked)), [*shared, 3 + number], refs[name] if name else None, max_tokens=4, **sampling
            )
            asked.append((name, [*shared, 3 + number]))
            engine.run()
    return [(name, prompt, engine.tokens(str(number))) for number, (name, prompt) in enumerate(asked)]


def check_answers(answered: Answered, base: Path, adapters: Mapping[str, Path]) -> None:
    """Teacher-forced: each token is the likeliest after those before it."""
    reference = PeftReference(base, dict(adapters), torch.float32)
    for name, prompt, answer in answered:
        want = reference.logits(name, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == want, name
