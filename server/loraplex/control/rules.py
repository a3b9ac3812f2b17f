"""Checks and small conversions that every part of the control plane shares."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from loraplex.control.errors import ControlError, InvalidValue
from loraplex.control.types import BUDGET_PERIODS, NO_LIMITS, Limits, Page

T = TypeVar("T")
R = TypeVar("R")

MAX_PAGE = 500
DEFAULT_PAGE = 100
MAX_LIMIT = 2**53
MAX_WEIGHT = 1000.0
MIN_WEIGHT = 0.001
UNPRINTED = (
    r"\u0000-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e"
    r"\u2060-\u2069\ufeff\ufff9-\ufffb"
)
"""A class of a regular expression: control characters, and those that are not seen and change how other text reads (its
direction, its lines). No text that people give to things has them."""
_UNPRINTED = re.compile(rf"[{UNPRINTED}\ud800-\udfff]")
_LOWER = frozenset("abcdefghijklmnopqrstuvwxyz0123456789")


class InvalidCursor(ControlError):
    code = "invalid_cursor"


def check_tenant_id(value: str) -> str:
    """`[a-z0-9][a-z0-9-]{0,62}`."""
    if not 1 <= len(value) <= 63 or value[0] not in _LOWER or not (_LOWER | {"-"}).issuperset(value):
        raise InvalidValue(
            "A tenant's id is 1 to 63 of a-z, 0-9 and '-', and begins with a letter or digit.", param="id"
        )
    return value


def is_adapter_name(value: str) -> bool:
    """`[a-z0-9][a-z0-9._-]{0,62}`."""
    return 1 <= len(value) <= 63 and value[0] in _LOWER and (_LOWER | set("._-")).issuperset(value)


def check_adapter_name(value: str) -> str:
    if not is_adapter_name(value):
        raise InvalidValue(
            "An adapter's name is 1 to 63 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit.",
            param="name",
        )
    return value


def check_text(value: str | None, param: str, longest: int = 200) -> str | None:
    if value is not None and (len(value) > longest or not is_plain_text(value)):
        raise InvalidValue(f"'{param}' is at most {longest} printable characters.", param=param)
    return value


def is_plain_text(value: str) -> bool:
    """Whether it has neither control characters nor other invisible ones that change how text reads."""
    return _UNPRINTED.search(value) is None


def check_weight(value: float) -> float:
    # NaN is in no range, and an int of any length can be compared with one.
    if isinstance(value, bool) or not MIN_WEIGHT <= value <= MAX_WEIGHT:
        raise InvalidValue(f"'weight' is a number from {MIN_WEIGHT} to {MAX_WEIGHT:g}.", param="weight")
    return float(value)


def read_limits(given: Mapping[str, Any] | None) -> Limits:
    """Limits from what a client sent or the database holds. Raises InvalidValue for what is not known or not
    enforced: a limit that is accepted is a limit that holds."""
    if not given:
        return NO_LIMITS
    known = {field.name for field in dataclasses.fields(Limits)}
    for name, value in given.items():
        if name == "budget_period":
            _check_period(value, given.get("token_budget"))
            continue
        if name not in known:
            raise InvalidValue(
                f"There is no limit '{name[:60]}'; known: {', '.join(sorted(known))}.", param="limits"
            )
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_LIMIT
        ):
            raise InvalidValue(f"limits.{name} is a whole number above 0, or null.", param=f"limits.{name}")
    if given.get("token_budget") is not None and given.get("budget_period") is None:
        raise InvalidValue(
            f"limits.token_budget needs limits.budget_period: {', '.join(BUDGET_PERIODS)}.",
            param="limits.budget_period",
        )
    reserved, most = given.get("device_bytes_reserved"), given.get("device_bytes_max")
    if reserved is not None and most is not None and reserved > most:
        raise InvalidValue(
            f"limits.device_bytes_reserved is at most limits.device_bytes_max, {most}.",
            param="limits.device_bytes_reserved",
        )
    return Limits(**given)


def change_limits(current: Mapping[str, Any], changes: Mapping[str, Any] | None) -> Limits:
    """Only the limits that are named change; null takes one away, and with a budget its period. Raises InvalidValue."""
    if changes is None:
        return NO_LIMITS
    merged = {**current, **changes}
    if merged.get("token_budget") is None and "budget_period" not in changes:
        merged["budget_period"] = None
    return read_limits(merged)


def limits_as_dict(limits: Limits) -> dict[str, Any]:
    return dataclasses.asdict(limits)


def _check_period(period: Any, budget: Any) -> None:
    if period is None:
        return
    if period not in BUDGET_PERIODS:
        raise InvalidValue(
            f"limits.budget_period is one of {', '.join(BUDGET_PERIODS)}.", param="limits.budget_period"
        )
    if budget is None:
        raise InvalidValue(
            "limits.budget_period needs limits.token_budget, the tokens that may be used in it.",
            param="limits.token_budget",
        )


def read_cursor(cursor: str | None) -> str | None:
    """The key that a cursor stands for: the last one of the page before."""
    if cursor is None:
        return None
    try:
        after = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
        if not after.isprintable():
            # No name has them, and not every database takes them.
            raise ValueError("control characters")
    except (ValueError, binascii.Error) as error:
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor") from error
    return after


def check_page_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidValue(f"'limit' is from 1 to {MAX_PAGE}.", param="limit")
    return limit


def make_page(rows: Sequence[T], limit: int, key: Callable[[T], str], convert: Callable[[T], R]) -> Page[R]:
    """A page from up to limit + 1 rows: the extra one only shows that there are more."""
    cursor = None
    if len(rows) > limit:
        rows = rows[:limit]
        cursor = base64.urlsafe_b64encode(key(rows[-1]).encode()).decode()
    return Page(tuple(convert(row) for row in rows), cursor)
