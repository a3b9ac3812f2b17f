"""JSON schemas of generated answers and of errors, for the OpenAPI document. Their bytes are written without a model,
which would cost each answer time; tests hold real answers against the schemas."""

from __future__ import annotations

from typing import Any

from loraplex.api.errors import ANSWERS

STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
_LOGPROB = {"type": "number", "maximum": 0}
_BYTES = {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 255}}
_FINISH = {"enum": ["stop", "length"]}


def object_schema(
    properties: dict[str, Any], maybe: dict[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """An object that has all of `properties`, and those of `maybe` where they are asked for."""
    all_properties = {**properties, **(maybe or {})}
    return {"type": "object", "required": list(properties), "properties": all_properties, **others}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def list_schema(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _maybe(name: str) -> dict[str, Any]:
    return {"anyOf": [_ref(name), {"type": "null"}]}


def _answer(kind: str, choice: str, maybe: dict[str, Any] | None = None) -> dict[str, Any]:
    return object_schema(
        {
            "id": STRING,
            "object": {"const": kind},
            "created": COUNT,
            "model": STRING,
            "system_fingerprint": STRING,
            "choices": list_schema(_ref(choice)),
            "usage": _ref("Usage"),
        },
        maybe,
    )


_TOKENS = list_schema(COUNT)
_NUMBER = {"type": "number"}
_LABELLED = {"label": STRING, "probs": list_schema(_NUMBER)}
_LISTED = {
    "id": STRING,
    "object": {"const": "list"},
    "created": COUNT,
    "model": STRING,
    "usage": object_schema(
        {
            "prompt_tokens": COUNT,
            "total_tokens": COUNT,
            "completion_tokens": {"const": 0},
            "prompt_tokens_details": object_schema({"cached_tokens": COUNT}),
        }
    ),
}
_PROMPT_LOGPROBS = {
    "type": ["object", "null"],
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": object_schema(
        {"logprob": _LOGPROB, "rank": {"type": "integer", "minimum": 1}, "decoded_token": STRING}
    ),
}
_OF_PROMPT = {"prompt_token_ids": _TOKENS, "prompt_logprobs": list_schema(_PROMPT_LOGPROBS)}
_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
_DECIDED = {
    "choice_probabilities": list_schema(
        object_schema(
            {
                "choice": STRING,
                "token_ids": _TOKENS,
                "logprob": _LOGPROB,
                "raw_probability": _PROBABILITY,
                "probability": _PROBABILITY,
            }
        )
    )
}

ANSWER_SCHEMAS: dict[str, dict[str, Any]] = {
    "Error": object_schema(
        {
            "error": object_schema(
                {
                    "message": STRING,
                    "type": {"enum": sorted({kind for _, kind in ANSWERS.values()})},
                    "param": {"type": ["string", "null"]},
                    "code": {"enum": sorted(ANSWERS)},
                },
                additionalProperties=False,
            )
        },
        additionalProperties=False,
    ),
    "Usage": object_schema(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": object_schema({"cached_tokens": COUNT}),
        },
        {"completion_tokens_details": object_schema({"reasoning_tokens": COUNT})},
    ),
    "ChatChoice": object_schema(
        {
            "index": COUNT,
            "message": object_schema(
                {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}},
                {
                    "reasoning_content": STRING,
                    "reasoning": STRING,
                    "tool_calls": list_schema(_ref("ToolCallOfAnswer")) | {"minItems": 1},
                },
            ),
            "logprobs": _maybe("ChatLogprobs"),
            "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        },
        {"token_ids": _TOKENS, **_DECIDED},
    ),
    "ToolCallOfAnswer": object_schema(
        {
            "id": STRING,
            "type": {"const": "function"},
            "function": object_schema({"name": STRING, "arguments": STRING}),
        }
    ),
    "CompletionChoice": object_schema(
        {
            "index": COUNT,
            "text": STRING,
            "logprobs": _maybe("CompletionLogprobs"),
            "finish_reason": _FINISH,
        },
        {"token_ids": _TOKENS, **_DECIDED, **_OF_PROMPT},
    ),
    "LikelyToken": object_schema({"token": STRING, "logprob": _LOGPROB, "bytes": _BYTES}),
    "ChatLogprobs": object_schema(
        {
            "content": list_schema(
                object_schema(
                    {
                        "token": STRING,
                        "logprob": _LOGPROB,
                        "bytes": _BYTES,
                        "top_logprobs": list_schema(_ref("LikelyToken")),
                    }
                )
            ),
            "refusal": {"type": "null"},
        }
    ),
    "CompletionLogprobs": object_schema(
        {
            "tokens": list_schema(STRING),
            "token_logprobs": list_schema({"anyOf": [_LOGPROB, {"type": "null"}]}),
            "top_logprobs": list_schema(
                {"type": ["object", "null"], "additionalProperties": _LOGPROB},
            ),
            "text_offset": list_schema(COUNT),
        }
    ),
    "EmbeddingList": object_schema(
        {
            "object": {"const": "list"},
            "data": list_schema(_ref("Embedding")),
            "model": STRING,
            "usage": object_schema({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Embedding": object_schema(
        {
            "object": {"const": "embedding"},
            "index": COUNT,
            "embedding": {
                "anyOf": [list_schema({"type": "number"}), {"type": "string", "contentEncoding": "base64"}]
            },
        }
    ),
    "Classification": object_schema(_LISTED | {"data": list_schema(_ref("Classified"))}),
    "Classified": {
        "anyOf": [
            object_schema({"index": COUNT, **_LABELLED, "num_classes": COUNT}),
            object_schema(
                {
                    "index": COUNT,
                    "tokens": list_schema(object_schema({"token_id": COUNT, **_LABELLED})),
                    "num_classes": COUNT,
                }
            ),
        ]
    },
    "Scores": object_schema(
        _LISTED
        | {
            "data": list_schema(
                object_schema({"index": COUNT, "object": {"const": "score"}, "score": _NUMBER})
            )
        }
    ),
    "Reranking": object_schema(
        {
            "id": STRING,
            "object": {"const": "list"},
            "model": STRING,
            "results": list_schema(
                object_schema(
                    {"index": COUNT, "relevance_score": _NUMBER},
                    {"document": object_schema({"text": STRING})},
                )
            ),
            "usage": object_schema({"prompt_tokens": COUNT, "total_tokens": COUNT}),
            "meta": object_schema({"tokens": object_schema({"input_tokens": COUNT, "output_tokens": COUNT})}),
        }
    ),
    "ChatCompletion": _answer("chat.completion", "ChatChoice", _OF_PROMPT),
    "Completion": _answer("text_completion", "CompletionChoice"),
}
