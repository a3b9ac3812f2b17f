"""JSON schemas of generated answers and of errors, for the OpenAPI document. Their bytes are written without a model,
which would cost each answer time; tests hold real answers against the schemas."""

from __future__ import annotations

from typing import Any

from loraplex.api.errors import ANSWERS

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_LOGPROB = {"type": "number", "maximum": 0}
_BYTES = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_FINISH = {"enum": ["stop", "length"]}


_TOKENS = {"type": "array", "items": _COUNT}


def _object(properties: dict[str, Any], maybe: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """An object that has all of `properties`, and those of `maybe` where they are asked for."""
    all_properties = {**properties, **(maybe or {})}
    return {"type": "object", "required": list(properties), "properties": all_properties, **others}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _maybe(name: str) -> dict[str, Any]:
    return {"anyOf": [_ref(name), {"type": "null"}]}


def _answer(kind: str, choice: str, maybe: dict[str, Any] | None = None) -> dict[str, Any]:
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": _list(_ref(choice)),
            "usage": _ref("Usage"),
        },
        maybe,
    )


_PROMPT_LOGPROBS = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": _object(
        {"logprob": _LOGPROB, "rank": {"type": "integer", "minimum": 1}, "decoded_token": _STRING}
    ),
}
_OF_PROMPT = {"prompt_token_ids": _TOKENS, "prompt_logprobs": _list(_PROMPT_LOGPROBS)}

ANSWER_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": {"enum": sorted({kind for _, kind in ANSWERS.values()})},
                    "param": {"type": ["string", "null"]},
                    "code": {"enum": sorted(ANSWERS)},
                },
                additionalProperties=False,
            )
        },
        additionalProperties=False,
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        },
        {"completion_tokens_details": _object({"reasoning_tokens": _COUNT})},
    ),
    "ChatChoice": _object(
        {
            "index": _COUNT,
            "message": _object(
                {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
                {
                    "reasoning_content": _STRING,
                    "reasoning": _STRING,
                    "tool_calls": _list(_ref("ToolCallOfAnswer")) | {"minItems": 1},
                },
            ),
            "logprobs": _maybe("ChatLogprobs"),
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        },
        {"token_ids": _TOKENS},
    ),
    "ToolCallOfAnswer": _object(
        {
            "id": _STRING,
            "type": {"const": "function"},
            "function": _object({"name": _STRING, "arguments": _STRING}),
        }
    ),
    "CompletionChoice": _object(
        {
            "index": _COUNT,
            "text": _STRING,
            "logprobs": _maybe("CompletionLogprobs"),
            "finish_reason": _FINISH,
        },
        {"token_ids": _TOKENS, **_OF_PROMPT},
    ),
    "LikelyToken": _object({"token": _STRING, "logprob": _LOGPROB, "bytes": _BYTES}),
    "ChatLogprobs": _object(
        {
            "content": _list(
                _object(
                    {
                        "token": _STRING,
                        "logprob": _LOGPROB,
                        "bytes": _BYTES,
                        "top_logprobs": _list(_ref("LikelyToken")),
                    }
                )
            ),
            "refusal": {"type": "null"},
        }
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_STRING),
            "token_logprobs": _list({"anyOf": [_LOGPROB, {"type": "null"}]}),
            "top_logprobs": _list(
                {"type": ["object", "null"], "additionalProperties": _LOGPROB},
            ),
            "text_offset": _list(_COUNT),
        }
    ),
    "EmbeddingList": _object(
        {
            "object": {"const": "list"},
            "data": _list(_ref("Embedding")),
            "model": _STRING,
            "usage": _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT}),
        }
    ),
    "Embedding": _object(
        {
            "object": {"const": "embedding"},
            "index": _COUNT,
            "embedding": {
                "anyOf": [_list({"type": "number"}), {"type": "string", "contentEncoding": "base64"}]
            },
        }
    ),
    "ChatCompletion": _answer("chat.completion", "ChatChoice", _OF_PROMPT),
    "Completion": _answer("text_completion", "CompletionChoice"),
}
