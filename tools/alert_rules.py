"""Writes the rules of compose.yaml's Prometheus from the chart's alerts.

    python tools/alert_rules.py

`charts/loraplex/alerts.yaml` is the one source of all alerts. The chart fills it in by its template; this fills it in
for `deploy/compose/alerts.yml`, with the thresholds of `values.yaml`. A test compares the two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts/loraplex"
RULES = ROOT / "deploy/compose/alerts.yml"
HEAD = "# Made by tools/alert_rules.py from charts/loraplex/alerts.yaml.\n"
RUNBOOK = "docs/runbooks/{alert}.md"
"""In the checkout that compose.yaml is started from."""


def source() -> str:
    return (CHART / "alerts.yaml").read_text("utf-8")


def thresholds() -> dict[str, float]:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    found: dict[str, float] = values["prometheusRule"]["thresholds"]
    return found


def filled_in(series: str, server: str) -> list[dict[str, Any]]:
    """The rules for servers that `series` selects and the label `server` tells apart."""
    text = source().replace("<series>", series).replace("<server>", server)
    for name, value in thresholds().items():
        text = text.replace(f"<{name}>", json.dumps(value))
    rules: list[dict[str, Any]] = yaml.safe_load(text)["rules"]
    for rule in rules:
        rule["annotations"]["runbook_url"] = RUNBOOK.format(alert=rule["alert"])
    return rules


def compose_rules() -> str:
    """The text of `deploy/compose/alerts.yml`."""
    rules = filled_in('job="loraplex"', "instance")
    groups = {"groups": [{"name": "loraplex", "rules": rules}]}
    return HEAD + yaml.dump(groups, Dumper=_Blocks, sort_keys=False, width=150)


class _Blocks(yaml.SafeDumper):
    """Expressions of several lines stay so."""

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _Blocks.represent_text)


if __name__ == "__main__":
    RULES.write_text(compose_rules(), "utf-8")
