"""Classifiers' heads: the names of PEFT's versions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loraplex.adapters.admission.base_model import load_base_spec
from loraplex.adapters.admission.pooled.files import read_embedding, read_head
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.pooled import EmbeddingSpec
from loraplex.adapters.spec import BaseSpec
from support.adapters.admission import admit, halves, refusal
from support.adapters.drafts import AdapterDraft, TinyBase, draft_adapter, write_base

ARCH = TinyBase()
PREFIX = "base_model.model."
LINEAR = halves(3, ARCH.hidden)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseSpec:
    return load_base_spec(write_base(tmp_path_factory.mktemp("base"), ARCH))


def draft(tensors: dict[str, np.ndarray], **fields: Any) -> AdapterDraft:
    given = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]} | fields
    made = draft_adapter(ARCH, **given)
    made.tensors |= {PREFIX + name: tensor for name, tensor in tensors.items()}
    return made


@pytest.mark.parametrize("module", ["score", "classifier"])
@pytest.mark.parametrize("infix", ["", "modules_to_save.", "modules_to_save.default."])
def test_a_head_has_the_names_of_every_peft(base: BaseSpec, tmp_path: Path, module: str, infix: str) -> None:
    tensors = {f"{module}.{infix}weight": LINEAR, f"{module}.{infix}bias": halves(3)}
    for task, found in (("SEQ_CLS", "classify"), ("TOKEN_CLS", "token_classify"), (None, "token_classify")):
        head = admit(draft(tensors, task_type=task).write(tmp_path / str(task)), base).head
        assert head is not None
        assert (head.task, head.num_labels, head.bias is not None) == (found, 3, True)
    bare = admit(draft({f"{module}.{infix}weight": LINEAR}, task_type=None).write(tmp_path / "bare"), base)
    assert bare.head is not None
    assert (bare.head.task, bare.head.bias) == ("classify", None)
    told = [check["detail"] for check in bare.report["checks"] if check["name"] == "head"]
    assert told == ["a head of 3 labels for the last token"]


REFUSED: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str, str]] = {
    "another width": ({"score.weight": halves(3, 5)}, {}, "base_mismatch", "another model"),
    "no matrix": ({"score.weight": halves(3)}, {}, "shape_mismatch", "[labels, hidden size]"),
    "no labels": ({"score.weight": halves(0, ARCH.hidden)}, {}, "shape_mismatch", "[labels, hidden size]"),
    "too many labels": ({"score.weight": halves(1025, ARCH.hidden)}, {}, "too_large", "at most 1024"),
    "too many for every token": (
        {"score.weight": halves(257, ARCH.hidden)}, {"task_type": "TOKEN_CLS"}, "too_large", "at most 256",
    ),
    "a bias of another size": (
        {"score.weight": LINEAR, "score.bias": halves(2)}, {}, "shape_mismatch", "score.bias is [2]",
    ),
    "a bias alone": ({"score.bias": halves(3)}, {}, "missing_tensor", "no weight"),
    "two heads": ({"score.weight": LINEAR, "classifier.weight": LINEAR}, {}, "unexpected_tensor", "second head"),
    "one head twice": (
        {"score.weight": LINEAR, "score.modules_to_save.weight": LINEAR}, {}, "unexpected_tensor", "second head",
    ),
    "integers": (
        {"score.weight": np.ones((3, ARCH.hidden), np.int64)}, {}, "unsupported_feature", "stored as I64",
    ),
    "several layers": ({"classifier.dense.weight": LINEAR}, {}, "unsupported_feature", "one of several layers"),
    "LoRA on the head": (
        {"score.lora_A.weight": halves(4, ARCH.hidden), "score.lora_B.weight": halves(3, 4)}, {},
        "unsupported_feature", "neither LoRA on a head",
    ),
    "a task without heads": (
        {"score.weight": LINEAR}, {"task_type": "CAUSAL_LM"}, "unsupported_feature", "SEQ_CLS or TOKEN_CLS",
    ),
    "a head that nobody names": (
        {"score.weight": LINEAR}, {"task_type": None, "modules_to_save": None}, "unsupported_feature", "score",
    ),
    "another module too": (
        {"score.weight": LINEAR}, {"modules_to_save": ["score", "norm"]}, "unsupported_feature", "modules_to_save",
    ),
    "NaN": ({"score.weight": np.full((3, ARCH.hidden), np.nan, np.float32)}, {}, "non_finite", "the head's weight"),
    "beyond float32": (
        {"score.weight": LINEAR, "score.bias": np.full(3, 1e300)}, {}, "non_finite", "the head's bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_head_is_refused_in_words(base: BaseSpec, tmp_path: Path, name: str) -> None:
    tensors, fields, code, words = REFUSED[name]
    error = refusal(draft(tensors, **fields), tmp_path, base)
    assert error.code == code
    assert words in error.message


def test_a_lora_that_changes_nothing_is_served_with_its_head(base: BaseSpec, tmp_path: Path) -> None:
    made = draft({"score.weight": LINEAR})
    for name in made.tensors:
        if "lora_B" in name:
            made.tensors[name] = made.tensors[name] * 0
    assert admit(made.write(tmp_path), base).head is not None


def labels_of(folder: Path, config: Any, *, num_labels: int = 2, task: Any = "classify") -> Any:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_head(folder, task, num_labels)


def test_labels_come_from_the_config_of_the_upload(tmp_path: Path) -> None:
    assert read_head(tmp_path, "classify", 2)[0].labels == ("LABEL_0", "LABEL_1")
    head, notes = labels_of(tmp_path, {"id2label": {"1": "spam", "0": "ham"}, "hidden_size": 1 << 40})
    assert (head.labels, head.problem_type, notes) == (("ham", "spam"), "single_label_classification", [])
    head, _ = labels_of(tmp_path, {"id2label": ["a", "b"], "problem_type": "multi_label_classification"})
    assert (head.labels, head.problem_type) == (("a", "b"), "multi_label_classification")
    head, notes = labels_of(tmp_path, {"id2label": {"0": "a", "1": "b"}}, num_labels=1)
    assert (head.labels, head.problem_type, len(notes)) == (("LABEL_0",), "regression", 1)
    head, _ = labels_of(tmp_path, {"problem_type": "regression", "pad_token_id": 7}, task="token_classify")
    assert (head.problem_type, head.pad_id) == ("single_label_classification", None)


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        ({}, None),
        ({"prompts": {"q": "find: "}, "default_prompt_name": "q"}, "find: "),
        ({"prompts": {"q": "find: "}, "default_prompt_name": None}, None),
        ({"prompts": {"q": ""}, "default_prompt_name": "q"}, None),
        ({"prompts": {}, "default_prompt_name": "q"}, AdapterRefused),
        ({"default_prompt_name": ["q"]}, AdapterRefused),
        ({"prompts": {"q": "x" * 4097}, "default_prompt_name": "q"}, AdapterRefused),
    ],
)
def test_the_default_prompt_of_sentence_transformers(tmp_path: Path, config: Any, prompt: Any) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    if prompt is AdapterRefused:
        with pytest.raises(AdapterRefused, match="default_prompt_name"):
            read_head(tmp_path, "classify", 1)
        return
    assert read_head(tmp_path, "classify", 1)[0].prompt == prompt
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert len(read_embedding(tmp_path)[1]) == (prompt is not None)


@pytest.mark.parametrize(
    ("config", "pad"),
    [({}, 2), ({"pad_token_id": 7}, 7), ({"pad_token_id": None}, None), ({"pad_token_id": "x"}, None)],
)
def test_the_padding_is_the_upload_s_or_the_base_s(tmp_path: Path, config: Any, pad: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_head(tmp_path, "classify", 2, base_pad=2)[0].pad_id == pad


@pytest.mark.parametrize(
    "config",
    [
        "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, {"id2label": 7}, {"id2label": {"0": "a", "2": "b"}},
        {"id2label": {"0": "a", "1": 7}}, {"id2label": ["a", ""]}, {"id2label": ["a", "b\u202e"]},
        {"id2label": ["a", "x" * 257]}, {"id2label": ["a\n", "b"]}, {"problem_type": "ranking"},
        {"problem_type": ["regression"]},
    ],
)  # fmt: skip
def test_labels_that_cannot_be_used_are_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(AdapterRefused) as caught:
        labels_of(tmp_path, config)
    assert caught.value.code == "config_invalid"
    assert "config.json cannot be used" in caught.value.message


def test_a_config_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused) as caught:
        labels_of(tmp_path, " " * ((1 << 20) + 1))
    assert caught.value.code == "too_large"


def vectors_of(folder: Path, pooling: Any, *modules: str) -> EmbeddingSpec | None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    listed = [{"type": f"sentence_transformers.models.{name}"} for name in modules]
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    return read_embedding(folder)[0]


def test_vectors_come_from_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    assert read_embedding(tmp_path) == (None, [])
    last = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    assert vectors_of(tmp_path, last) == EmbeddingSpec("last", True, None)
    assert vectors_of(tmp_path, last, "Transformer", "Pooling") == EmbeddingSpec("last", False, None)
    served = ("Transformer", "Pooling", "Normalize")
    assert vectors_of(tmp_path, {"pooling_mode": "cls"}, *served) == EmbeddingSpec("cls", True, None)
    for other in ({"pooling_mode_max_tokens": True}, {**last, "pooling_mode_mean_tokens": True}, {}):
        assert vectors_of(tmp_path, other) is None
        assert len(read_embedding(tmp_path)[1]) == 1
    assert vectors_of(tmp_path, last, "Transformer", "Pooling", "Dense") is None
    (tmp_path / "modules.json").write_text('{"type": "x"}')
    with pytest.raises(AdapterRefused):
        read_embedding(tmp_path)
