"""Answers to chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplex.api.codec import dumps
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import AnswerFormat, WholeChoice, decided
from loraplex.engine.types import Usage
from loraplex.serving.output.parts import (
    AnswerText,
    CallArguments,
    CallStart,
    Part,
    ReasoningPart,
    merge_parts,
    text_of,
)


@dataclass(frozen=True)
class ChatFormat(AnswerFormat):
    """Reasoning stands under both names that clients look for. The log probabilities are those of all tokens, whatever
    part they belong to; a chunk has those of the tokens that came since the last one. `reasons`: there may be
    reasoning, and the usage tells its tokens."""

    KIND = "chat.completion.chunk"
    reasons: bool = False
    _num_reasoning: dict[int, int] = field(default_factory=dict)  # by choice

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: msgspec.Raw | None = None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return choice | {"token_ids": token_ids} if self.asked.token_ids else choice

    def opening(self, num_choices: int) -> bytes:
        first = {"role": "assistant", "content": ""}
        prompt = {"prompt_token_ids": self._prompt(0)} if self.asked.token_ids else {}
        return b"".join(self._chunk(self._choice(i, first), 0, **prompt) for i in range(num_choices))

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        self._num_reasoning[delta.index] = delta.num_reasoning
        super().add(choice, delta)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        fields = super()._usage(usage)
        if self.reasons:
            fields["completion_tokens_details"] = {"reasoning_tokens": sum(self._num_reasoning.values())}
        return fields

    def delta(self, delta: Delta) -> bytes:
        self._num_reasoning[delta.index] = delta.num_reasoning
        chunks, token_ids, logprobs = b"", delta.token_ids, self._logprobs(delta)
        pieces = [_piece(part) for part in merge_parts(delta.parts)]
        if not pieces and (delta.tokens or (token_ids and not delta.finish_reason)):
            pieces = [{"content": ""}]
        for fields in pieces:
            choice = self._choice(delta.index, fields, logprobs=logprobs, token_ids=token_ids)
            chunks += self._chunk(choice, delta.num_tokens)
            logprobs, token_ids = None, ()
        if delta.finish_reason:
            choice = self._choice(delta.index, {}, delta.finish_reason, token_ids=token_ids)
            choice |= decided(delta)
            chunks += self._chunk(choice, delta.num_tokens)
        return chunks

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        found = [
            {
                "index": index,
                "message": _message(choice.parts),
                "logprobs": self._all_logprobs(choice),
                "finish_reason": choice.finish_reason,
                **({"token_ids": choice.token_ids.tolist()} if self.asked.token_ids else {}),
                **decided(choice),
            }
            for index, choice in enumerate(choices)
        ]
        head, prompt = self._head("chat.completion"), self._whole_prompt(choices, 0)
        return dumps({**head, "choices": found, "usage": self._usage(usage), **prompt})


def _piece(part: Part) -> dict[str, Any]:
    match part:
        case AnswerText(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(position, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": position, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(position, text):
            return {"tool_calls": [{"index": position, "function": {"arguments": text}}]}


def _message(parts: Iterable[Part]) -> dict[str, Any]:
    parts = list(parts)
    calls: list[dict[str, Any]] = []
    for part in merge_parts(parts):
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"id": part.id, "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            calls[-1]["function"]["arguments"] += part.text
    text = text_of(parts)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not text else text,
        "refusal": None,
    }
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return message | {"tool_calls": calls} if calls else message
