"""Answers made by chance, and what each dialect tells of one: whole, and put together from its stream.

The stream is put together here by the wire's own rules, with nothing of the code that wrote it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from support.http.events import read_events

WORDS = (
    "ok",
    "Grüße",
    "日本語",
    "🙂👍🏽",
    " a b  c ",
    "\n\n",
    "\t",
    '"quoted"',
    "{",
    "}",
    '{"name": "add"',
    "<",
    "<tool",
    "<tool_call",
    "</tool_call>",
    "<think",
    "</think",
    "data: [DONE]\n\n",
    "STOP",
    "ST",
    "\\",
    "\u2028",
    "e\u0301",
    "a" * 300,
)
NAMES = ("add", "look_up")
STOPS = ("STOP", "OPS", "🙂", "\n\n\n", "]\n\nS", "zzz")
VALUES: tuple[Any, ...] = (None, True, 0, -1.5, 1e21, "", "ü", '"', "</tool_call", [], {}, [1, {"a": "b\n"}])


@dataclass(frozen=True)
class Case:
    """One answer: the texts of its choices, and what the request asks for beside its prompt."""

    texts: tuple[str, ...]
    stops: tuple[str, ...]
    max_tokens: int
    tools: bool
    scored: bool
    seed: int


def generated(seed: int, *, dialect: str) -> Case:
    chance = random.Random(f"{dialect} {seed}")
    n = chance.choice((1, 1, 2, 3)) if dialect in ("chat", "completions") else 1
    texts = tuple(_text(chance) for _ in range(n))
    return Case(
        texts,
        _stops(chance, texts[0]),
        chance.choice((5, 60, 3000, 3000, 3000)),
        chance.random() < 0.6,
        chance.random() < 0.3 and dialect != "messages",
        seed,
    )


def _stops(chance: random.Random, text: str) -> tuple[str, ...]:
    stops = chance.sample(STOPS, chance.choice((0, 0, 1, 2)))
    if text and chance.random() < 0.25:
        start = chance.randrange(len(text))
        stops.append(text[start : start + chance.randrange(1, 9)])
    return tuple(dict.fromkeys(stops))


def _text(chance: random.Random) -> str:
    reasoning = f"<think>{_words(chance)}</think>" if chance.random() < 0.5 else ""
    parts = [_words(chance)]
    for _ in range(chance.choice((0, 0, 1, 2, 3))):
        parts += [_call(chance), chance.choice(("", "\n", _words(chance)))]
    return reasoning + "".join(parts)


def _words(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randrange(8)))


def _call(chance: random.Random) -> str:
    arguments = {f"k{number}": chance.choice(VALUES) for number in range(chance.randrange(4))}
    call = json.dumps(
        {"name": chance.choice((*NAMES, "unknown")), "arguments": arguments},
        ensure_ascii=chance.random() < 0.5,
        indent=chance.choice((None, 2)),
    )
    return f"<tool_call>\n{call}\n</tool_call>"


def cuts(seed: object) -> tuple[int, ...]:
    """Sizes of an engine's chunks."""
    chance = random.Random(str(seed))
    return tuple(chance.choice((1, 1, 2, 3, 7, 40, 500)) for _ in range(chance.randrange(1, 9)))


@dataclass
class Told:
    """What an answer tells. `parts` are kinds and texts in their order; a call is its name and its arguments."""

    parts: list[tuple[str, ...]] = field(default_factory=list)
    reason: str | None = None
    stop: str | None = None
    usage: Any = None
    logprobs: list[Any] = field(default_factory=list)


PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_SCHEMA = {"type": "object", "additionalProperties": True}


def body_for(dialect: str, case: Case, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model}
    if dialect in ("chat", "completions"):
        body |= {"n": len(case.texts), "max_tokens": case.max_tokens, "stop": list(case.stops)}
        body |= {"prompt": "hi"} if dialect == "completions" else {"messages": [_HI]}
        if case.scored:
            body |= {"logprobs": 2} if dialect == "completions" else {"logprobs": True, "top_logprobs": 2}
        if case.tools and dialect == "chat":
            body["tools"] = [
                {"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in NAMES
            ]
    elif dialect == "responses":
        body |= {"input": "hi", "max_output_tokens": case.max_tokens, "stop": list(case.stops)}
        body |= {"include": ["reasoning.encrypted_content"]}
        if case.scored:
            body |= {"top_logprobs": 2}
        if case.tools:
            body["tools"] = [{"type": "function", "name": name, "parameters": _SCHEMA} for name in NAMES]
    else:
        body |= {"messages": [_HI], "max_tokens": case.max_tokens, "stop_sequences": list(case.stops)}
        body["thinking"] = {"type": "adaptive", "display": "omitted" if case.seed % 4 == 0 else None}
        if case.tools:
            body["tools"] = [{"name": name, "input_schema": _SCHEMA} for name in NAMES]
    return body


_HI = {"role": "user", "content": "hi"}


def read_whole(dialect: str, answer: dict[str, Any]) -> list[Told]:
    return {
        "chat": _whole_chat,
        "completions": _whole_completion,
        "responses": lambda answer: [_whole_response(answer)],
        "messages": lambda answer: [_whole_message(answer)],
    }[dialect](answer)


def read_stream(dialect: str, text: str, n: int) -> list[Told]:
    return {
        "chat": _chat_stream,
        "completions": _completion_stream,
        "responses": lambda text, _: [_response_stream(text)],
        "messages": lambda text, _: [_message_stream(text)],
    }[dialect](text, n)


def _chat_parts(message: dict[str, Any]) -> list[tuple[str, ...]]:
    calls = message.get("tool_calls") or ()
    return [
        ("reasoning", message.get("reasoning") or ""),
        ("text", message.get("content") or ""),
        *(("call", call["function"]["name"], call["function"]["arguments"]) for call in calls),
    ]


def _whole_chat(answer: dict[str, Any]) -> list[Told]:
    return [
        Told(
            _chat_parts(choice["message"]),
            choice["finish_reason"],
            logprobs=(choice["logprobs"] or {}).get("content", []),
        )
        for choice in answer["choices"]
    ]


def _chunks(text: str) -> list[dict[str, Any]]:
    events = read_events(text)
    assert events[-1] == (None, "[DONE]")
    return [json.loads(data) for _, data in events[:-1]]


def _chat_stream(text: str, n: int) -> list[Told]:
    found = [Told() for _ in range(n)]
    messages: list[dict[str, Any]] = [{"reasoning": "", "content": "", "tool_calls": []} for _ in range(n)]
    for chunk in _chunks(text):
        (choice,) = chunk["choices"]
        told, message, delta = found[choice["index"]], messages[choice["index"]], choice["delta"]
        assert told.reason is None
        told.reason = choice["finish_reason"]
        told.logprobs += (choice["logprobs"] or {}).get("content", [])
        message["reasoning"] += delta.get("reasoning") or ""
        message["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            if piece["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"function": {"name": piece["function"]["name"], "arguments": ""}}
                )
            message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    for told, message in zip(found, messages, strict=True):
        told.parts = _chat_parts(message)
    return found


def _whole_completion(answer: dict[str, Any]) -> list[Told]:
    return [
        Told(
            [("text", choice["text"])],
            choice["finish_reason"],
            logprobs=_lists(choice["logprobs"]),
        )
        for choice in answer["choices"]
    ]


def _lists(logprobs: dict[str, list[Any]] | None) -> list[Any]:
    return [] if logprobs is None else [list(row) for row in zip(*logprobs.values(), strict=True)]


def _completion_stream(text: str, n: int) -> list[Told]:
    found = [Told([("text", "")]) for _ in range(n)]
    for chunk in _chunks(text):
        (choice,) = chunk["choices"]
        told = found[choice["index"]]
        assert told.reason is None
        told.parts = [("text", told.parts[0][1] + choice["text"])]
        told.reason = choice["finish_reason"]
        told.logprobs += _lists(choice["logprobs"])
    return found


def _item_part(item: dict[str, Any]) -> tuple[str, ...]:
    if item["type"] == "function_call":
        return ("call", item["name"], item["arguments"], item["status"])
    text = "".join(part["text"] for part in item["content"])
    if item["type"] == "reasoning":
        return ("reasoning", text, item["encrypted_content"], item["status"])
    return ("text", text, item["status"])


def _whole_response(answer: dict[str, Any]) -> Told:
    details = answer["incomplete_details"]
    return Told(
        [_item_part(item) for item in answer["output"]],
        answer["status"],
        details and details["reason"],
        answer["usage"],
        [
            entry
            for item in answer["output"]
            if item["type"] == "message"
            for part in item["content"]
            for entry in part["logprobs"]
        ],
    )


def _response_stream(text: str) -> Told:
    """By the deltas alone; what the stream repeats at each end has to be the same."""
    events = read_events(text)
    assert events.pop() == (None, "[DONE]")
    told, items = Told(), list[dict[str, Any]]()
    for number, (name, data) in enumerate(events):
        event = json.loads(data)
        assert (event["type"], event["sequence_number"]) == (name, number)
        if name == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"text": "", "added": event["item"]})
        elif "output_index" in event:
            item = items[event["output_index"]]
            assert event["output_index"] == len(items) - 1
            assert event.get("item_id", event.get("item", {}).get("id")) == item["added"]["id"]
            if name is not None and name.endswith(".delta"):
                item["text"] += event["delta"]
                told.logprobs += event.get("logprobs", [])
            elif name in ("response.output_text.done", "response.reasoning_text.done"):
                assert event["text"] == item["text"]
            elif name == "response.function_call_arguments.done":
                assert event["arguments"] == item["text"]
            elif name == "response.output_item.done":
                part = _item_part(event["item"])
                assert part[2 if part[0] == "call" else 1] == item["text"]
                told.parts.append(part)
                item["done"] = event["item"]
    assert name in ("response.completed", "response.incomplete")
    last = json.loads(data)["response"]
    assert last["output"] == [item["done"] for item in items]
    assert f"response.{last['status']}" == name
    final = _whole_response(last)
    told.reason, told.stop, told.usage = final.reason, final.stop, final.usage
    assert final.logprobs[: len(told.logprobs)] == told.logprobs
    told.logprobs = final.logprobs
    return told


def _whole_message(answer: dict[str, Any]) -> Told:
    blocks = [_block_part(block) for block in answer["content"]]
    # A stream tells at its end what it did not know at its beginning.
    usage = {name: answer["usage"][name] for name in USAGE_AT_THE_END}
    return Told(blocks, answer["stop_reason"], answer["stop_sequence"], usage)


USAGE_AT_THE_END = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "server_tool_use",
    "output_tokens_details",
)


def _block_part(block: dict[str, Any]) -> tuple[str, ...]:
    if block["type"] == "tool_use":
        return ("call", block["name"], json.dumps(block["input"]))
    if block["type"] == "thinking":
        return ("reasoning", block["thinking"], block["signature"])
    return ("text", block["text"])


def _message_stream(text: str) -> Told:
    told, blocks = Told(), list[dict[str, Any]]()
    events = read_events(text)
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    for name, data in events:
        event = json.loads(data)
        assert event["type"] == name
        if name == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif name == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            block, delta = blocks[-1], event["delta"]
            kind = delta["type"]
            field_name = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "signature_delta": "signature",
                "input_json_delta": "partial_json",
            }[kind]
            target = "json" if field_name == "partial_json" else field_name
            block[target] += delta[field_name]
        elif name == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1]["json"] or "{}")
            told.parts.append(_block_part(blocks[-1]))
        elif name == "message_delta":
            told.reason, told.stop = event["delta"]["stop_reason"], event["delta"]["stop_sequence"]
            told.usage = event["usage"]
    return told
