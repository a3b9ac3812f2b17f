"""JSON schemas of the answers of `/v1/responses` and `/v1/responses/compact`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from loraplex.api.openai.answer_schemas import COUNT, STRING, list_schema, object_schema

_MAYBE_STRING = {"type": ["string", "null"]}
_MAYBE_COUNT = {"type": ["integer", "null"], "minimum": 0}
_STATUS = {"enum": ["in_progress", "completed", "incomplete"]}


_OUTPUT_TEXT = object_schema(
    {
        "type": {"const": "output_text"},
        "text": STRING,
        "annotations": {"type": "array", "maxItems": 0},
        "logprobs": list_schema({"type": "object"}),
    }
)
_ITEMS = [
    object_schema(
        {
            "type": {"const": "message"},
            "id": STRING,
            "status": _STATUS,
            "role": {"const": "assistant"},
            "content": list_schema(_OUTPUT_TEXT),
        }
    ),
    object_schema(
        {
            "type": {"const": "reasoning"},
            "id": STRING,
            "status": _STATUS,
            "summary": {"type": "array", "maxItems": 0},
            "content": list_schema(object_schema({"type": {"const": "reasoning_text"}, "text": STRING})),
            "encrypted_content": _MAYBE_STRING,
        }
    ),
    object_schema(
        {
            "type": {"const": "function_call"},
            "id": STRING,
            "status": _STATUS,
            "call_id": STRING,
            "name": STRING,
            "arguments": STRING,
        }
    ),
]
_USAGE = object_schema(
    {
        "input_tokens": COUNT,
        "input_tokens_details": object_schema({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": object_schema({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)

_KEPT = object_schema(
    {
        "type": {"const": "message"},
        "id": STRING,
        "status": {"const": "completed"},
        "role": {"enum": ["system", "developer"]},
        "content": list_schema(object_schema({"type": {"const": "input_text"}, "text": STRING})),
    }
)
_INCOMPLETE = {"anyOf": [object_schema({"reason": {"const": "max_output_tokens"}}), {"type": "null"}]}
_COMPACTION = object_schema({"type": {"const": "compaction"}, "id": STRING, "encrypted_content": STRING})

RESPONSE_SCHEMAS: dict[str, dict[str, Any]] = {
    "CompactedResponse": object_schema(
        {
            "id": STRING,
            "object": {"const": "response.compaction"},
            "created_at": COUNT,
            "incomplete_details": _INCOMPLETE,
            "output": list_schema({"oneOf": [_KEPT, _COMPACTION]}),
            "usage": _USAGE,
        }
    ),
    "Response": object_schema(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": COUNT,
            "completed_at": _MAYBE_COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": STRING,
            "error": {"type": "null"},
            "incomplete_details": _INCOMPLETE,
            "output": list_schema({"oneOf": _ITEMS}),
            "usage": _USAGE,
            "instructions": _MAYBE_STRING,
            "tools": list_schema({"type": "object"}),
            "tool_choice": {"type": ["string", "object"]},
            "parallel_tool_calls": {"type": "boolean"},
            "max_output_tokens": _MAYBE_COUNT,
            "max_tool_calls": _MAYBE_COUNT,
            "temperature": {"type": "number"},
            "top_p": {"type": "number"},
            "top_logprobs": COUNT,
            "presence_penalty": {"type": "number"},
            "frequency_penalty": {"type": "number"},
            "text": object_schema({"format": {"type": "object"}}),
            "reasoning": object_schema({"effort": _MAYBE_STRING, "summary": {"type": "null"}}),
            "truncation": {"const": "disabled"},
            "store": {"const": False},
            "background": {"const": False},
            "previous_response_id": {"type": "null"},
            "service_tier": STRING,
            "metadata": {"type": "object", "additionalProperties": STRING},
            "user": _MAYBE_STRING,
            "safety_identifier": _MAYBE_STRING,
            "prompt_cache_key": _MAYBE_STRING,
        }
    ),
}
