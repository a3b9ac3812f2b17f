"""JSON in and out. In: strict, bounded in depth and in the size of numbers. Out: compact UTF-8."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic_core import from_json


class InvalidJson(ValueError):
    """The text is not JSON as RFC 8259 has it (NaN, Infinity and lone surrogates are not), or is nested deeper
    than 200 levels, or holds a number of more than about 4,300 digits."""


def loads(data: bytes) -> Any:
    """Raises InvalidJson. Of a key that stands twice the last one counts."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJson(str(error)) from None


def dumps(value: Any) -> bytes:
    return msgspec.json.encode(value)
