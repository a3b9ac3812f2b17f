"""JSON from strangers: one object, every key once, no NaN, no number beyond 64 bits, bounded nesting."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

from loraplex.adapters.store.files import shown

_MAX_DIGITS = 18  # below 2**63, so that no size or offset computed from it can overflow anywhere


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse UTF-8 JSON that must be an object. The caller bounds the length of `raw` beforehand.

    Raises ValueError whose text is safe to show.
    """
    value = parse_value(raw)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def parse_value(raw: bytes) -> Any:
    """The same of any value."""
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_int=_bounded_int,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(shown(error, 160)) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object names the key '{twice[:80]}' twice")
    return result


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number is too large")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
