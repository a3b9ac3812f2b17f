"""LoRA on the head counts wherever logits do: in draws, in log probabilities, and in those of prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from loraplex.engine.logprobs import Logprobs, join_scores
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in ("head", "dora-head", "all")}
OUTPUTS = 6


def error(found: Logprobs | None, expected: torch.Tensor, tokens: list[int]) -> float:
    """The worst one of the tokens' own values and of the likeliest's, against [n, V] log probabilities."""
    assert found is not None
    assert len(found) == len(tokens)
    worst = 0.0
    for exact, token, (own, top) in zip(expected, tokens, found.rows(), strict=True):
        told = torch.tensor([own, *(value for _, value in top)])
        want = torch.tensor([exact[token], *exact.topk(found.num_top).values])
        worst = max(worst, float((told - want).abs().max()))
    return worst


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_draws_and_log_probabilities_are_pefts(family: str, tmp_path: Path) -> None:
    """One head of its own; one tied to the embedding, whose logits are capped. In chunks, beside each other."""
    base = save_tiny(tmp_path / "base", FAMILIES[family])
    adapters = save_adapters(base, tmp_path, CHOSEN)
    engine = LocalEngine(
        base,
        tmp_path / "work",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=16,
        max_num_batched_tokens=40,
        kv_cache_memory=8 << 20,
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )
    refs = {None: None, **{name: engine.publish(folder) for name, folder in adapters.items()}}
    rng = random.Random(family)
    shared = [rng.randrange(3, VOCAB) for _ in range(30)]
    prompts = {}
    for name, ref in refs.items():
        for kind, options in {
            "silent": {},
            "answer": {"logprobs": 3},
            "both": {"logprobs": 2, "prompt_logprobs": 3},
        }.items():
            prompts[name, kind] = [*shared, *(rng.randrange(3, VOCAB) for _ in range(7))]
            engine.add(f"{name}/{kind}", prompts[name, kind], ref, max_tokens=OUTPUTS, **options)
    engine.run()
    engine.close()

    reference = PeftReference(base, adapters, torch.float32)
    for (name, kind), prompt in prompts.items():
        tokens = engine.tokens(f"{name}/{kind}")
        events = engine.events[f"{name}/{kind}"]
        scores = join_scores([event.scores for event in events if event.scores is not None])
        expected = reference.logits(name, prompt + tokens).log_softmax(-1)
        answer = expected[len(prompt) - 1 : -1]
        assert tokens == answer.argmax(-1).tolist(), (name, kind)
        assert (scores is None) == (kind == "silent")
        if scores is not None:
            assert error(scores.output, answer, tokens) < 2e-3, (name, kind)
            assert (scores.prompt is None) == (kind == "answer")
        if scores is not None and scores.prompt is not None:
            assert error(scores.prompt, expected[: len(prompt) - 1], prompt[1:]) < 2e-3, (name, kind)
        if name is not None:
            of_base = reference.logits(None, prompt + tokens).log_softmax(-1)
            assert (expected - of_base).abs().max() > 0.1
