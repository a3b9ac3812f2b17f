"""Rules between fields as JSON Schema, for the OpenAPI document. Validators check them."""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]

LOGIT_BIAS: Rule = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
"""Numbers by token ids, which are JSON object keys and so come as strings."""


def where(condition: Rule, then: Rule, otherwise: Rule | None = None) -> Rule:
    """Where the fields of `condition` are there with such values, the others have to be as `then` says."""
    rule = {"if": {"properties": condition, "required": list(condition)}, "then": then}
    return rule if otherwise is None else rule | {"else": otherwise}


def needed(**values: Any) -> Rule:
    """These fields are there, with these schemas."""
    return {"properties": values, "required": list(values)}


_NOT_ASKED: Rule = {"enum": [False, None]}

_CONTENT: Rule = needed(content={"type": ["string", "array"]})
_SAID_OTHERWISE: Rule = {
    "anyOf": [
        needed(tool_calls={"type": "array", "minItems": 1}),
        needed(reasoning={"type": "string"}),
        needed(reasoning_content={"type": "string"}),
    ]
}
_NOT_SAID: Rule = {
    "properties": {
        "tool_calls": {"enum": [None, False, [], {}, "auto"]},
        "reasoning": {"type": "null"},
        "reasoning_content": {"type": "null"},
    }
}
WHAT_A_ROLE_SAYS = where(
    {"role": {"const": "assistant"}}, {"anyOf": [_CONTENT, _SAID_OTHERWISE]}, {"allOf": [_CONTENT, _NOT_SAID]}
)
CALL_OF_A_TOOL = where(
    {"role": {"const": "tool"}},
    needed(tool_call_id={"type": "string"}),
    {"properties": {"tool_call_id": {"type": "null"}}},
)
RUNNING_USAGE = where(
    {"continuous_usage_stats": {"const": True}}, {"properties": {"include_usage": {"enum": [True, None]}}}
)
USAGE_OF_STREAMS = where(
    {"stream": {"const": True}},
    {},
    {
        "properties": {
            "stream_options": {
                "properties": {"include_usage": _NOT_ASKED, "continuous_usage_stats": _NOT_ASKED}
            }
        }
    },
)
PROMPT_SCORES_ARE_WHOLE = where(
    {"prompt_logprobs": {"type": "integer"}}, {"properties": {"stream": _NOT_ASKED}}
)
NAMED_TOKENS_OF_CHATS = where({"logprob_token_ids": {"type": "array"}}, needed(logprobs={"const": True}))
NAMED_TOKENS_OF_TEXTS = where(
    {"logprob_token_ids": {"type": "array"}},
    {**needed(logprobs={"type": "integer"}), "not": needed(max_tokens={"const": 0})},
)
LIKELY_TOKENS = where({"top_logprobs": {"type": "integer", "minimum": 1}}, needed(logprobs={"const": True}))
CHOICE_AMONG_TOOLS = where(
    {"tool_choice": {"anyOf": [{"const": "required"}, {"type": "object", "minProperties": 1}]}},
    needed(tools={"type": "array", "minItems": 1}),
)
SCORED_ALONE = where({"max_tokens": {"const": 0}}, needed(echo={"const": True}))
SCHEMA_OF_THE_FORMAT = where(
    {"type": {"const": "json_schema"}},
    needed(json_schema={"type": "object"}),
    {"properties": {"json_schema": {"type": "null"}}},
)
ONE_STRUCTURE: Rule = {
    "oneOf": [
        needed(json={"type": ["object", "string"]}),
        needed(regex={"type": "string"}),
        needed(choice={"type": "array"}),
        needed(grammar={"type": "string"}),
        needed(json_object={"const": True}),
    ]
}
