"""Earlier turns of a conversation, brought into the form that requests have.

Another server, an older client or this server wrote them, and this server cuts a call at `max_tokens`. The conversation
goes on all the same: its past is mended before it is checked. What its form cannot hold becomes text, and what holds
nothing is left out. The current turn, which follows the model's last words, is checked as it was sent, and unknown
fields are refused in both.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from loraplex.api.codec import InvalidJson, dumps, loads

MAX_LABEL = 256
"""Characters of an id or a name; longer ids become a hash, longer names are cut."""
MAX_WRAPPED = 3
"""How often arguments may be a JSON text within a JSON text."""
_MAX_DEPTH = 4
_TEXTS = ("text", "refusal", "transcript", "summary", "content", "output")
"""Fields of a part that hold its text, in the order in which they are looked for."""
_REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "tool_plan")
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_TEXT_KINDS = frozenset(
    ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text", None)
)
LABELS = frozenset(
    (
        "additional_kwargs", "annotations", "cache_control", "caller", "citations", "created", "created_at",
        "encrypted_content", "extra_content", "finish_reason", "id", "index", "logprobs", "metadata", "model", "object",
        "is_error", "phase", "prefix", "provider_specific_fields", "response_metadata", "signature", "status",
        "stop_reason", "stop_sequence", "thought_signature", "timestamp", "usage", "usage_metadata", "weight",
    )
)  # fmt: skip
"""Fields with which servers and clients label what a model wrote. They say nothing that the model is to read."""
_THOUGHTS = frozenset(("thinking", "reasoning", "reasoning_text"))

Json = dict[str, Any]


def past_length(turns: Sequence[object], is_models: Callable[[object], bool]) -> int:
    """How many of the turns are past: those up to the model's last one that something follows."""
    end = len(turns)
    while end and is_models(turns[end - 1]):
        end -= 1
    while end and not is_models(turns[end - 1]):
        end -= 1
    return end


class CallIds:
    """Ids of calls and of their results, in the order of the conversation. A missing one is made up; a result without
    one belongs to the first call that has no result yet."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, None] = OrderedDict()
        self._num_made = 0

    def of_call(self, given: object) -> str:
        label = self._label(given) or self._made()
        self._open[label] = None
        return label

    def of_result(self, given: object) -> str:
        label = self._label(given) or next(iter(self._open), None) or self._made()
        self._open.pop(label, None)
        return label

    def _made(self) -> str:
        self._num_made += 1
        return f"past{self._num_made:05}"

    @staticmethod
    def _label(given: object) -> str:
        text = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
        if len(text) <= MAX_LABEL:
            return text
        return f"call_{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:24]}"


def call_name(given: object) -> str:
    return given[:MAX_LABEL] if isinstance(given, str) and given else "unknown"


def call_arguments(given: object, wrapped: int = MAX_WRAPPED) -> str:
    """Arguments of an earlier call as text: of a JSON object where they are one, in whatever wrapping; else as they
    were written."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return "{}"
    if not isinstance(given, str):
        return dumps(given).decode()
    try:
        value = loads(given.encode())
    except (InvalidJson, UnicodeEncodeError):
        return given
    if value is None or (isinstance(value, str) and wrapped):
        return call_arguments(value, wrapped - 1)
    return given


def is_object(arguments: str) -> bool:
    """Whether arguments are a JSON object as text, or an empty text, which stands for an empty one."""
    try:
        return not arguments.strip() or isinstance(loads(arguments.encode()), dict)
    except (InvalidJson, UnicodeEncodeError):
        return False


def held_text(part: object, depth: int = _MAX_DEPTH) -> str | None:
    """The text of a part of any kind; None where it holds something else, such as an image."""
    if isinstance(part, str):
        return part
    if not depth:
        return None
    if isinstance(part, list):
        texts = [held_text(item, depth - 1) for item in part]
        return "\n".join(text for text in texts if text is not None) if None not in texts else None
    if isinstance(part, dict):
        for name in _TEXTS:
            if isinstance(part.get(name), str | list):
                return held_text(part[name], depth - 1)
    return None


def text_part(part: object, kind: str = "text") -> object:
    """A part of a past content as one of this kind, if it holds text; else as it is, and as it is where its type is no
    text, which the checks refuse."""
    if isinstance(part, dict) and not isinstance(part.get("type"), str | None):
        return part
    if isinstance(part, dict) and "text" in part and part["text"] is None:
        part = {**part, "text": ""}
    text = held_text(part)
    if text is None:
        return part
    made: Json = {"type": kind, "text": text}
    if isinstance(part, dict) and part.get("type") in _TEXT_KINDS:
        made |= others(part, "type", *_TEXTS)
    return made


def others(given: Json, *known: str) -> Json:
    """The fields that are neither known nor labels, for the checks that follow."""
    return {name: value for name, value in given.items() if name not in known and name not in LABELS}


def as_json(part: Json) -> str | None:
    """A part of a kind that has no form here, such as the call of a server's own tool, as JSON without labels; None
    where it holds nothing else."""
    held = _unlabelled(part)
    return dumps(held).decode() if any(value for name, value in held.items() if name != "type") else None


def _unlabelled(given: Any) -> Any:
    if isinstance(given, list):
        return [_unlabelled(item) for item in given]
    if not isinstance(given, dict):
        return given
    return {
        name: _unlabelled(value)
        for name, value in given.items()
        if name not in LABELS and not name.startswith("encrypted_")
    }


def result_text(given: object, kind: str = "text") -> object:
    """The content of a past result: text, parts of this kind, or JSON as text."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list) and all(isinstance(part, dict) and "type" in part for part in given):
        return [text_part(part, kind) for part in given]
    return dumps(given).decode()


def mended(given: object) -> object:
    """The messages of a chat, with those of earlier turns mended."""
    if not isinstance(given, list):
        return given
    ids = CallIds()
    end = past_length(given, lambda turn: isinstance(turn, dict) and turn.get("role") == "assistant")
    return [
        turn if not isinstance(turn, dict) else _past(turn, ids) if place < end else _current(turn, ids)
        for place, turn in enumerate(given)
    ]


def _current(turn: Json, ids: CallIds) -> Json:
    """A result may have the long id of an earlier call."""
    given = turn.get("tool_call_id")
    return {**turn, "tool_call_id": ids.of_result(given)} if isinstance(given, str) and given else turn


def _past(turn: Json, ids: CallIds) -> Json:
    role, content = turn.get("role"), turn.get("content")
    if role == "assistant":
        return _answer(turn, ids)
    if role in ("tool", "function"):
        label = ids.of_result(turn.get("tool_call_id"))
        rest = others(turn, "role", "tool_call_id", "content", "name")
        return _named(turn, {"role": "tool", "tool_call_id": label, "content": result_text(content), **rest})
    return {**turn, "content": _content(content)}


def _content(given: object) -> object:
    """Content that is neither text nor parts as JSON."""
    if isinstance(given, list):
        return [text_part(part) for part in given]
    return given if isinstance(given, str) else "" if given is None else dumps(given).decode()


def _named(turn: Json, made: Json) -> Json:
    name = turn.get("name")
    return {**made, "name": name[:MAX_LABEL]} if isinstance(name, str) and name else made


def _answer(turn: Json, ids: CallIds) -> Json:
    """An earlier answer of the model. A refusal and the transcript of a spoken answer are its text."""
    content, thoughts = turn.get("content"), None
    said = _joined([turn.get("refusal"), turn.get("audio")])
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        thinks = [isinstance(kind, str) and kind in _THOUGHTS for kind in kinds]
        thoughts = _joined([part for part, does in zip(content, thinks, strict=True) if does])
        content = ["" if does else part for part, does in zip(content, thinks, strict=True)]
        content = [text_part(part) for part in ([*content, said] if said else content)]
    elif content is not None and not isinstance(content, str):
        content = _content(content)
    elif said and said != content:
        content = f"{content}\n{said}" if isinstance(content, str) and content else said
    found = (given if isinstance(given := turn.get(name), str) else _joined(given) for name in _REASONING)
    reasoning = next((text for text in found if text is not None), thoughts)
    calls, old = turn.get("tool_calls") or [], turn.get("function_call")
    calls = [call for call in calls if call is not None] if isinstance(calls, list) else calls
    if not calls and isinstance(old, dict) and "name" in old:
        calls = [{"function": old}]
    rest = others(
        turn, "role", "content", "name", "refusal", "audio", "function_call", "tool_calls", *_REASONING
    )
    made: Json = {"role": "assistant", "content": content, **rest}
    if calls:
        made["tool_calls"] = [_call(call, ids) for call in calls] if isinstance(calls, list) else calls
    elif content is None and reasoning is None:
        made["content"] = ""
    return _named(turn, made if reasoning is None else {**made, "reasoning": reasoning})


def _joined(parts: object) -> str | None:
    """The text of those parts that hold any, as their thinking too."""
    listed = parts if isinstance(parts, list) else [parts]
    texts = [held_text(part.get("thinking", part) if isinstance(part, dict) else part) for part in listed]
    return "\n".join(text for text in texts if text) or None


def _call(call: object, ids: CallIds) -> object:
    """A call in OpenAI's form, or with its fields at the top."""
    if not isinstance(call, dict):
        return call
    function = next((call[name] for name in ("function", "custom") if isinstance(call.get(name), dict)), call)
    field = next((name for name in _ARGUMENTS if name in function), "")
    rest = {} if function is call else others(function, "name", field)
    made = {"name": call_name(function.get("name")), "arguments": call_arguments(function.get(field)), **rest}
    rest = others(call, "type", "function", "custom", *(("name", field) if function is call else ()))
    return {"id": ids.of_call(call.get("id")), "type": "function", "function": made, **rest}
