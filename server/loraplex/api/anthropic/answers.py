"""Answers of `/v1/messages`, whole or as events."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from loraplex.api.anthropic.errors import error_body
from loraplex.api.anthropic.schemas import MessagesRequest
from loraplex.api.codec import InvalidJson, dumps, loads
from loraplex.api.errors import ApiError
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.sealed import seal
from loraplex.engine.types import Usage
from loraplex.serving.output.parts import AnswerText, CallArguments, CallStart, Part, ReasoningPart

_NOT_SERVED = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
"""Fields of Anthropic's answers that this server has nothing for."""
Kind = Literal["text", "thinking", "tool_use"]


@dataclass
class _Block:
    """A content block with its text, thinking or arguments so far."""

    kind: Kind
    call: CallStart | None = None
    texts: list[str] = field(default_factory=list)


class MessagesAnswer:
    """One answer to `asked`, whose prompt has `prompt_tokens` tokens, and leaves room for `room` of the answer's."""

    end = b""  # `message_stop` or the error is the last event
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self, id_: str, asked: MessagesRequest, prompt_tokens: int, room: int, request_id: str
    ) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._room = room
        self._request_id = request_id
        self._streams = bool(asked.stream)
        self._omits_thinking = asked.thinking is not None and asked.thinking.display == "omitted"
        self._head = {"id": id_, "type": "message", "role": "assistant", "model": asked.model}
        self._content: list[msgspec.Raw] = []  # blocks that are complete
        self._open: _Block | None = None
        self._called = False
        self._num_thinking = 0
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def opening(self, num_choices: int) -> bytes:
        usage = _usage(self._prompt_tokens, 0, 0) | _NOT_SERVED
        message: dict[str, Any] = {**self._head, "content": [], **_stopped(None), "usage": usage}
        return self._event("message_start", message=message) + self.ping

    def delta(self, delta: Delta) -> bytes:
        events = b"".join(map(self._part, delta.parts))
        self._num_thinking = delta.num_reasoning
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string
        return events

    def closing(self, usage: Usage) -> bytes:
        return (
            self._close()
            + self._event(
                "message_delta",
                delta=self._stop(usage),
                usage=self._usage(usage),
                **self._context_management(),
            )
            + self._event("message_stop")
        )

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + dumps(error_body(error, self._request_id)) + b"\n\n"

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        self.delta(delta)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        self._close()
        message = {
            **self._head,
            "content": self._content,
            **self._stop(usage),
            "usage": self._usage(usage) | _NOT_SERVED,
            **self._context_management(),
        }
        return dumps(message)

    def _usage(self, usage: Usage) -> dict[str, Any]:
        fields = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return fields | {"output_tokens_details": {"thinking_tokens": self._num_thinking}}

    def _stop(self, usage: Usage) -> dict[str, str | None]:
        reason, string = "end_turn", None
        if self._finish_reason == "length":
            cut = usage.completion_tokens == self._room < self._asked.max_tokens
            reason = "model_context_window_exceeded" if cut else "max_tokens"
        elif self._called:
            reason = "tool_use"
        elif self._stop_string is not None:
            reason, string = "stop_sequence", self._stop_string
        return _stopped(reason, string)

    def _context_management(self) -> dict[str, Any]:
        """Which edits were applied: none of those that are accepted changes anything."""
        asked = self._asked.context_management is not None
        return {"context_management": {"applied_edits": []}} if asked else {}

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        return b"event: " + kind.encode() + b"\ndata: " + dumps({"type": kind, **fields}) + b"\n\n"

    def _part(self, part: Part) -> bytes:
        match part:
            case AnswerText(text=text):
                return self._more("text", text, {"type": "text_delta", "text": text}) if text else b""
            case ReasoningPart(text=text):
                return (
                    self._more("thinking", text, {"type": "thinking_delta", "thinking": text})
                    if text
                    else b""
                )
            case CallStart():
                self._called = True
                return self._begin("tool_use", part)
            case CallArguments(text=text):
                return self._more("tool_use", text, {"type": "input_json_delta", "partial_json": text})

    def _more(self, kind: Kind, text: str, delta: dict[str, str]) -> bytes:
        events = b"" if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        if kind == "thinking" and self._omits_thinking:
            return events
        return events + self._event("content_block_delta", index=len(self._content), delta=delta)

    def _begin(self, kind: Kind, call: CallStart | None = None) -> bytes:
        events = self._close()
        self._open = _Block(kind, call)
        begun = self._written(self._open) | ({"signature": ""} if kind == "thinking" else {})
        return events + self._event("content_block_start", index=len(self._content), content_block=begun)

    def _close(self) -> bytes:
        block = self._open
        if block is None:
            return b""
        index, written = len(self._content), self._written(block)
        events = b""
        if block.kind == "thinking":
            signed = {"type": "signature_delta", "signature": written["signature"]}
            events = self._event("content_block_delta", index=index, delta=signed)
        self._content.append(msgspec.Raw(dumps(written)))
        self._open = None
        return events + self._event("content_block_stop", index=index)

    def _written(self, block: _Block) -> dict[str, Any]:
        text = "".join(block.texts)
        if block.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        if block.kind == "thinking":
            shown = "" if self._omits_thinking else text
            return {"type": "thinking", "thinking": shown, "signature": self._signature(text)}
        assert block.call is not None
        return {
            "type": "tool_use",
            "id": block.call.id,
            "name": block.call.name,
            "input": _object(text),
            "caller": {"type": "direct"},
        }

    def _signature(self, thinking: str) -> str:
        """A signature that carries hidden thinking to the next request, where it counts as shown."""
        if self._omits_thinking:
            return seal(thinking)
        return hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()


def _object(arguments: str) -> Any:
    """The arguments as they were written, where they are an object. An answer that was cut has as much of them as
    clients read from its stream."""
    try:
        if isinstance(loads(arguments.encode()), dict):
            return msgspec.Raw(arguments.encode())
    except InvalidJson:
        pass
    try:
        cut = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return cut if isinstance(cut, dict) else {}


def _stopped(reason: str | None, string: str | None = None) -> dict[str, str | None]:
    return {"stop_reason": reason, "stop_sequence": string, "stop_details": None, "container": None}


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """In each place; `_NOT_SERVED` is told beside it, except at the end of a stream."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": None,
        "server_tool_use": None,
    }
