"""The head of a checkpoint that classifies or ranks itself.

transformers' …ForSequenceClassification and …ForTokenClassification are a decoder with one linear, `score`, behind the
final norm. A reranker of sentence-transformers that answers yes or no has an lm_head instead: its score is the logit of
one token less that of another. That is a head of one label, whose weights are the difference of two rows of lm_head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_families import ANSWER_FILE, class_of
from loraplex.adapters.admission.pooled.files import head_of, read_prompt
from loraplex.adapters.admission.pooled.heads import MAX_LABELS
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.pooled import Head, HeadTask
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.weights import open_checkpoint

HEAD_MODULE = "score"
_TASKS: Mapping[str, HeadTask] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
}
_DEFAULT_LABELS = 2
"""Labels of a config that names none, as transformers has it."""
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class BaseHead:
    """`answers`: the ids of the tokens whose logits a reranker compares, and the second may be None; None itself of a
    checkpoint with `score`, which has no lm_head."""

    head: Head
    answers: tuple[int, int | None] | None


def base_head(model_dir: Path, config: Mapping[str, Any]) -> BaseHead | None:
    """The head that config.json tells of, or the files of sentence-transformers beside it; None where there is none.
    Raises ModelUnsupported."""
    named = class_of(config)
    task = next((task for end, task in _TASKS.items() if named.endswith(end)), None)
    answers = _answers(model_dir) if task is None else None
    if task is None and answers is None:
        return None
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict | list) else config.get("num_labels", _DEFAULT_LABELS)
    if answers is not None:
        task, count, config = "classify", 1, {"pad_token_id": config.get("pad_token_id")}
    assert task is not None
    if type(count) is not int or not 1 <= count <= MAX_LABELS[task]:
        raise ModelUnsupported(
            f"{named} is not served with this number of labels; a head of {task} has 1 … {MAX_LABELS[task]}"
        )
    try:
        return BaseHead(replace(head_of(config, task, count)[0], prompt=read_prompt(model_dir)), answers)
    except AdapterRefused as error:
        raise ModelUnsupported(error.message) from error


def _answers(model_dir: Path) -> tuple[int, int | None] | None:
    path = model_dir / ANSWER_FILE
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_bytes())
        yes, no = given["true_token_id"], given.get("false_token_id")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yes = no = None
    if type(yes) is not int or (no is not None and type(no) is not int):
        raise ModelUnsupported(
            f"{path} cannot be used: true_token_id and perhaps false_token_id are ids of tokens"
        )
    return yes, no


def read_base_head(model_dir: Path, base: BaseHead, vocab_size: int, hidden_size: int | None) -> torch.Tensor:
    """[labels, C + 1] float32: the weights of each label, and its bias behind them. Raises ModelUnsupported."""
    if hidden_size is None:
        raise ModelUnsupported("a base that classifies is not served where it gives no hidden states")
    labels = len(base.head.labels)
    rows = torch.zeros(labels, hidden_size + 1)
    with open_checkpoint(model_dir) as checkpoint:
        if base.answers is not None:
            names = ("lm_head.weight", f"model.{_EMBEDDING}", _EMBEDDING)
            name = next((name for name in names if name in checkpoint), names[0])
            words = checkpoint.read(name, (vocab_size, hidden_size))
            yes, no = base.answers
            if not all(0 <= token < vocab_size for token in (yes, no or 0)):
                raise ModelUnsupported(f"{model_dir / ANSWER_FILE} names tokens that the model has not")
            rows[0, :hidden_size] = words[yes].float() - (0 if no is None else words[no].float())
        else:
            rows[:, :hidden_size] = checkpoint.read(f"{HEAD_MODULE}.weight", (labels, hidden_size))
            if f"{HEAD_MODULE}.bias" in checkpoint:
                rows[:, hidden_size] = checkpoint.read(f"{HEAD_MODULE}.bias", (labels,))
    if not rows.isfinite().all():
        raise ModelUnsupported(f"the head of {model_dir} holds NaN or infinite values")
    return rows
