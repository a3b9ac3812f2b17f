"""Values that a user typed, checked before a server is asked: what is wrong is said of the option that it came from."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from typing import Any

from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.control.release_types import MAX_RELEASE_WEIGHT
from loraplex.control.types import ADAPTER_LIMITS, BUDGET_PERIODS, SCOPES, Limits
from loraplex.http.text import did_you_mean

LIMITS = tuple(field.name for field in dataclasses.fields(Limits))
KEY_LIMITS = tuple(name for name in LIMITS if name not in ADAPTER_LIMITS)
_VERSION = re.compile(r"v[1-9][0-9]{0,8}")


def parse_limits(given: list[str] | None, *, of_key: bool = False) -> dict[str, Any]:
    """`requests_per_minute=600` and the like; `none` takes a limit away. Raises CommandFailed."""
    known = KEY_LIMITS if of_key else LIMITS
    limits: dict[str, Any] = {}
    for item in given or []:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise CommandFailed(f"--limit '{item}': write it as NAME=VALUE, such as requests_per_minute=600.")
        name = name.replace("-", "_")
        if name not in known:
            reason = (
                f"a key has no limit '{name}', only a tenant has"
                if name in LIMITS
                else f"there is no limit '{name}'{did_you_mean(name, known)}"
            )
            raise CommandFailed(f"--limit '{item}': {reason}; there are {', '.join(known)}.")
        limits[name] = _limit(item, name, value)
    return limits


def _limit(item: str, name: str, value: str) -> int | str | None:
    if value.lower() in ("none", "null"):
        return None
    if name == "budget_period":
        if value not in BUDGET_PERIODS:
            raise CommandFailed(f"--limit '{item}': a period is one of {', '.join(BUDGET_PERIODS)}.")
        return value
    if not (value.isascii() and value.isdecimal()):
        raise CommandFailed(f"--limit '{item}': {name} is a whole number above 0, or none.")
    return int(value)


ALL_SCOPES = "all"


def check_scopes(given: list[str] | None) -> list[str] | None:
    """`all` stands for every scope. Raises CommandFailed."""
    for scope in given or []:
        if scope not in (*SCOPES, ALL_SCOPES):
            raise CommandFailed(
                f"--scope '{scope}': there is no such scope{did_you_mean(scope, SCOPES)}; "
                f"there are {', '.join(SCOPES)}, and {ALL_SCOPES}."
            )
    return list(SCOPES) if ALL_SCOPES in (given or []) else given


def parse_time(option: str, given: str | None) -> str | None:
    """RFC 3339; a day stands for its midnight in UTC. Raises CommandFailed."""
    if given is None:
        return None
    given.encode()  # input that is not UTF-8 is reported
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        time = None
    if time is not None and re.fullmatch(r"\d{4}-\d{2}-\d{2}", given):
        time = time.replace(tzinfo=UTC)
    if time is None or time.tzinfo is None:
        raise CommandFailed(
            f"{option} '{given}': write a day, such as 2030-01-31, or a time with its zone, such as "
            "2030-01-31T18:00:00Z."
        )
    return time.isoformat().replace("+00:00", "Z")


def check_version(given: str) -> str:
    """`v3`. Raises CommandFailed."""
    if not _VERSION.fullmatch(given):
        raise CommandFailed(f"'{given}' is no version; versions are named v1, v2, and so on.")
    return given


def parse_targets(given: list[str]) -> list[dict[str, Any]]:
    """A release's targets, all of them with a weight or none. Raises CommandFailed."""
    targets = [parse_target(item) for item in given]
    bare = [item for item in given if "=" not in item]
    if bare and len(bare) < len(given):
        raise CommandFailed(
            f"'{bare[0]}' has no weight and others have one: write {bare[0]}=WEIGHT, or give no version a weight."
        )
    return targets


def parse_target(given: str) -> dict[str, Any]:
    """A release's target from `v1=90`; without a weight it is 1. Raises CommandFailed."""
    version, equals, weight = given.partition("=")
    if not _VERSION.fullmatch(version) or (equals and not re.fullmatch(r"[0-9]{1,99}", weight)):
        raise CommandFailed(
            f"'{given}': write a target as VERSION=WEIGHT, such as v1=90; weights are whole numbers."
        )
    number = int(weight or 1)
    if number > MAX_RELEASE_WEIGHT:
        raise CommandFailed(f"'{given}': a weight is at most {MAX_RELEASE_WEIGHT}.")
    return {"version": version, "weight": number}
