"""A release's guard, schedule and shadow as options of `loraplex release set`."""

from __future__ import annotations

import re
from typing import Any

from loraplex.app.commands.shared.errors import CommandFailed
from loraplex.app.commands.shared.values import check_version
from loraplex.http.text import did_you_mean

GUARD_FIELDS = ("max_false_alarm", "min_requests")
DEFAULT = "default"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,18})?")


def parse_guard(given: str) -> dict[str, Any]:
    """A guard from `error_rate=0.01,ttft,min_requests=50`: a metric with or without its margin, or a field of
    `GUARD_FIELDS`; `default` is every metric with its margin. The server knows the margins. Raises CommandFailed."""
    # It takes time to import, which no other command pays.
    from loraplex.lifecycle.release_guard.rules import METRICS

    known = (*METRICS, *GUARD_FIELDS)
    guard: dict[str, Any] = {}
    for item in [] if given == DEFAULT else given.split(","):
        name, equals, value = item.partition("=")
        if not re.fullmatch(r"[a-z_]{1,40}", name) or (equals and not _DECIMAL.fullmatch(value)):
            raise CommandFailed(
                f"--guard '{item}': write a metric as NAME or NAME=MARGIN, such as error_rate=0.01, with commas "
                f"between them; '{DEFAULT}' alone is every metric."
            )
        if name not in known:
            raise CommandFailed(
                f"--guard '{item}': there is no metric '{name}'{did_you_mean(name, known)}; "
                f"there are {', '.join(METRICS)}, and the fields {', '.join(GUARD_FIELDS)}."
            )
        if name in GUARD_FIELDS:
            if not equals:
                raise CommandFailed(f"--guard '{item}': {name} needs a number, such as {name}=0.01.")
            guard[name] = _number(value)
        else:
            guard.setdefault("metrics", []).append(
                {"name": name} | ({"margin": _number(value)} if equals else {})
            )
    return guard


def parse_schedule(given: str) -> list[dict[str, int]]:
    """Steps from `1%:10m,10%:1h`. Raises CommandFailed."""
    steps = []
    for item in given.split(","):
        found = re.fullmatch(r"([0-9]{1,9})%?:([0-9]{1,9})([smhd])", item)
        if found is None:
            raise CommandFailed(
                f"--schedule '{item}': write a step as PERCENT:TIME, such as 10%:1h, with commas between steps; a "
                "time is a number with s, m, h or d."
            )
        steps.append({"weight": int(found[1]), "for_seconds": int(found[2]) * _SECONDS[found[3]]})
    return steps


def parse_shadow(given: str) -> dict[str, Any]:
    """A shadow from `v3:0.1`, or `v3:0.1:keep_texts`, which keeps both answers; `texts` is its older name. Raises
    CommandFailed."""
    version, _, rest = given.partition(":")
    sample, colon, texts = rest.partition(":")
    if not _DECIMAL.fullmatch(sample) or (colon and texts not in ("keep_texts", "texts")):
        raise CommandFailed(
            f"--shadow '{given}': write it as VERSION:SAMPLE, such as v3:0.1, and VERSION:SAMPLE:keep_texts to keep "
            "the texts."
        )
    return {"version": check_version(version), "sample": _number(sample), "keep_texts": bool(colon)}


def seconds_text(seconds: float) -> str:
    """A time as a schedule's step has it, such as `90s` or `1h`."""
    whole = max(0, round(seconds))
    unit = next((unit for unit in "dhm" if whole and whole % _SECONDS[unit] == 0), "s")
    return f"{whole // _SECONDS[unit]}{unit}"


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
