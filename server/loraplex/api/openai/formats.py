"""Answers and stream chunks in OpenAI's shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from loraplex.api.codec import dumps
from loraplex.api.errors import ApiError
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    Rendered,
    ScoredToken,
)
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.engine.types import Usage
from loraplex.serving.output.parts import Part, text_of

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment, which clients of server-sent events pass over."""


def sse(value: Any) -> bytes:
    """One server-sent event. JSON holds no raw line break, so it is always one line."""
    return b"data: " + dumps(value) + b"\n\n"


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(frozen=True)
class Asked:
    """Parts of an answer beside its text. With `include_usage` every chunk but the last has `usage: null`, or with
    `continuous_usage` that of its choice so far. `prompt_logprobs`: number of likely tokens for each token of a prompt;
    `token_ids`: prompts and outputs as tokens. Each of `prompts` has `n` choices."""

    include_usage: bool = False
    continuous_usage: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    prompts: Sequence[Sequence[int]] = ()
    n: int = 1

    @classmethod
    def of(cls, fields: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], n: int) -> Asked:
        return cls(
            fields.include_usage,
            fields.continuous_usage,
            fields.prompt_logprobs,
            bool(fields.return_token_ids),
            prompts,
            n,
        )


@dataclass
class WholeChoice:
    """A choice of an answer that does not stream, while it comes: `logprobs` None where nobody asks for them, those of
    the prompt with its first choice."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Rendered] | None = None
    finish_reason: str | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    prompt_logprobs: list[bytes] = field(default_factory=list)
    num_prompt_scored: int = 1  # nothing comes before the first token that could make it likely
    embedding: bytes = b""  # as JSON
    choice_probabilities: Sequence[Any] | None = None


def decided(choice: WholeChoice | Delta) -> dict[str, Any]:
    """The field of a choice that tells how likely each choice of the request is."""
    told = choice.choice_probabilities
    return {} if told is None else {"choice_probabilities": told}


@dataclass(frozen=True)
class AnswerFormat(ABC):
    """Fields that are the same in every chunk of one answer. `created` in seconds since the epoch, `model` as the
    client named it, `fingerprint` of `loraplex.api.fingerprint`. `prompt_logprobs` is needed where the prompt's are
    asked for. A chunk's `object` is `KIND`."""

    KIND: ClassVar[str]
    id: str
    created: int
    model: str
    logprobs: ChatLogprobs | CompletionLogprobs
    asked: Asked = Asked()
    prompt_logprobs: PromptLogprobs | None = None
    fingerprint: str = ""
    _rendered: list[tuple[Sequence[ScoredToken], Rendered]] = field(default_factory=list)  # the last ones

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _prompt(self, index: int) -> Sequence[int]:
        """The prompt's tokens of a choice."""
        return self.asked.prompts[index // self.asked.n]

    @cached_property
    def _chunk_head(self) -> bytes:
        """The beginning of every chunk, an open JSON object."""
        return b"data: " + dumps(self._head(self.KIND))[:-1] + b","

    def _chunk(self, choice: dict[str, Any], num_tokens: int, **others: Any) -> bytes:
        """`num_tokens`: the choice's so far."""
        body: dict[str, Any] = {**others, "choices": [choice]}
        if self.asked.continuous_usage:
            body["usage"] = _counts(len(self._prompt(choice["index"])), num_tokens)
        elif self.asked.include_usage:
            body["usage"] = None
        return self._chunk_head + dumps(body)[1:] + b"\n\n"

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        """Add a delta to a choice of an answer that does not stream."""
        choice.parts.extend(delta.parts)
        choice.finish_reason = delta.finish_reason
        if delta.tokens is not None:
            choice.logprobs = choice.logprobs or []
            if delta.tokens:
                choice.logprobs.append(self._render(delta.tokens))
        choice.token_ids.extend(delta.token_ids)
        choice.choice_probabilities = delta.choice_probabilities or choice.choice_probabilities
        if delta.prompt is not None and self.prompt_logprobs is not None:
            start = choice.num_prompt_scored
            choice.num_prompt_scored += len(delta.prompt)
            ids = self._prompt(delta.index)[start : choice.num_prompt_scored]
            items = self.prompt_logprobs.render(ids, delta.prompt, self.asked.prompt_logprobs or 0)
            choice.prompt_logprobs.append(items)

    def _render(self, tokens: Sequence[ScoredToken]) -> Rendered:
        """Once, where all choices of a prompt repeat it."""
        if not self._rendered or self._rendered[0][0] is not tokens:
            self._rendered[:] = [(tokens, self.logprobs.render(tokens))]
        return self._rendered[0][1]

    def _logprobs(self, delta: Delta) -> msgspec.Raw | None:
        """The log probabilities of a chunk."""
        return self.logprobs.whole([self._render(delta.tokens)]) if delta.tokens else None

    def _all_logprobs(self, choice: WholeChoice) -> msgspec.Raw | None:
        return None if choice.logprobs is None else self.logprobs.whole(choice.logprobs)

    def _whole_prompt(self, choices: Sequence[WholeChoice], index: int) -> dict[str, Any]:
        """Fields about a choice's prompt in an answer that does not stream."""
        fields: dict[str, Any] = {}
        if self.asked.prompt_logprobs is not None and self.prompt_logprobs is not None:
            first = choices[index - index % self.asked.n]
            fields["prompt_logprobs"] = self.prompt_logprobs.whole(first.prompt_logprobs)
        if self.asked.token_ids:
            fields["prompt_token_ids"] = self._prompt(index)
        return fields

    @abstractmethod
    def opening(self, num_choices: int) -> bytes:
        """Sent before any text."""

    @abstractmethod
    def delta(self, delta: Delta) -> bytes:
        """The fields of a new part."""

    def closing(self, usage: Usage) -> bytes:
        """Sent after the last text, before `[DONE]`."""
        if not self.asked.include_usage:
            return b""
        return sse({**self._head(self.KIND), "choices": [], "usage": self._usage(usage)})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The usage object of the whole answer."""
        return {
            **_counts(usage.prompt_tokens, usage.completion_tokens),
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def failed(self, error: ApiError) -> bytes:
        """Sent in its place where the stream fails."""
        return sse(error.body())

    @property
    def end(self) -> bytes:
        return DONE

    @property
    def ping(self) -> bytes:
        return PING

    @abstractmethod
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The answer to a request that does not stream."""


@dataclass(frozen=True)
class CompletionFormat(AnswerFormat):
    KIND = "text_completion"
    _begun: set[int] = field(default_factory=set)  # choices with a sent chunk

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: msgspec.Raw | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, num_choices: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        text = delta.text
        if not (text or delta.tokens or delta.finish_reason or delta.token_ids):
            return b""
        choice = self._choice(delta.index, text, delta.finish_reason, self._logprobs(delta))
        if self.asked.token_ids:
            begins = delta.index not in self._begun
            self._begun.add(delta.index)
            choice["prompt_token_ids"] = self._prompt(delta.index) if begins else None
            choice["token_ids"] = delta.token_ids
        choice |= decided(delta)
        return self._chunk(choice, delta.num_tokens)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        found = [
            {
                **self._choice(
                    index, text_of(choice.parts), choice.finish_reason, self._all_logprobs(choice)
                ),
                **({"token_ids": choice.token_ids.tolist()} if self.asked.token_ids else {}),
                **decided(choice),
                **self._whole_prompt(choices, index),
            }
            for index, choice in enumerate(choices)
        ]
        return dumps({**self._head(self.KIND), "choices": found, "usage": self._usage(usage)})
