"""Logits of classifiers equal those of transformers and PEFT, whatever is computed beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.ref import AdapterRef
from support.adapters.classifiers import CLASSIFIERS, PeftClassifier, save_classifiers
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, VOCAB, save_tiny
from support.models.quantised import dequantised
from support.simulator.core_integrity import check_core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

POOLING = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}


def classify(engine: LocalEngine, request_id: str, prompt: list[int], ref: Any, name: str) -> None:
    engine.embed(request_id, prompt, ref, POOLING[CLASSIFIERS[name]["task_type"]])


def prompts(seed: str, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(33)]
    return [
        shared[: rng.choice([0, 16, 33])] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]


def engine_of(base: Path, work: Path, **settings: Any) -> LocalEngine:
    given = {
        "max_num_batched_tokens": 24,
        "num_threads": 1,
        "max_num_seqs": 6,
        "adapter_memory": 4 << 20,
        "adapter_cpu_memory": 8 << 20,
        "kv_cache_memory": 1 << 20,
        "max_model_len": 128,
    }
    return LocalEngine(base, work, **{**given, **settings})


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("llama", "numba"),
        ("qwen3", "numba"),
        ("phi3", "numba"),
        ("gemma2", "numba"),
        ("mistral-window", "torch"),
        ("smollm3", "torch"),
        pytest.param("qwen2", "numba", marks=pytest.mark.soak),
        pytest.param("gemma3", "numba", marks=pytest.mark.soak),
    ],
)
def test_equal_transformers_and_peft_beside_generation(family: str, kernels: str, tmp_path: Path) -> None:
    """LoRA and DoRA, of sequences and of tokens, in one burst, in chunks, with neighbours that generate; and each alone
    has the same bits."""
    base = save_tiny(tmp_path / "base", {**FAMILIES, **OTHERS}[family])
    folders = save_classifiers(base, tmp_path)
    engine = engine_of(base, tmp_path / "work", kernels=kernels)
    refs = {name: engine.publish(folder, name=name) for name, folder in folders.items()}
    asked = [(name, prompt) for name in refs for prompt in prompts(name, 3)]
    random.Random(family).shuffle(asked)
    for number, (name, prompt) in enumerate(asked):
        classify(engine, str(number), prompt, refs[name], name)
        if number % 3 == 0:
            engine.add(f"other {number}", prompt[:20], refs[name] if number % 2 else None, max_tokens=9)
    engine.run()
    check_core(engine.core)
    found = [engine.embedding(str(number)) for number in range(len(asked))]
    references = {n: PeftClassifier(base, f, CLASSIFIERS[n]["num_labels"]) for n, f in folders.items()}
    for (name, prompt), got in zip(asked, found, strict=True):
        want = references[name].logits(prompt).reshape(-1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    for number in (0, 1, 2, 3) if kernels == "numba" else ():
        name, prompt = asked[number]
        classify(engine, "alone", prompt, refs[name], name)
        engine.run()
        assert engine.embedding("alone").tolist() == found[number].tolist()
    engine.close()


def test_a_quantised_base_equals_peft_on_what_its_codes_stand_for(tmp_path: Path) -> None:
    """Within the same bounds: x is not rounded."""
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    folders = save_classifiers(base, tmp_path)
    dense = dequantised(base, tmp_path / "dense")
    engine = engine_of(base, tmp_path / "work", kernels="torch", quantise="int8")
    (prompt,) = prompts("int8", 1)
    for name, folder in folders.items():
        classify(engine, name, prompt, engine.publish(folder, name=name), name)
        engine.add(f"beside {name}", prompt, max_tokens=3)
    engine.run()
    for name, folder in folders.items():
        want = PeftClassifier(dense, folder, CLASSIFIERS[name]["num_labels"]).logits(prompt).reshape(-1)
        torch.testing.assert_close(engine.embedding(name), want, atol=1e-4, rtol=1e-5)
    engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, dict[str, AdapterRef]]]:
    """A small model with a head of 3 labels, one whose logits are beyond float32, and an adapter without one."""
    work = tmp_path_factory.mktemp("served")
    base = save_tiny(work / "base", FAMILIES["llama"])
    plain = {"task_type": "CAUSAL_LM", "num_labels": 2, "r": 2, "target_modules": ["q_proj"]}
    folders = save_classifiers(
        base, work, {"lora": CLASSIFIERS["lora"], "huge": CLASSIFIERS["lora"], "plain": plain}
    )
    path = folders["huge"] / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.score.weight"].fill_(3e38)
    save_file(tensors, path)
    engine = engine_of(base, work / "work", kernels="torch")
    yield engine, {name: engine.publish(folder, name=name) for name, folder in folders.items()}
    engine.close()


def test_logits_that_are_not_finite_fail_one_request(
    served: tuple[LocalEngine, dict[str, AdapterRef]],
) -> None:
    engine, refs = served
    for name in ("lora", "huge"):
        engine.embed(f"finite {name}", range(3, 12), refs[name], "classify")
    engine.add("answer", range(3, 9), refs["huge"], max_tokens=3)
    engine.run()
    assert engine.embedding("finite lora").isfinite().all()
    error = engine.events["finite huge"][-1].error
    assert error is not None
    assert error.code == "adapter_not_finite"
    assert engine.events["answer"][-1].finish_reason == "length"


def test_a_version_without_a_head_fails_one_request(
    served: tuple[LocalEngine, dict[str, AdapterRef]],
) -> None:
    engine, refs = served
    for name, ref in (("plain", refs["plain"]), ("base", None), ("lora", refs["lora"])):
        engine.embed(f"head of {name}", range(3, 12), ref, "classify")
    engine.run()
    assert engine.embedding("head of lora").shape == (3,)
    for name in ("plain", "base"):
        error = engine.events[f"head of {name}"][-1].error
        assert error is not None
        assert error.code == "internal_error"


def test_a_cached_prefix_serves_one_token_and_not_every_token(
    served: tuple[LocalEngine, dict[str, AdapterRef]],
) -> None:
    engine, refs = served
    prompt = list(range(3, 43))
    for name, pooling in (("cold", "classify"), ("found", "classify"), ("every", "token_classify")):
        engine.embed(name, prompt, refs["lora"], pooling)
        engine.run()
    cached = {name: engine.events[name][-1].usage.cached_tokens for name in ("cold", "found", "every")}
    assert cached == {"cold": 0, "found": 32, "every": 0}
    assert torch.equal(engine.embedding("cold"), engine.embedding("found"))
    assert torch.equal(engine.embedding("every").view(40, 3)[-1], engine.embedding("cold"))


def test_heads_leave_with_their_adapters(served: tuple[LocalEngine, dict[str, AdapterRef]]) -> None:
    """The slot of one that was evicted is another's; it has that one's head, or none."""
    engine, refs = served
    prompt = range(3, 12)
    for turn in range(2):
        for name in ("lora", "plain"):
            engine.core.drop(refs["lora"].digest)
            engine.core.drop(refs["plain"].digest)
            engine.run()
            engine.embed(f"{turn} {name}", prompt, refs[name], "classify")
            engine.run()
    assert torch.equal(engine.embedding("0 lora"), engine.embedding("1 lora"))
    assert engine.events["1 plain"][-1].error is not None
