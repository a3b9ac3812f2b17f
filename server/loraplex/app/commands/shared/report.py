"""An admission report for people: as JSON it names every module, which at a terminal is pages of the same number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def report_fields(report: Any) -> dict[str, str]:
    """A line or more a field, by the report's own names. What says nothing (null, nothing counted) is left out, and
    so is whatever is not of the shape that a report has."""
    if not isinstance(report, dict):
        return {}
    shown = {
        name: _shown(name, value) for name, value in report.items() if value not in (None, 0, "", [], {})
    }
    return {name: text for name, text in shown.items() if text}


def _shown(name: str, value: Any) -> str:
    if name == "rank_by_module" and isinstance(value, dict):
        return _ranks(value)
    if name == "reference_error" and isinstance(value, dict):
        return _errors(value)
    if name == "base_error" and isinstance(value, dict):
        return _forms(value)
    if name == "checks" and isinstance(value, list):
        return "\n".join(_check(check) for check in value if isinstance(check, dict))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_number(part)}" for key, part in value.items() if part is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _errors(found: Mapping[str, Any]) -> str:
    """The check of a version's numbers, without a number a module."""
    names = ("verdict", "max", "mean", "tolerance", "worst_module", "dtype")
    return ", ".join(f"{name} {_number(found[name])}" for name in names if found.get(name) is not None)


def _forms(found: Mapping[str, Any]) -> str:
    """The base that a version was trained on, beside the served one, and what that changes."""
    kl, top1 = found.get("kl"), found.get("top1")
    result = found.get("reason")
    if isinstance(kl, int | float) and isinstance(top1, int | float):
        result = f"{_number(float(kl))} nat a token, top-1 {top1:.1%} of {found.get('tokens')} tokens"
    return f"trained on {found.get('trained_on')}, served over {found.get('served')}: {result}"


def _ranks(by_module: Mapping[str, Any]) -> str:
    """The linears by the last part of their names, each with its ranks and in how many modules it is."""
    ranks: dict[str, list[int]] = {}
    for module, rank in by_module.items():
        if isinstance(rank, int):
            ranks.setdefault(str(module).rpartition(".")[2], []).append(rank)
    lines = []
    for linear, found in ranks.items():
        low, high = min(found), max(found)
        lines.append(f"{linear} {low if low == high else f'{low} to {high}'} ({len(found)} modules)")
    return ", ".join(lines)


def _check(check: Mapping[str, Any]) -> str:
    """A check that did not pass is the one that refused; of an accepted adapter, a warning."""
    mark = "ok" if check.get("ok") else "! "
    return f"{mark} {check.get('name')}: {check.get('detail')}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
