"""Pooled outputs of a version: the labels of its head, and the vectors that it was trained for. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

HeadTask = Literal["classify", "token_classify"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
VectorPooling = Literal["mean", "last", "cls"]
"""How the hidden states of a prompt become one vector: their mean, the last token's, the first token's."""

_SHOWN_LABELS = 4


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier's head, as its callers know it. It gives a logit for each of `labels`: of the prompt's last token,
    or of every token ("token_classify"). `problem_type` says what they mean: logits of a softmax, one of a sigmoid
    each, or the numbers themselves. `pad_id`: the token that is no end of a text. The last token that is another is
    pooled. `prompt`: the instruction before the query of a pair."""

    task: HeadTask
    labels: tuple[str, ...]
    problem_type: ProblemType
    pad_id: int | None = None
    prompt: str | None = None

    @property
    def described(self) -> str:
        """The task and the first labels, for messages. Labels are printable: admission checks it."""
        what = "classifies each token" if self.task == "token_classify" else "classifies texts"
        rest = len(self.labels) - _SHOWN_LABELS
        shown = ", ".join(self.labels[:_SHOWN_LABELS])
        return f"{what} ({shown}{f' and {rest} more' if rest > 0 else ''})"

    @classmethod
    def of_json(cls, value: Mapping[str, Any] | None) -> Head | None:
        return None if value is None else cls(**{**value, "labels": tuple(value["labels"])})

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"labels": list(self.labels)}


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The vectors that a version was trained for. `dimensions`: the first numbers of a vector that it is cut to; None:
    all are kept."""

    pooling: VectorPooling
    normalize: bool
    dimensions: int | None

    @classmethod
    def of_json(cls, value: Mapping[str, Any] | None) -> EmbeddingSpec | None:
        return None if value is None else cls(value["pooling"], value["normalize"], value["dimensions"])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
