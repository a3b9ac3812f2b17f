"""Answers of `/v1/responses`, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from loraplex.api.codec import dumps
from loraplex.api.errors import ApiError
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import DONE, PING, WholeChoice
from loraplex.api.openai.logprobs import ChatLogprobs
from loraplex.api.responses.schemas import SEALED_REASONING, ResponsesRequest
from loraplex.api.sealed import seal
from loraplex.engine.types import Usage
from loraplex.serving.output.parts import AnswerText, CallArguments, CallStart, Part, ReasoningPart

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of a failed response by HTTP status. Clients ask again after a `server_error`."""
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass
class _Item:
    """An item of the output. `texts` are its text, reasoning or arguments so far."""

    kind: Literal["message", "reasoning", "function_call"]
    id: str
    call: CallStart | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)


class ResponsesAnswer:
    """One answer to `asked`. The stream repeats what the whole answer would hold, item by item."""

    end = DONE
    ping = PING

    def __init__(self, id_: str, created: int, asked: ResponsesRequest, logprobs: ChatLogprobs) -> None:
        self._id = id_
        self._asked = asked
        self._renderer = logprobs
        self._streams = bool(asked.stream)
        self._head = _head(id_, created, asked)
        self._tail = _tail(asked)
        self._number = 0
        self._done: list[msgspec.Raw] = []  # items that are complete
        self._open: _Item | None = None
        self._unplaced: list[bytes] = []  # log probabilities that wait for their text
        self._num_reasoning = 0
        self._finish_reason: str | None = None

    def opening(self, num_choices: int) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        if delta.tokens:
            self._unplaced.append(self._renderer.render(delta.tokens)[0])
        events = b"".join(map(self._part, delta.parts))
        if delta.parts and not delta.text:
            self._unplaced = []  # they are of reasoning or of a call
        self._num_reasoning = delta.num_reasoning
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def closing(self, usage: Usage) -> bytes:
        events, response = self._finished(usage)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        return events + self._event(f"response.{status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        code = _FAILURES.get(error.status, "server_error")
        response = self._response("failed", error={"code": code, "message": error.sentence})
        return self._event("error", code=error.code, message=error.sentence, param=error.param) + self._event(
            "response.failed", response=response
        )

    def add(self, choice: WholeChoice, delta: Delta) -> None:
        self.delta(delta)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        return dumps(self._finished(usage)[1])

    def _finished(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        """The last events of the items, and the response."""
        events = b""
        if self._open is None and not self._done:
            events = self._begin("message")  # an answer of no words is still a message
        status: Status = "incomplete" if self._finish_reason == "length" else "completed"
        if self._open is not None:
            self._open.logprobs += self._unplaced
        events += self._close(status)
        return events, self._response(status, usage=usage_fields(usage, self._num_reasoning))

    def _response(
        self, status: Status, usage: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._done),
            "usage": usage,
            **self._tail,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        number, self._number = self._number, self._number + 1
        body = dumps({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"

    def _part(self, part: Part) -> bytes:
        match part:
            case AnswerText(text=text):
                return self._text("message", text) if text else b""
            case ReasoningPart(text=text):
                return self._text("reasoning", text) if text else b""
            case CallStart():
                return self._close() + self._begin("function_call", part)
            case CallArguments(text=text):
                assert self._open is not None
                self._open.texts.append(text)
                return self._in_item("response.function_call_arguments.delta", self._open, delta=text)

    def _text(self, kind: Literal["message", "reasoning"], text: str) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._close() + self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        if kind == "reasoning":
            return events + self._in_item(
                "response.reasoning_text.delta", self._open, content_index=0, delta=text
            )
        logprobs, self._unplaced = self._unplaced, []
        self._open.logprobs += logprobs
        return events + self._in_item(
            "response.output_text.delta", self._open, content_index=0, delta=text, logprobs=_list(logprobs)
        )

    def _begin(
        self, kind: Literal["message", "reasoning", "function_call"], call: CallStart | None = None
    ) -> bytes:
        item = self._open = _Item(kind, f"{_PREFIXES[kind]}_{self._id[5:]}_{len(self._done)}", call)
        events = self._event(
            "response.output_item.added",
            output_index=len(self._done),
            item=self._written(item, "in_progress", begun=True),
        )
        if kind == "function_call":
            return events
        return events + self._in_item(
            "response.content_part.added", item, content_index=0, part=_content(item, "", [])
        )

    def _close(self, status: Status = "completed") -> bytes:
        item = self._open
        if item is None:
            return b""
        text = "".join(item.texts)
        if item.kind == "function_call":
            events = self._in_item(
                "response.function_call_arguments.done",
                item,
                name=item.call.name if item.call is not None else "",
                arguments=text,
            )
        else:
            if item.kind == "message":
                events = self._in_item(
                    "response.output_text.done",
                    item,
                    content_index=0,
                    text=text,
                    logprobs=_list(item.logprobs),
                )
            else:
                events = self._in_item("response.reasoning_text.done", item, content_index=0, text=text)
            events += self._in_item(
                "response.content_part.done",
                item,
                content_index=0,
                part=_content(item, text, item.logprobs),
            )
        written = msgspec.Raw(dumps(self._written(item, status)))
        events += self._event("response.output_item.done", output_index=len(self._done), item=written)
        self._done.append(written)
        self._open = None
        return events

    def _in_item(self, kind: str, item: _Item, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=len(self._done), **fields)

    def _written(self, item: _Item, status: Status, *, begun: bool = False) -> dict[str, Any]:
        """`begun`: there is nothing in it yet."""
        text = "".join(item.texts)
        content = [] if begun else [_content(item, text, item.logprobs)]
        written: dict[str, Any] = {"id": item.id, "type": item.kind, "status": status}
        if item.kind == "message":
            return written | {"role": "assistant", "content": content}
        if item.kind == "reasoning":
            sealed = None
            if self._asked.includes(SEALED_REASONING) and not begun:
                sealed = seal(text)
            return written | {"summary": [], "content": content, "encrypted_content": sealed}
        assert item.call is not None
        return written | {"call_id": item.call.id, "name": item.call.name, "arguments": text}


def _content(item: _Item, text: str, logprobs: Sequence[bytes]) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _list(logprobs)}


def _list(items: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(filter(None, items)) + b"]")


def usage_fields(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """The usage object of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _head(id_: str, created: int, asked: ResponsesRequest) -> dict[str, Any]:
    return {"id": id_, "object": "response", "created_at": created, "model": asked.model}


def _tail(asked: ResponsesRequest) -> dict[str, Any]:
    """Fields that an answer repeats from its request. The tools are those that the model saw."""
    config, choice = asked.text, asked.tool_choice or "auto"
    format_ = config.format if config is not None and config.format is not None else None
    effort = asked.reasoning.effort if asked.reasoning is not None else None
    tools = [tool.repeated() for tool in asked.offer().functions]
    return {
        "background": False,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "presence_penalty": asked.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"} if format_ is None else format_.repeated()},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        "tools": msgspec.Raw(dumps(tools)),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
