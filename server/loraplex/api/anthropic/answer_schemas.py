"""JSON schemas of the answers of `/v1/messages`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from loraplex.api.anthropic.errors import TYPES
from loraplex.api.openai.answer_schemas import COUNT, STRING, list_schema, object_schema


class CountedTokens(BaseModel):
    input_tokens: int


_BLOCKS = [
    object_schema({"type": {"const": "text"}, "text": STRING, "citations": {"type": "null"}}),
    object_schema({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING}),
    object_schema({"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": {"type": "object"}}),
]
_REASONS = ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
_ERROR = object_schema(
    {"type": {"enum": sorted(set(TYPES.values()))}, "message": STRING}, additionalProperties=False
)

MESSAGE_SCHEMAS: dict[str, dict[str, Any]] = {
    "MessagesError": object_schema(
        {"type": {"const": "error"}, "error": _ERROR, "request_id": STRING}, additionalProperties=False
    ),
    "MessageAnswer": object_schema(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": list_schema({"oneOf": _BLOCKS}),
            "stop_reason": {"enum": _REASONS},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": object_schema(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "output_tokens": COUNT,
                }
            ),
        }
    ),
}
