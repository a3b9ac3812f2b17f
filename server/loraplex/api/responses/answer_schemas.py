"""JSON schemas of the answers of `/v1/responses` and `/v1/responses/compact`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string"}
_MAYBE_STRING = {"type": ["string", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_MAYBE_COUNT = {"type": ["integer", "null"], "minimum": 0}
_STATUS = {"enum": ["in_progress", "completed", "incomplete"]}


def _object(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, **others}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_OUTPUT_TEXT = _object(
    {
        "type": {"const": "output_text"},
        "text": _STRING,
        "annotations": {"type": "array", "maxItems": 0},
        "logprobs": _list({"type": "object"}),
    }
)
_ITEMS = [
    _object(
        {
            "type": {"const": "message"},
            "id": _STRING,
            "status": _STATUS,
            "role": {"const": "assistant"},
            "content": _list(_OUTPUT_TEXT),
        }
    ),
    _object(
        {
            "type": {"const": "reasoning"},
            "id": _STRING,
            "status": _STATUS,
            "summary": {"type": "array", "maxItems": 0},
            "content": _list(_object({"type": {"const": "reasoning_text"}, "text": _STRING})),
            "encrypted_content": _MAYBE_STRING,
        }
    ),
    _object(
        {
            "type": {"const": "function_call"},
            "id": _STRING,
            "status": _STATUS,
            "call_id": _STRING,
            "name": _STRING,
            "arguments": _STRING,
        }
    ),
]
_USAGE = _object(
    {
        "input_tokens": _COUNT,
        "input_tokens_details": _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
        "output_tokens": _COUNT,
        "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
        "total_tokens": _COUNT,
    }
)

_KEPT = _object(
    {
        "type": {"const": "message"},
        "id": _STRING,
        "status": {"const": "completed"},
        "role": {"enum": ["system", "developer"]},
        "content": _list(_object({"type": {"const": "input_text"}, "text": _STRING})),
    }
)
_INCOMPLETE = {"anyOf": [_object({"reason": {"const": "max_output_tokens"}}), {"type": "null"}]}
_COMPACTION = _object({"type": {"const": "compaction"}, "id": _STRING, "encrypted_content": _STRING})

RESPONSE_SCHEMAS: dict[str, dict[str, Any]] = {
    "CompactedResponse": _object(
        {
            "id": _STRING,
            "object": {"const": "response.compaction"},
            "created_at": _COUNT,
            "incomplete_details": _INCOMPLETE,
            "output": _list({"oneOf": [_KEPT, _COMPACTION]}),
            "usage": _USAGE,
        }
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "completed_at": _MAYBE_COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _STRING,
            "error": {"type": "null"},
            "incomplete_details": _INCOMPLETE,
            "output": _list({"oneOf": _ITEMS}),
            "usage": _USAGE,
            "instructions": _MAYBE_STRING,
            "tools": _list({"type": "object"}),
            "tool_choice": {"type": ["string", "object"]},
            "parallel_tool_calls": {"type": "boolean"},
            "max_output_tokens": _MAYBE_COUNT,
            "max_tool_calls": _MAYBE_COUNT,
            "temperature": {"type": "number"},
            "top_p": {"type": "number"},
            "top_logprobs": _COUNT,
            "presence_penalty": {"type": "number"},
            "frequency_penalty": {"type": "number"},
            "text": _object({"format": {"type": "object"}}),
            "reasoning": _object({"effort": _MAYBE_STRING, "summary": {"type": "null"}}),
            "truncation": {"const": "disabled"},
            "store": {"const": False},
            "background": {"const": False},
            "previous_response_id": {"type": "null"},
            "service_tier": _STRING,
            "metadata": {"type": "object", "additionalProperties": _STRING},
            "user": _MAYBE_STRING,
            "safety_identifier": _MAYBE_STRING,
            "prompt_cache_key": _MAYBE_STRING,
        }
    ),
}
