"""What is computed for a request has the same bits whatever other requests are served with it (docs/determinism.md).

Every question is asked of an engine alone first. Then engines get them at random, beside each other: with all adapters,
in chunks, with prefix hits, preempted, one step ahead or not, on adapters that have to be evicted and loaded again. The
logits of every output token are compared, and so are log probabilities, embeddings and tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.execution.kv_cache import block_bytes
from loraplex.engine.model.base import ModelShape
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.numba_attention import SPAN
from loraplex.kernels.linear import numba_dense
from support.adapters.tiny_adapters import ADAPTERS, BY_TOKEN, KINDS, save_adapters
from support.engine.same_bits import Answer, Asked, PlantedDrafter, Question
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LONGEST = 1100
"""Tokens of a sequence: more than two spans of attention."""
CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("all", "some", "many-ranks", "dora", "head")}
CHOSEN |= {
    name: BY_TOKEN[name] for name in ("embedding-rslora-and-layers", "rows-and-head", "other-rows-of-head")
}
CROSSING = 5
"""The number of the question whose answer goes on into a second span."""
INVOCATION = (1, 2)
CHOSEN |= {"activated": {**ADAPTERS["all"], "r": 6, "alora_invocation_tokens": list(INVOCATION)}}
FAMILIES_ASKED = {
    # Groups of three heads, as in SmolLM2; sums over more inputs than a tile has rows.
    "llama": {
        "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 18, "attention_bias": True,
        "max_position_embeddings": 2048,
    },
    # Windows, softcaps, norms of queries and keys in float32.
    "gemma2": FAMILIES["gemma2"] | {"sliding_window": 70, "max_position_embeddings": 2048},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "wide steps": {"max_num_batched_tokens": 700},
    "narrow steps, one ahead": {"max_num_batched_tokens": 23, "lookahead": 1},
    "few blocks": {"max_num_batched_tokens": 130, "kv_blocks": 16, "max_model_len": 250, "max_num_seqs": 8},
    "few adapters": {"max_num_batched_tokens": 90, "lookahead": 1, "adapter_memory": 1 << 19},
}


@dataclass(frozen=True)
class Subject:
    base: Path
    adapters: dict[str, Path]
    family: dict[str, Any]


@pytest.fixture(scope="module", params=FAMILIES_ASKED)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    family = FAMILIES_ASKED[request.param]
    root = tmp_path_factory.mktemp(request.param)
    base = save_tiny(root / "base", family)
    return Subject(base, save_adapters(base, root, CHOSEN), family)


@pytest.fixture
def make_asked(subject: Subject, tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    made: list[Asked] = []

    def make(dtype: str, *, kv_blocks: int = 2000, **settings: Any) -> Asked:
        heads, dim = subject.family.get("num_key_value_heads", 2), subject.family["head_dim"]
        size = block_bytes(ModelShape(3, heads, dim, VOCAB, 2048), getattr(torch, dtype))
        asked = Asked(
            subject.base,
            tmp_path / str(len(made)),
            subject.adapters,
            kernels="numba",
            dtype=dtype,
            kv_cache_memory=kv_blocks * size,
            **{
                "max_model_len": LONGEST,
                "adapter_memory": 8 << 20,
                "adapter_cpu_memory": 8 << 20,
                "max_num_seqs": 12,
                "num_threads": 1,
                **settings,
            },
        )
        made.append(asked)
        return asked

    yield make
    for asked in made:
        asked.close()


def questions(rng: random.Random, count: int) -> list[Question]:
    """On all adapters, some with a common beginning, of a few tokens to more than two spans of attention."""
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(600))
    made = []
    for number in range(count):
        start = shared[: rng.choice([0, 0, 40, 150])]
        own, most = rng.choice([1, 2, 9, 30, 33, 120]), rng.choice([1, 4, 12, 50])
        if number % 6 == 5:
            start = shared[: rng.choice([500, 540, 600])] + shared[: rng.choice([0, 440])]
        if number == CROSSING:
            start, own, most = shared[:500], 2, 50
        options = [
            {"temperature": 1.0, "seed": number},
            {"temperature": 1.3, "seed": number, "top_p": 0.9, "repetition_penalty": 1.2},
            {"logprobs": 3},
            {"logprobs": 0, "prompt_logprobs": 2},
        ]
        adapter = rng.choice([None, *CHOSEN])
        if adapter == "activated":
            start = (*start, *INVOCATION)
        made.append(
            Question(
                (*start, *(rng.randrange(3, VOCAB) for _ in range(min(own, LONGEST - 50 - len(start))))),
                adapter,
                {"max_tokens": most, **options[number % 4]},
                pooled=number % 9 == 8,
            )
        )
    return made


CASES = [
    ("none", "float32", 20),
    ("none", "bfloat16", 20),
    ("int8", "bfloat16", 20),
    *(
        pytest.param(quantise, dtype, 2500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
        for quantise in ("none", "int8")
        for dtype in ("float32", "bfloat16")
    ),
]
"""How linears are kept, the dtype, and the requests of each engine: four of them for each family. The short version has
codes with one dtype alone."""


@pytest.mark.parametrize(("quantise", "dtype", "count"), CASES)
def test_bits_do_not_depend_on_neighbours(
    make_asked: Callable[..., Asked], quantise: str, dtype: str, count: int
) -> None:
    if not numba_dense.is_for(getattr(torch, dtype)):
        pytest.skip(f"on this processor a library multiplies in {dtype}")
    rng = random.Random(count)
    asked = questions(rng, min(30, count))
    lone = make_asked(dtype, quantise=quantise, max_num_batched_tokens=2048)
    expected = {question: lone.alone(str(number), question) for number, question in enumerate(asked)}
    differing: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for name, settings in SETTINGS.items():
        # With lookahead the token behind a draft would not be known.
        drafter = (
            None
            if "lookahead" in settings
            else PlantedDrafter(random.Random(count), VOCAB, span=SPAN, block=BLOCK_SIZE)
        )
        crowd = make_asked(dtype, quantise=quantise, drafter=drafter, **settings)

        def check(question: Question, answer: Answer, name: str = name) -> None:
            differing[name] += answer != expected[question]

        fitting = [q for q in asked if len(q.prompt) + 50 <= settings.get("max_model_len", LONGEST)]
        chosen = [
            asked[CROSSING] if asked[CROSSING] in fitting else fitting[0],
            *rng.choices(fitting, k=count - 1),
        ]
        if drafter is not None:
            drafter.plan({f"q{number}": expected[question].tokens for number, question in enumerate(chosen)})
        crowd.among_neighbours(chosen, rng, check)
        seen += Counter() if drafter is None else drafter.seen
        stats = crowd.engine.core.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["prefix hits"] += stats.prefix_cache_hits
        seen["evictions"] += stats.device_evictions
    print("SEEN", seen, differing)
    assert +differing == Counter(), f"of {count} each"
    drafts = {"drafted", "accepted", "rejected", "across blocks", "across spans"}
    assert set(+seen) == {"preemptions", "prefix hits", "evictions"} | drafts
