"""Reads a dashboard's JSON again: its panels, their queries, and the values that Grafana would fill in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LabelValues = Callable[[str, str], Sequence[str]]
"""Prometheus' values of a label (the first argument) of the series that a selector matches."""


@dataclass(frozen=True)
class ShownPanel:
    """A panel of a dashboard; `targets` are pairs of expression and legend."""

    board: str
    title: str
    plain: Mapping[str, Any]
    targets: Sequence[tuple[str, str]]


def read_board(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def panels(board: Mapping[str, Any]) -> Iterator[ShownPanel]:
    """Every panel that asks something, in its order."""
    for panel in board["panels"]:
        if panel["type"] != "row":
            targets = [(target["expr"], target["legendFormat"]) for target in panel["targets"]]
            yield ShownPanel(board["title"], panel["title"], panel, targets)


def choices(board: Mapping[str, Any], chosen: Mapping[str, str], label_values: LabelValues) -> dict[str, str]:
    """The value of each variable: one of `chosen` where Prometheus has it, everything where several may be taken.
    Raises LookupError where a variable has no such value."""
    values: dict[str, str] = {}
    for variable in board["templating"]["list"]:
        if variable["type"] == "datasource":
            continue
        name = variable["name"]
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert asked is not None, variable["query"]
        found = set(label_values(asked[2], fill_in(asked[1], values)))
        if pattern := variable.get("regex", "").strip("/"):
            found = {match[1] for value in found if (match := re.fullmatch(pattern, value))}
        if variable.get("includeAll"):
            values[name] = variable["allValue"]
        elif chosen.get(name) in found:
            values[name] = chosen[name]
        else:
            raise LookupError(f"{name} has no value {chosen.get(name)!r}, but {sorted(found)}")
    return values


def fill_in(
    expression: str, values: Mapping[str, str], *, rate_interval: str = "1m", span: str = "1h"
) -> str:
    """The expression as Grafana sends it. `span` is the time that is shown."""
    known = {**values, "__rate_interval": rate_interval, "__range": span}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return re.escape(known[name]).replace("\\", "\\\\") if match[3] == "regex" else known[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::(\w+))?\})", value, expression)
