"""Activated LoRA computes what PEFT's aLoRA computes, in random mixes with other adapters and the base."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.kv.cache import block_bytes
from loraplex.engine.kv.layers import CacheKind
from support.adapters.peft_zoo import ALL_SITES, PeftReference
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.mixed_questions import cramped_engine
from support.engine.same_bits import Answer, Asked, Question
from support.models.checkpoints import OTHERS as WRAPPED
from support.models.checkpoints import VOCAB, save_tiny
from support.simulator.core_integrity import check_core

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]

INVOCATION = (1, 2)
FAMILY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "num_attention_heads": 6, "head_dim": 18, "attention_bias": True,
    "max_position_embeddings": 1024,
}  # fmt: skip
ACTIVATED: dict[str, dict[str, Any]] = {
    "activated": {**ADAPTERS["all"], "alora_invocation_tokens": list(INVOCATION)},
    "activated-rslora-and-head": {
        "r": 5,
        "lora_alpha": 7,
        "use_rslora": True,
        "target_modules": [*ALL_SITES, "lm_head"],
        "alora_invocation_tokens": list(INVOCATION),
    },
}
OTHERS = {"all": ADAPTERS["all"], "dora": KINDS["dora"]}
CHUNKS = (1, 2, 7, 16, 64)


class Reference:
    """PEFT's own answers."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: torch.dtype) -> None:
        self._peft = PeftReference(base, adapters, dtype)

    def logits(self, question: Question, tokens: Sequence[int] = ()) -> torch.Tensor:
        """[prompt + tokens, V] float32, teacher-forced: the adapter acts where it would in `generate`, whatever the
        tokens of the answer spell."""
        place = last_place(question.prompt) if question.adapter in ACTIVATED else None
        return self._peft.logits(question.adapter, [*question.prompt, *tokens], acts_from=place)


def last_place(prompt: Sequence[int]) -> int:
    return max(at for at in range(len(prompt)) if tuple(prompt[at : at + 2]) == INVOCATION)


TIE = 5e-5
"""Two logits of PEFT that are nearer to each other may change places: sums are rounded otherwise on another processor,
by about 1.6e-5 here."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), FAMILY)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters(base, tmp_path_factory.mktemp("adapters"), ACTIVATED | OTHERS, std=0.1)


@pytest.fixture
def make_asked(base: Path, adapters: dict[str, Path], tmp_path: Path) -> Iterator[Any]:
    made: list[Asked] = []

    def make(dtype: str, *, kv_blocks: int = 400, **settings: Any) -> Asked:
        caches = (CacheKind(2, FAMILY["head_dim"]),) * 3
        size = block_bytes(caches, getattr(torch, dtype))
        sizes = {
            "max_model_len": 300,
            "adapter_memory": 8 << 20,
            "adapter_cpu_memory": 8 << 20,
            "num_threads": 1,
        }
        folder = tmp_path / str(len(made))
        made.append(
            Asked(base, folder, adapters, dtype=dtype, kv_cache_memory=kv_blocks * size, **sizes | settings)
        )
        return made[-1]

    yield make
    for asked in made:
        asked.close()


def questions(rng: random.Random, count: int) -> list[Question]:
    """On all adapters and the base, with common beginnings; prompts of activated ones have an invocation or two."""
    shared = tuple(rng.randrange(3, VOCAB) for _ in range(150))
    made = []
    for _ in range(count):
        adapter = rng.choice([None, *OTHERS, *ACTIVATED, *ACTIVATED])
        start = shared[: rng.choice([0, 20, 64, 90])]
        own = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 20])))
        if adapter in ACTIVATED:
            earlier = (*INVOCATION, 9) if rng.random() < 0.3 else ()
            start = (*start, *earlier, *own[:1], *INVOCATION)
        made.append(Question((*start, *own), adapter, {"max_tokens": rng.choice([1, 6, 30])}))
    return made


def growing_questions(rng: random.Random) -> list[Question]:
    """Eight of two blocks of the KV cache each, which need five at their ends."""
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(30)) for _ in range(8)]
    return [Question(prompt, rng.choice([None, *OTHERS]), {"max_tokens": 50}) for prompt in prompts]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_float32_tokens_and_logits_equal_peft(
    make_asked: Any, base: Path, adapters: dict[str, Path], lookahead: int
) -> None:
    rng = random.Random(lookahead)
    reference = Reference(base, adapters, torch.float32)
    seen = {"preemptions": 0, "prefix hits": 0}
    worst = 0.0

    def check(question: Question, answer: Answer) -> None:
        nonlocal worst
        expected = reference.logits(question, answer.tokens)[len(question.prompt) - 1 : -1]
        chosen = expected.gather(-1, torch.tensor(answer.tokens).unsqueeze(-1)).squeeze(-1)
        assert float((expected.amax(-1) - chosen).max()) <= TIE, question
        found = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in answer.logits])
        worst = max(worst, float((found - expected).abs().max()))

    for chunk in CHUNKS:
        asked = make_asked(
            "float32",
            max_num_batched_tokens=chunk,
            max_num_seqs=min(8, chunk),
            kv_blocks=11,
            max_model_len=170,
            lookahead=lookahead,
        )
        asked.among_neighbours(questions(rng, 3 if chunk < 7 else 12), rng, check)
        if chunk == 64:  # more than the blocks hold, whatever the times of steps were
            asked.among_neighbours(growing_questions(rng), rng, check, first=100)
        check_core(asked.engine.core)
        stats = asked.engine.core.stats()
        seen["preemptions"] += stats.num_preemptions
        seen["prefix hits"] += stats.prefix_cache_hits
    assert all(seen.values()), seen
    assert worst <= 1e-3


def test_bfloat16_is_as_near_to_float32_as_peft_is(
    make_asked: Any, base: Path, adapters: dict[str, Path]
) -> None:
    rng = random.Random(5)
    exact = Reference(base, adapters, torch.float32)
    rounded = Reference(base, adapters, torch.bfloat16)
    ours: list[float] = []
    theirs: list[float] = []

    def check(question: Question, answer: Answer) -> None:
        known = exact.logits(question, answer.tokens)[len(question.prompt) - 1 : -1]
        found = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in answer.logits])
        peft = rounded.logits(question, answer.tokens)[len(question.prompt) - 1 : -1]
        ours.append(float((found - known).pow(2).mean().sqrt()))
        theirs.append(float((peft - known).pow(2).mean().sqrt()))

    asked = make_asked("bfloat16", max_num_batched_tokens=33, max_num_seqs=8)
    asked.among_neighbours([q for q in questions(rng, 9) if q.adapter in ACTIVATED], rng, check)
    assert len(ours) >= 4
    assert sum(ours) <= 1.5 * sum(theirs)


@pytest.mark.parametrize("place", [1, 20, 32])
def test_log_probabilities_of_the_prompt_equal_pefts_on_both_sides(
    make_asked: Any, base: Path, adapters: dict[str, Path], place: int
) -> None:
    rng = random.Random(place)
    before, behind = ([rng.randrange(3, VOCAB) for _ in range(count)] for count in (place, 30))
    prompt = (*before, *INVOCATION, *behind)
    question = Question(prompt, "activated", {"max_tokens": 1, "prompt_logprobs": 0})
    reference = Reference(base, adapters, torch.float32)
    asked = make_asked("float32", max_num_batched_tokens=24, max_num_seqs=8)
    # The base's blocks of the conversation are there already.
    asked.alone("base", Question(prompt, None, {"max_tokens": 1}))
    asked.add("r", question)
    asked.engine.run()
    told = [event.scores.prompt for event in asked.engine.events["r"] if event.scores is not None]
    values = b"".join(part.values for part in told if part is not None)
    found = torch.frombuffer(bytearray(values), dtype=torch.float32).tolist()
    scores = reference.logits(question).log_softmax(-1)
    expected = [float(scores[at - 1, token]) for at, token in enumerate(prompt) if at]
    assert found == pytest.approx(expected, abs=1e-3)
    plain = reference.logits(Question(prompt, None)).log_softmax(-1)
    differing = [at for at in range(len(prompt)) if float((plain[at] - scores[at]).abs().max()) > 1e-3]
    assert differing == list(range(place, len(prompt)))


def test_models_through_transformers_compute_both_sides_too(tmp_path: Path) -> None:
    rng = random.Random(1)
    options = WRAPPED["starcoder2"]
    base = save_tiny(tmp_path / "base", options)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj", "lm_head"]}
    chosen = {"plain": config, "activated": config | {"alora_invocation_tokens": list(INVOCATION)}}
    adapters = save_adapters(base, tmp_path, chosen, std=0.1)
    engine = cramped_engine(base, tmp_path / "work", lookahead=1, max_num_seqs=6)
    assert engine.built.info.decoder == "transformers"
    refs = {None: None, **{name: engine.publish(folder, name=name) for name, folder in adapters.items()}}
    shared = tuple(rng.randrange(3, 100) for _ in range(50))
    asked = []
    for number in range(9):
        name = (None, "activated", "plain", "activated")[number % 4]
        invoked = INVOCATION if name == "activated" else ()
        prompt = (*shared[: rng.choice([5, 33, 50])], *invoked, *shared[: rng.choice([1, 7])])
        asked.append(Question(prompt, name))
        engine.add(str(number), prompt, refs[name], max_tokens=4)
    engine.run()
    assert engine.core.stats().prefix_cache_hits > 0
    reference = Reference(base, adapters, torch.float32)
    for number, question in enumerate(asked):
        answer = engine.tokens(str(number))
        expected = reference.logits(question, answer[:-1])[len(question.prompt) - 1 :].argmax(-1)
        assert answer == expected.tolist(), question
    engine.close()
