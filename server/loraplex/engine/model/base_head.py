"""The head of a checkpoint that classifies itself, as transformers' …ForSequenceClassification and
…ForTokenClassification: a linear, `score`, behind the final norm of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.admission.base_families import class_of
from loraplex.adapters.admission.pooled.files import head_of
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


def base_head(config: Mapping[str, Any]) -> Head | None:
    """The head that a config.json tells of; None where the checkpoint writes text. Raises ModelUnsupported."""
    named = class_of(config)
    task = next((task for end, task in _TASKS.items() if named.endswith(end)), None)
    if task is None:
        return None
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict | list) else config.get("num_labels", _DEFAULT_LABELS)
    if type(count) is not int or not 1 <= count <= MAX_LABELS[task]:
        raise ModelUnsupported(
            f"{named} is not served with this number of labels; a head of {task} has 1 … {MAX_LABELS[task]}"
        )
    try:
        return head_of(config, task, count)[0]
    except AdapterRefused as error:
        raise ModelUnsupported(error.message) from error


def read_base_head(model_dir: Path, head: Head, hidden_size: int | None) -> torch.Tensor:
    """[labels, C + 1] float32: the weights of each label, and its bias behind them. Raises ModelUnsupported."""
    if hidden_size is None:
        raise ModelUnsupported("a base that classifies is not served where it gives no hidden states")
    labels = len(head.labels)
    rows = torch.zeros(labels, hidden_size + 1)
    with open_checkpoint(model_dir) as checkpoint:
        rows[:, :hidden_size] = checkpoint.read(f"{HEAD_MODULE}.weight", (labels, hidden_size))
        if f"{HEAD_MODULE}.bias" in checkpoint:
            rows[:, hidden_size] = checkpoint.read(f"{HEAD_MODULE}.bias", (labels,))
    if not rows.isfinite().all():
        raise ModelUnsupported(f"{HEAD_MODULE} of {model_dir} holds NaN or infinite values")
    return rows
