"""axe-core in the page of a `Screen`: what keeps people with a screen reader, or with weak eyes, from using it."""

from __future__ import annotations

import json
import os

import pytest

from support.console.browser import Screen
from support.markdown import ROOT

AXE = ROOT / ".clients/console/node_modules/axe-core/axe.min.js"


def need_axe() -> None:
    """Skip the test where axe is missing; under CI it fails."""
    if AXE.exists():
        return
    message = "axe is not installed: make .clients/console/.installed"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def check_axe(screen: Screen, place: str) -> None:
    """Assert that axe finds nothing serious in what is shown."""
    screen.page.evaluate(AXE.read_text())
    found = screen.page.evaluate("async () => (await axe.run()).violations")
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    shown = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in serious]
    assert serious == [], f"{place}: {json.dumps(shown, indent=1)}"
