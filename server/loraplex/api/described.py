"""What JSON Schema can say, for the OpenAPI document, of the rules that lie between fields. Validators check them."""

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

CONTENT_IS_THERE = needed(content={"type": ["string", "array"]})
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
TOOLS_AS_CONTEXT = where({"tools": {"type": "array", "minItems": 1}}, needed(tool_choice={"const": "none"}))
SCORED_ALONE = where({"max_tokens": {"const": 0}}, needed(echo={"const": True}))
