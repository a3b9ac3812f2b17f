"""Bases that classify themselves, and their adapters: logits equal those of transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.pooled import Head
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.model_plan import ModelSettings, make_plan
from loraplex.engine.model.outline import examine_tensors
from loraplex.kernels.torch_backend import torch_kernels
from support.adapters.classifiers import (
    LABELS,
    PeftClassifier,
    base_logits,
    save_base_classifier,
    save_classifiers,
)
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, OTHERS, edit_config, reference_logits, save_tiny
from support.servers.run_here import run_here

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = {
    "num_threads": 1, "max_num_batched_tokens": 24, "max_num_seqs": 6, "adapter_memory": 4 << 20,
    "adapter_cpu_memory": 8 << 20, "kv_cache_memory": 1 << 20, "max_model_len": 128,
}  # fmt: skip
PROMPTS = [list(range(3, 44)), list(range(40, 48)), [7]]


@pytest.mark.parametrize(
    ("family", "task", "kernels"),
    [
        ("qwen2", "classify", "numba"),
        ("llama-tied", "token_classify", "torch"),
        ("gemma", "classify", "torch"),
    ],
)
def test_base_and_adapters_equal_transformers_and_peft(
    family: str, task: Any, kernels: str, tmp_path: Path
) -> None:
    base = save_base_classifier(tmp_path / "base", {**FAMILIES, **OTHERS}[family], task, LABELS)
    kind = "SEQ_CLS" if task == "classify" else "TOKEN_CLS"
    chosen = {"own": {"task_type": kind, "num_labels": 3, "r": 4, "target_modules": ["q_proj", "down_proj"]}}
    folder = save_classifiers(base, tmp_path, chosen)["own"]
    engine = LocalEngine(base, tmp_path / "work", kernels=kernels, **SIZES)
    pad = 0 if task == "classify" else None
    assert engine.built.info.head == Head(task, tuple(LABELS), "single_label_classification", pad)
    ref = engine.publish(folder)
    reference = PeftClassifier(base, folder, 3)
    for number, prompt in enumerate(PROMPTS):
        engine.embed(f"base {number}", prompt, None, task)
        engine.embed(f"adapter {number}", prompt, ref, task)
    engine.run()
    for number, prompt in enumerate(PROMPTS):
        for name, want in (("base", base_logits(base, prompt)), ("adapter", reference.logits(prompt))):
            got = engine.embedding(f"{name} {number}")
            torch.testing.assert_close(got, want.reshape(-1), atol=1e-4, rtol=1e-5)
    engine.close()


def test_an_adapter_without_a_head_has_the_base_s(tmp_path: Path) -> None:
    base = save_base_classifier(tmp_path / "base", FAMILIES["llama"], "classify", LABELS)
    options = {"task_type": "SEQ_CLS", "num_labels": 3, "r": 2, "target_modules": ["v_proj"]}
    folder = save_classifiers(base, tmp_path, {"bare": options})["bare"]
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.score.weight"] = load_file(base / "model.safetensors")["score.weight"]
    save_file(tensors, path)
    want = PeftClassifier(base, folder, 3).logits(PROMPTS[0])
    del tensors["base_model.model.score.weight"]
    save_file(tensors, path)
    config = folder / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"task_type": None, "modules_to_save": None})
    )
    engine = LocalEngine(base, tmp_path / "work", kernels="torch", **SIZES)
    engine.embed("bare", PROMPTS[0], engine.publish(folder), "classify")
    engine.run()
    torch.testing.assert_close(engine.embedding("bare"), want, atol=1e-4, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize(("family", "no"), [("qwen3", 9), ("llama", None)])
def test_a_reranker_that_answers_yes_or_no(family: str, no: int | None, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES[family])
    (base / "1_LogitScore").mkdir()
    (base / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 5, "false_token_id": no}))
    prompts = {"default_prompt_name": "q", "prompts": {"q": "find: "}}
    (base / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    engine = LocalEngine(base, tmp_path / "work", kernels="torch", **SIZES)
    assert engine.built.info.head == Head("classify", ("LABEL_0",), "regression", 0, "find: ")
    for number, prompt in enumerate(PROMPTS):
        engine.embed(str(number), prompt, None, "classify")
    engine.run()
    for number, logits in enumerate(reference_logits(base, PROMPTS)):
        want = logits[-1, 5:6] - (0 if no is None else logits[-1, 9:10])
        torch.testing.assert_close(engine.embedding(str(number)), want, atol=1e-4, rtol=1e-5)
    options = {"task_type": "CAUSAL_LM", "num_labels": 1, "r": 2, "target_modules": ["lm_head"]}
    with pytest.raises(AdapterRefused, match="lm_head"):
        engine.publish(save_classifiers(base, tmp_path, {"words": options})["words"])
    engine.close()


@pytest.mark.parametrize("given", ["{", "[]", '{"true_token_id": "yes"}', '{"true_token_id": 131}'])
def test_answers_that_cannot_be_used_are_refused(tmp_path: Path, given: str) -> None:
    base = save_tiny(tmp_path / "base", FAMILIES["llama"])
    (base / "1_LogitScore").mkdir()
    (base / "1_LogitScore" / "config.json").write_text(given)
    with pytest.raises(ModelUnsupported, match="1_LogitScore"):
        examine_tensors(plan(base))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier") / "base"
    return save_base_classifier(folder, FAMILIES["llama"], "classify", LABELS)


def plan(model_dir: Path) -> Any:
    return make_plan(model_dir, ModelSettings(), torch_kernels(torch.device("cpu"), batch_invariant=False))


def test_the_plan_says_what_it_is(classifier: Path) -> None:
    found = plan(classifier)
    assert "classifies texts (negative, neutral, positive)" in found.explain()
    examine_tensors(found)
    asked = ("plan", "--model", str(classifier), "--gpu", "cpu", "--gpu-memory", "4GiB")
    told = "the model classifies texts (negative, neutral, positive), and writes no text"
    assert told in run_here(*asked).stdout.splitlines()
    assert json.loads(run_here(*asked, "--json").stdout)["head"]["labels"] == LABELS


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, r"score.weight has the shape \[3, 32\], not \[2, 32\]"),
        ({"id2label": None}, r"not \[2, 32\]"),
        ({"id2label": {"0": "a", "1": 7, "2": "c"}}, "id2label has a label"),
        ({"id2label": {str(n): "x" for n in range(1025)}}, "this number of labels"),
        ({"id2label": None, "num_labels": 5000}, "this number of labels"),
        ({"problem_type": "ranking"}, "problem_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, None),
        ({"architectures": ["LlamaForCausalLM"]}, "lm_head|score"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_the_config_s_is_refused(
    classifier: Path, tmp_path: Path, changes: dict[str, Any], told: str | None
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in classifier.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    edit_config(copy, **changes)
    if told is None:  # a head for tokens may have no bias
        examine_tensors(plan(copy))
        return
    with pytest.raises(ModelUnsupported, match=told):
        examine_tensors(plan(copy))
