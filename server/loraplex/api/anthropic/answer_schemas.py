"""JSON schemas of the answers of `/v1/messages`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from loraplex.api.anthropic.errors import TYPES

_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}


class CountedTokens(BaseModel):
    input_tokens: int


def _object(properties: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, **others}


_BLOCKS = [
    _object({"type": {"const": "text"}, "text": _STRING, "citations": {"type": "null"}}),
    _object({"type": {"const": "thinking"}, "thinking": _STRING, "signature": _STRING}),
    _object({"type": {"const": "tool_use"}, "id": _STRING, "name": _STRING, "input": {"type": "object"}}),
]
_REASONS = ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
_ERROR = _object(
    {"type": {"enum": sorted(set(TYPES.values()))}, "message": _STRING}, additionalProperties=False
)

MESSAGE_SCHEMAS: dict[str, dict[str, Any]] = {
    "MessagesError": _object(
        {"type": {"const": "error"}, "error": _ERROR, "request_id": _STRING}, additionalProperties=False
    ),
    "MessageAnswer": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": {"type": "array", "items": {"oneOf": _BLOCKS}},
            "stop_reason": {"enum": _REASONS},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
        }
    ),
}
