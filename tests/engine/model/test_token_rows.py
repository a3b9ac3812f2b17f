"""LoRA on the embedding, and rows of the embedding and the head that an adapter replaces, are what PEFT computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.logprobs import join_scores
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, BY_TOKEN, save_adapters
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BASES = {
    "llama": FAMILIES["llama"],
    "llama-tied": FAMILIES["llama-tied"],
    "gemma2": FAMILIES["gemma2"],
    "gemma3": FAMILIES["gemma3"],
    "phi3": FAMILIES["phi3"],
    "nemotron_h": FAMILIES["nemotron_h"],
    "gemma, through transformers": OTHERS["gemma"],
    "granite, through transformers": OTHERS["granite"] | {"tie_word_embeddings": True},
    "olmo2, through transformers": OTHERS["olmo2"],
}
OUTPUTS = 6


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., LocalEngine]]:
    made: list[LocalEngine] = []

    def make(base: Path, **settings: Any) -> LocalEngine:
        engine = LocalEngine(
            base,
            tmp_path / f"work{len(made)}",
            **{
                "dtype": "float32",
                "max_model_len": 100,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 40,
                "kv_cache_memory": 8 << 20,
                "adapter_memory": 8 << 20,
                "adapter_cpu_memory": 8 << 20,
                "num_threads": 1,
                **settings,
            },
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("name_of_base", "kernels"),
    [
        ("llama", "numba"),
        ("gemma2", "numba"),
        ("granite, through transformers", "numba"),
        *(
            pytest.param(name, kernels, marks=pytest.mark.slow)
            for name in BASES
            for kernels in ("numba", "torch")
            if (name in ("llama-tied", "gemma2")) or (kernels == "numba" and name not in ("llama", "granite"))
            if (name, kernels) not in (("gemma2", "numba"), ("granite, through transformers", "numba"))
        ),
    ],
)
def test_tokens_log_probabilities_and_embeddings_are_pefts(
    name_of_base: str, kernels: str, tmp_path: Path, make_engine: Callable[..., LocalEngine]
) -> None:
    """All of them, plain adapters and the base in the same steps, prompts in chunks."""
    base = save_tiny(tmp_path / "base", BASES[name_of_base])
    adapters = save_adapters(base, tmp_path, BY_TOKEN | {"some": ADAPTERS["some"]})
    engine = make_engine(base, kernels=kernels)
    refs = {None: None, **{name: engine.publish(folder) for name, folder in adapters.items()}}
    rng = random.Random(name_of_base)
    prompts = {}
    for name, ref in refs.items():
        ids = BY_TOKEN.get(name or "", {}).get("trainable_token_indices", [])
        named = sorted(
            {token for each in (ids.values() if isinstance(ids, dict) else [ids]) for token in each}
        )
        # Every row that is replaced is looked up, and so are its neighbours.
        near = [token + step for token in named[:12] for step in (-1, 0, 1) if token + step < VOCAB]
        prompts[name] = [*near, *(rng.randrange(VOCAB) for _ in range(20))]
        engine.add(f"{name}/plain", prompts[name], ref, max_tokens=OUTPUTS)
        engine.add(f"{name}/scored", prompts[name], ref, max_tokens=OUTPUTS, logprobs=2, prompt_logprobs=2)
        engine.embed(f"{name}/pooled", prompts[name], ref)
    engine.run()
    for name, prompt in prompts.items():
        some = "some" if name is None else name
        reference = PeftReference(base, {some: adapters[some]}, torch.float32)
        tokens = engine.tokens(f"{name}/plain")
        logits, hidden = reference.logits_and_hidden(name, prompt + tokens)
        expected = logits.log_softmax(-1)
        assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist(), name
        assert engine.tokens(f"{name}/scored") == tokens, name
        events = engine.events[f"{name}/scored"]
        scores = join_scores([event.scores for event in events if event.scores is not None])
        assert scores is not None
        for found, rows, of in (
            (scores.prompt, expected[: len(prompt) - 1], prompt[1:]),
            (scores.output, expected[len(prompt) - 1 : -1], tokens),
        ):
            assert found is not None
            for exact, token, (own, top) in zip(rows, of, found.rows(), strict=True):
                told = torch.tensor([own, *(value for _, value in top)])
                want = torch.tensor([exact[token], *exact.topk(2).values])
                assert (told - want).abs().max() < 2e-3, name
        assert (engine.embedding(f"{name}/pooled") - hidden[: len(prompt)].mean(0)).abs().max() < 1e-3, name
        if name is not None:
            of_base = reference.logits(None, prompt + tokens).log_softmax(-1)
            assert (expected - of_base).abs().max() > 0.05, name


@pytest.mark.soak
def test_the_real_model_gives_pefts_tokens(
    real_model_dir: Path, tmp_path: Path, make_engine: Callable[..., LocalEngine]
) -> None:
    """Its head is tied. The base and three adapters, which the device has too little memory for."""
    chosen = {name: BY_TOKEN[name] for name in ("embedding", "rows-and-head", "embedding-rslora-and-layers")}
    adapters = save_adapters(real_model_dir, tmp_path, chosen, std=0.05)
    engine = make_engine(
        real_model_dir, kv_cache_memory=64 << 20, adapter_memory=26 << 20, adapter_cpu_memory=64 << 20
    )
    prompt = [1, 4093, 198, 40, 41, 42, 2683, 314, 253, 130, 77, 9, 5, 6, 338]
    refs = {None: None, **{name: engine.publish(folder) for name, folder in adapters.items()}}
    for turn in range(2):
        for name, ref in refs.items():
            engine.add(f"{name}/{turn}", prompt, ref, max_tokens=OUTPUTS)
        engine.run()
    assert engine.core.stats().device_evictions > 0
    for name in refs:
        some = name or "embedding"
        reference = PeftReference(real_model_dir, {some: adapters[some]}, torch.float32)
        tokens = engine.tokens(f"{name}/0")
        assert engine.tokens(f"{name}/1") == tokens
        assert tokens == reference.logits(name, prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist(), (
            name
        )
