"""Embeddings of the engine are the pooled hidden states of transformers and PEFT, whatever is computed beside them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.pooling import POOLINGS, PooledPart, PooledPrompt, Pooling, fraction_bits
from loraplex.engine.types import EngineRequest, SamplingParams
from support.adapters.peft_zoo import PeftReference
from support.adapters.tiny_adapters import ADAPTERS, KINDS, save_adapters
from support.engine.local_engine import LocalEngine
from support.engine.mixed_questions import cramped_engine
from support.engine.repeater import Repeater
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NAMES = ("all", "many-ranks", "dora-head")
CHOSEN = {name: (ADAPTERS | KINDS)[name] for name in NAMES}
Asked = tuple[str | None, list[int], Pooling]


class Watcher:
    """A model that keeps how many logits each step computes, and whether for adapters of the head."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.steps: list[tuple[int, bool]] = []
        self.spoil: int | None = None  # which of the next step's hidden states is not finite

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.steps.append((batch.logits_rows.shape[0], batch.head_lora is not None))
        if self.spoil is not None and batch.take_hidden is not None:
            row, take, self.spoil = self.spoil, batch.take_hidden, None

            def take_spoilt(hidden: torch.Tensor) -> None:
                hidden[row, 3] = float("nan")
                take(hidden)

            batch = replace(batch, take_hidden=take_spoilt)
        return self._model.forward(batch)


def questions(seed: str, adapters: Mapping[str, Any]) -> list[Asked]:
    """Both poolings of the base and every adapter; some prompts have a common start, and some need several steps."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(33)]
    return [
        (name, shared[: rng.choice([0, 16, 33])] + [rng.randrange(3, VOCAB) for _ in range(length)], pooling)
        for name in (None, *adapters)
        for pooling in POOLINGS
        for length in (1, 40)
    ]


def engine_of(base: Path, work: Path, family: Mapping[str, Any], **settings: Any) -> LocalEngine:
    return cramped_engine(base, work, max_num_seqs=6, **settings)


def pooled_by(reference: PeftReference, asked: Asked) -> torch.Tensor:
    name, prompt, pooling = asked
    hidden = reference.hidden(name, prompt)
    return hidden.double().mean(0).float() if pooling == "mean" else hidden[-1 if pooling == "last" else 0]


@pytest.mark.parametrize(
    ("family", "kernels", "lookahead"),
    [
        ("llama-biases", "numba", 1),
        ("gemma3", "numba", 0),
        ("qwen3", "torch", 1),
        ("phi3", "torch", 0),
        ("mistral-window", "numba", 1),
        ("granite", "auto", 1),
        ("gemma", "auto", 0),
        pytest.param("llama-biases", "triton", 1, marks=pytest.mark.slow),
    ],
)
def test_equal_transformers_and_peft_beside_generation(
    family: str, kernels: str, lookahead: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a pool so small that prompts start over, in chunks, each beside others' chunks and decoding."""
    settings: dict[str, Any] = {"kernels": kernels, "lookahead": lookahead}
    recorder = Repeater()
    if kernels == "triton":
        request.getfixturevalue("quick_interpreter")
        settings["recorder"] = recorder
    options = {**FAMILIES, **OTHERS}[family] | ({"num_hidden_layers": 1} if kernels == "triton" else {})
    base = save_tiny(tmp_path / "base", options)
    adapters = save_adapters(base, tmp_path, CHOSEN)
    asked = questions(family, adapters)[: 4 if kernels == "triton" else None]
    engine = engine_of(base, tmp_path / "work", options, **settings)
    refs = {name: engine.publish(folder, name=name) for name, folder in adapters.items()}
    for ref in refs.values():
        engine.core.prefetch(ref)
    while list(engine.core.residency().values()) != ["hot"] * len(refs):
        engine.step()
    for number, (name, prompt, pooling) in enumerate(asked):
        ref = None if name is None else refs[name]
        if number % 2:
            engine.add(f"other {number}", prompt[-30:], ref, max_tokens=8 if kernels == "triton" else 30)
        engine.embed(str(number), prompt, ref, pooling)
    engine.run()
    check_core(engine.core)
    # Where layers have windows, sequences grow too little: test_model_families has their preemptions.
    if kernels not in ("auto", "triton") and family not in ("gemma3", "phi3", "mistral-window"):
        assert engine.core.stats().num_preemptions > 0
    assert bool(recorder.replays) == (kernels == "triton")
    found = [engine.embedding(str(number)) for number in range(len(asked))]
    engine.close()
    reference = PeftReference(base, adapters, torch.float32)
    for one, got in zip(asked, found, strict=True):
        want = pooled_by(reference, one)
        torch.testing.assert_close(got, want, atol=5e-4, rtol=1e-4, msg=lambda m, one=one: f"{one}: {m}")
        assert torch.cosine_similarity(got, want, dim=0) > 1 - 1e-6
    # The adapters and the poolings differ.
    assert min(float((found[0] - other).abs().max()) for other in found[1:]) > 0.01


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "llama", FAMILIES["llama"])


def watched_engine(base: Path, work: Path) -> tuple[LocalEngine, Watcher]:
    watchers: list[Watcher] = []

    def wrap(model: Any) -> Any:
        watchers.append(Watcher(model))
        return watchers[0]

    return engine_of(base, work, FAMILIES["llama"], wrap_model=wrap, kernels="torch"), watchers[0]


def test_a_cached_prefix_serves_the_last_token_alone(base: Path, tmp_path: Path) -> None:
    engine, _ = watched_engine(base, tmp_path)
    prompt = list(range(3, 43))
    engine.embed("cold", prompt)
    engine.run()
    for pooling in POOLINGS:
        engine.embed(pooling, prompt, pooling=pooling)
        engine.run()
    cached = {name: events[-1].usage.cached_tokens for name, events in engine.events.items()}
    assert cached == {"cold": 0, "mean": 0, "last": 32, "cls": 0}
    assert torch.equal(engine.embedding("cold"), engine.embedding("mean"))
    reference = PeftReference(base, save_adapters(base, tmp_path, {"all": ADAPTERS["all"]}), torch.float32)
    torch.testing.assert_close(
        engine.embedding("last"), reference.hidden(None, prompt)[-1], atol=5e-4, rtol=1e-4
    )
    # Their KV is found by a request that generates.
    engine.add("next", prompt, max_tokens=2)
    engine.run()
    assert engine.events["next"][-1].usage.cached_tokens == 32
    engine.close()


def test_nothing_goes_through_the_head(base: Path, tmp_path: Path) -> None:
    engine, watcher = watched_engine(base, tmp_path / "work")
    ref = engine.publish(save_adapters(base, tmp_path, {"head": KINDS["head"]})["head"])
    watcher.steps.clear()
    engine.embed("mean", range(3, 83), ref)
    engine.embed("last", range(3, 83), ref, "last")
    engine.run()
    assert len(watcher.steps) > 2
    assert set(watcher.steps) == {(0, False)}
    engine.close()


def test_hidden_states_that_are_not_finite_fail_one_request(base: Path, tmp_path: Path) -> None:
    engine, watcher = watched_engine(base, tmp_path / "work")
    ref = engine.publish(save_adapters(base, tmp_path, {"all": ADAPTERS["all"]})["all"])
    engine.embed("warm", range(3, 9), ref)
    engine.run()
    # Rows are in the order of adapters: of the base first, then 10 of the adapter's.
    watcher.spoil = 12
    engine.embed("base", range(3, 11))
    engine.embed("spoilt", range(13, 23), ref)
    engine.run()
    assert engine.embedding("base").isfinite().all()
    last = engine.events["spoilt"][-1]
    assert last.error is not None
    assert last.error.code == "adapter_not_finite"
    assert last.pooled is None
    # The watched rows of slices that pool nothing are looked at too.
    watcher.spoil = 0
    engine.embed("chunks", range(3, 83), ref, "last")
    engine.run()
    error = engine.events["chunks"][-1].error
    assert error is not None
    assert error.code == "adapter_not_finite"
    engine.close()


@pytest.mark.parametrize("length", [1, 2, 1000, 131072])
def test_a_mean_is_exact_in_any_parts(length: int) -> None:
    """Up to the last bit of float32, of numbers of very different sizes."""
    hidden = torch.randn(length, 4, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    hidden = (hidden * torch.tensor([1e-3, 1.0, 60.0, 8000.0])).float()
    fixed = (hidden.double() * 2.0 ** fraction_bits(length)).round().long()
    found = set()
    for cut in (0, 1, length // 3, length):
        pooled = PooledPrompt("mean", length)
        for part in (fixed[cut:], fixed[:cut]):
            values = part.sum(0).numpy().tobytes() if len(part) else b""
            pooled.add(PooledPart(len(part), values))
        found.add(pooled.vector())
    (vector,) = found
    got = torch.frombuffer(bytearray(vector), dtype=torch.float32)
    torch.testing.assert_close(got, hidden.double().mean(0).float(), rtol=3e-7, atol=3e-9)


def test_a_pooled_request_may_not_generate(base: Path, tmp_path: Path) -> None:
    engine, _ = watched_engine(base, tmp_path / "work")
    engine.embed("one", [5])
    engine.run()
    generating = SamplingParams(max_tokens=1)
    engine.core.add_request(EngineRequest("two", "acme", (5,), generating, pooling="mean"))
    engine.run()
    assert engine.events["two"][-1].error is not None
    engine.close()
