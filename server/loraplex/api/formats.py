"""Answers and stream chunks in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from loraplex.api.codec import dumps
from loraplex.api.generation import Delta
from loraplex.api.logprobs import ChatLogprobs, CompletionLogprobs, Rendered, ScoredToken
from loraplex.engine.types import Usage

DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One server-sent event. JSON holds no raw line break, so it is always one line."""
    return b"data: " + dumps(value) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        **_counts(usage.prompt_tokens, usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass
class WholeChoice:
    """A choice of an answer that does not stream, while it comes: `logprobs` None where nobody asks for them."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[Rendered] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class AnswerFormat:
    """What is the same in every chunk of one answer. `created` in seconds since the epoch, `model` as the
    client named it. With `include_usage` every chunk but the last has `usage: null`, or with `continuous_usage` that of
    its choice so far, for which `prompts` are needed, each of `n` choices. A chunk's `object` is `KIND`."""

    KIND: ClassVar[str]
    id: str
    created: int
    model: str
    logprobs: ChatLogprobs | CompletionLogprobs
    include_usage: bool = False
    continuous_usage: bool = False
    prompts: Sequence[Sequence[int]] = ()
    n: int = 1
    _rendered: list[tuple[Sequence[ScoredToken], Rendered]] = field(default_factory=list)  # the last ones

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any], num_tokens: int) -> bytes:
        """`num_tokens`: the choice's so far."""
        body = self._head(self.KIND)
        body["choices"] = [choice]
        if self.continuous_usage:
            body["usage"] = _counts(len(self.prompts[choice["index"] // self.n]), num_tokens)
        elif self.include_usage:
            body["usage"] = None
        return sse(body)

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        """For an answer that does not stream."""
        choice.texts.append(delta.text)
        choice.finish_reason = delta.finish_reason
        if delta.tokens is not None:
            choice.logprobs = choice.logprobs or []
            if delta.tokens:
                choice.logprobs.append(self._render(delta.tokens))

    def _render(self, tokens: Sequence[ScoredToken]) -> Rendered:
        """Once, where all choices of a prompt repeat it."""
        if not self._rendered or self._rendered[0][0] is not tokens:
            self._rendered[:] = [(tokens, self.logprobs.render(tokens))]
        return self._rendered[0][1]

    def _logprobs(self, delta: Delta) -> msgspec.Raw | None:
        """Of a chunk."""
        return self.logprobs.whole([self._render(delta.tokens)]) if delta.tokens else None

    def _all_logprobs(self, choice: WholeChoice) -> msgspec.Raw | None:
        return None if choice.logprobs is None else self.logprobs.whole(choice.logprobs)

    def opening(self, num_choices: int) -> bytes:
        """Sent before any text."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        raise NotImplementedError

    def closing(self, usage: Usage) -> bytes:
        """Sent after the last text, before `[DONE]`."""
        if not self.include_usage:
            return b""
        return sse({**self._head(self.KIND), "choices": [], "usage": usage_json(usage)})

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChatFormat(AnswerFormat):
    KIND = "chat.completion.chunk"

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: msgspec.Raw | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, num_choices: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(self._choice(i, first), 0) for i in range(num_choices))

    def delta(self, delta: Delta) -> bytes:
        chunks = b""
        if delta.text or delta.tokens:
            choice = self._choice(delta.index, {"content": delta.text}, logprobs=self._logprobs(delta))
            chunks += self._chunk(choice, delta.num_tokens)
        if delta.finish_reason:
            chunks += self._chunk(self._choice(delta.index, {}, delta.finish_reason), delta.num_tokens)
        return chunks

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        told = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._all_logprobs(choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return dumps({**self._head("chat.completion"), "choices": told, "usage": usage_json(usage)})


@dataclass(frozen=True)
class CompletionFormat(AnswerFormat):
    KIND = "text_completion"

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: msgspec.Raw | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, num_choices: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return b""
        choice = self._choice(delta.index, delta.text, delta.finish_reason, self._logprobs(delta))
        return self._chunk(choice, delta.num_tokens)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        told = [
            self._choice(index, "".join(choice.texts), choice.finish_reason, self._all_logprobs(choice))
            for index, choice in enumerate(choices)
        ]
        return dumps({**self._head(self.KIND), "choices": told, "usage": usage_json(usage)})
