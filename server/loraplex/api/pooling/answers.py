"""Answers to requests that classify, score or rank: vLLM's shapes, and Cohere's and Jina's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.pooled import Head
from loraplex.api.codec import dumps
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.pooling.schemas import ClassifyRequest, RerankRequest, ScoreRequest
from loraplex.engine.types import Usage

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ClassifyAnswer:
    """Each input is written when it comes. `prompts`: tokens of the inputs, which a head for tokens answers one by
    one."""

    id: str
    created: int
    asked: ClassifyRequest
    head: Head
    prompts: Sequence[Sequence[int]]

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        if delta.pooled is None:
            return
        rows = activated(delta.pooled, self.head, raw=self.asked.use_activation is False)
        item: dict[str, Any] = {"index": delta.index}
        if self.head.task == "classify":
            item |= self._read(rows[0])
        else:
            tokens = self.prompts[delta.index]
            item["tokens"] = [
                {"token_id": token_id} | self._read(row) for token_id, row in zip(tokens, rows, strict=True)
            ]
        choice.embedding = dumps(item | {"num_classes": len(self.head.labels)})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        opening = dumps({"id": self.id, "object": "list", "created": self.created, "model": self.asked.model})
        data = b",".join(choice.embedding for choice in choices)
        return opening[:-1] + b',"data":[' + data + b'],"usage":' + dumps(_counts(usage)) + b"}"

    def _read(self, row: Numbers) -> dict[str, Any]:
        return {"label": self.head.labels[int(row.argmax())], "probs": row.tolist()}


@dataclass(frozen=True)
class ScoreAnswer:
    """Scores in the order of the pairs."""

    id: str
    created: int
    asked: ScoreRequest | RerankRequest
    head: Head

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        if delta.pooled is not None:
            choice.embedding = delta.pooled

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(self.scores(choices))
        ]
        top = {"id": self.id, "object": "list", "created": self.created, "model": self.asked.model}
        return dumps(top | {"data": data, "usage": _counts(usage)})

    def scores(self, choices: Sequence[WholeChoice]) -> list[float]:
        raw = self.asked.use_activation is False
        return [relevance(choice.embedding, self.head, raw=raw) for choice in choices]


@dataclass(frozen=True)
class RerankAnswer(ScoreAnswer):
    """Documents by their scores, the best first. Of equal ones the earlier comes first."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        assert isinstance(self.asked, RerankRequest)
        scores = self.scores(choices)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.asked.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if self.asked.return_documents:
            for result in results:
                result["document"] = {"text": self.asked.documents[result["index"]]}
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        meta = {"tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0}}
        top = {"id": self.id, "object": "list", "model": self.asked.model}
        return dumps(top | {"results": results, "usage": counts, "meta": meta})


def activated(pooled: bytes, head: Head, *, raw: bool) -> Numbers:
    """Rows of numbers, one for each label: what the head's problem type makes of its logits, or these themselves."""
    logits = np.frombuffer(pooled, "<f4").astype(np.float64).reshape(-1, len(head.labels))
    if raw or head.problem_type == "regression":
        return logits
    return _sigmoid(logits) if head.problem_type == "multi_label_classification" else _softmax(logits)


def relevance(pooled: bytes, head: Head, *, raw: bool) -> float:
    """The sigmoid of the logit of one label, the second's probability of two; raw: the one logit, or the second less
    the first."""
    logits = np.frombuffer(pooled, "<f4").astype(np.float64)
    if len(head.labels) == 2 and head.problem_type == "multi_label_classification":
        number = logits[1:]
    else:
        number = logits if len(head.labels) == 1 else logits[1:] - logits[:1]
    return float((number if raw else _sigmoid(number))[0])


def _softmax(logits: Numbers) -> Numbers:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Numbers = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def _sigmoid(logits: Numbers) -> Numbers:
    """Without an overflow."""
    small = np.exp(-np.abs(logits))
    probabilities: Numbers = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    return probabilities


def _counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
