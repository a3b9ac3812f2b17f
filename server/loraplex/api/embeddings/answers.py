"""Answers to `/v1/embeddings`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.api.codec import dumps
from loraplex.api.embeddings.schemas import EmbeddingsRequest
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.engine.types import Usage


@dataclass(frozen=True)
class EmbeddingsAnswer:
    """Each embedding is written when it comes."""

    asked: EmbeddingsRequest

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        if delta.pooled is not None:
            vector = delta.pooled[: 4 * (self.asked.dimensions or len(delta.pooled))]
            vector = vector if self.asked.normalize is False else normalised(vector)
            choice.embedding = self._written(vector)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        parts = [b'{"object":"list","data":[']
        for index, choice in enumerate(choices):
            comma = b"," if index else b""
            parts += (comma, b'{"object":"embedding","index":%d,"embedding":' % index, choice.embedding, b"}")
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        parts += (b'],"model":', dumps(self.asked.model), b',"usage":', dumps(counts), b"}")
        return b"".join(parts)

    def _written(self, vector: bytes) -> bytes:
        if self.asked.encoding_format == "base64":
            return b'"' + base64.b64encode(vector) + b'"'
        return dumps(np.frombuffer(vector, "<f4").tolist())


def normalised(vector: bytes) -> bytes:
    """float32, little-endian, of length 1. Zeros stay zeros."""
    numbers = np.frombuffer(vector, "<f4").astype(np.float64)
    length = float(np.sqrt(np.sum(numbers * numbers)))
    return vector if length == 0.0 else (numbers / length).astype("<f4").tobytes()
