"""Answers and stream chunks in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loraplex.api.codec import dumps
from loraplex.api.generation import Delta
from loraplex.engine.types import Usage

DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event. JSON holds no raw line break, so it is always one line."""
    return b"data: " + dumps(value) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True)
class AnswerFormat:
    """What is the same in every chunk of one answer. `created` in seconds since the epoch, `model` as the
    client named it. With `include_usage` every chunk but the last has `usage: null`."""

    id: str
    created: int
    model: str
    include_usage: bool = False

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> bytes:
        body = self._head(kind)
        body["choices"] = choices
        if self.include_usage:
            body["usage"] = None
        return sse(body)

    def opening(self, num_choices: int) -> bytes:
        """Sent before any text."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def closing(self, usage: Usage) -> bytes:
        """Sent after the last text, before `[DONE]`."""
        raise NotImplementedError

    def whole(self, texts: Iterable[str], reasons: Iterable[str | None], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChatFormat(AnswerFormat):
    KIND = "chat.completion.chunk"

    def _choice(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def opening(self, num_choices: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(self.KIND, [self._choice(i, first)]) for i in range(num_choices))

    def delta(self, delta: Delta) -> bytes:
        chunks = b""
        if delta.text:
            chunks += self._chunk(self.KIND, [self._choice(delta.index, {"content": delta.text})])
        if delta.finish_reason:
            chunks += self._chunk(self.KIND, [self._choice(delta.index, {}, delta.finish_reason)])
        return chunks

    def closing(self, usage: Usage) -> bytes:
        if not self.include_usage:
            return b""
        return sse({**self._head(self.KIND), "choices": [], "usage": usage_json(usage)})

    def whole(self, texts: Iterable[str], reasons: Iterable[str | None], usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return dumps({**self._head("chat.completion"), "choices": choices, "usage": usage_json(usage)})


@dataclass(frozen=True)
class CompletionFormat(AnswerFormat):
    KIND = "text_completion"

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self, num_choices: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if not delta.text and not delta.finish_reason:
            return b""
        return self._chunk(self.KIND, [self._choice(delta.index, delta.text, delta.finish_reason)])

    def closing(self, usage: Usage) -> bytes:
        if not self.include_usage:
            return b""
        return sse({**self._head(self.KIND), "choices": [], "usage": usage_json(usage)})

    def whole(self, texts: Iterable[str], reasons: Iterable[str | None], usage: Usage) -> bytes:
        choices = [
            self._choice(index, text, reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return dumps({**self._head(self.KIND), "choices": choices, "usage": usage_json(usage)})
