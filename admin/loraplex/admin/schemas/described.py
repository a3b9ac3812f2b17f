"""JSON Schema of rules that `loraplex.control` checks, for the OpenAPI document.

Patterns are in the subset that JavaScript, Rust and Python read alike.
"""

from __future__ import annotations

from typing import Any

from loraplex.control.adapter_tags import MAX_TAGS
from loraplex.control.rules import UNPRINTED
from loraplex.control.types import ADAPTER_LIMITS
from loraplex.control.usage.columns import GROUPS

PLAIN_TEXT = f"^[^{UNPRINTED}]*$"
TENANT_ID = "^[a-z0-9][a-z0-9-]{0,62}$"
VERSION = "^v[1-9][0-9]{0,8}$"
AUDIT_ANCHOR = "^[0-9]{1,18}:[0-9a-f]{64}$"
KEY_ID = "^[0-9a-f]{16}$"
ADAPTER_NAME = "^[a-z0-9][a-z0-9._-]{0,62}$"
TAG = "^[a-z0-9._-]{1,32}$"
NAME_PART = "^[a-z0-9._-]{1,63}$"
CURSOR = {
    "pattern": "^[A-Za-z0-9_-]*={0,2}$",
    "description": "The `next_cursor` of the page before. Only what this list gave is taken.",
}
SOME_WEIGHT = {"contains": {"properties": {"weight": {"minimum": 1}}}}
GROUP_BY = {
    "type": "array",
    "items": {"enum": list(GROUPS)},
    "uniqueItems": True,
    "minItems": 1,
    "description": "What the sums are grouped by.",
}

TAG_LIST = {
    "type": "array",
    "items": {"type": "string", "pattern": TAG},
    "uniqueItems": True,
    "minItems": 1,
    "maxItems": MAX_TAGS,
    "description": "Tags that the adapter gets beside those that it has.",
}


def budget_with_period(schema: dict[str, Any]) -> None:
    """Both or neither, where limits are given as a whole."""
    neither = {"token_budget": {"type": "null"}, "budget_period": {"type": "null"}}
    both = {"token_budget": {"type": "integer"}, "budget_period": {"type": "string"}}
    schema["anyOf"] = [{"properties": neither}, {"properties": both, "required": list(both)}]


def whole_or_changes(schema: dict[str, Any]) -> None:
    """Tags are given as a whole, or as those to add and to remove."""
    changes = {"anyOf": [{"required": ["add"]}, {"required": ["remove"]}]}
    schema["oneOf"] = [{"required": ["tags"], "not": changes}, {"not": {"required": ["tags"]}, **changes}]


def no_adapters(schema: dict[str, Any]) -> None:
    """A key has no limits on adapters: only null is allowed."""
    for name in ADAPTER_LIMITS:
        schema["properties"][name] = {"type": "null", "default": None}


def new_key_limits(schema: dict[str, Any]) -> None:
    budget_with_period(schema)
    no_adapters(schema)
