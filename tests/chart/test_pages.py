"""docs/kubernetes.md has every value with its default, and every alert of the chart."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from support import markdown
from support.chart.helm import CHART, PROGRAMS, Helm, load
from support.chart.validation import NEWEST, OLDEST

PAGE = markdown.read("docs/kubernetes.md")


def documented_values() -> dict[str, str]:
    return {cells[0].strip("`"): cells[1] for cells in markdown.rows(PAGE, "value", "default", "meaning")}


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`" if text else "(none)"


def leaves(values: dict[str, Any], documented: set[str], at: str = "") -> Iterator[tuple[str, Any]]:
    """Each value; a map is one where the page has a row for it."""
    for key, value in values.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict) and value and path not in documented - {"settings"}:
            yield from leaves(value, documented, path)
        else:
            yield path, value


def test_every_value_is_documented_with_its_default() -> None:
    documented = documented_values()
    assert documented.pop("settings") == "see below"
    actual = {path: shown(value) for path, value in leaves(load(CHART / "values.yaml"), set(documented))}
    assert documented == actual


def test_every_value_has_a_meaning() -> None:
    rows = markdown.rows(PAGE, "value", "default", "meaning")
    assert [cells[0] for cells in rows if not cells[2]] == []


def test_every_alert_is_listed_with_its_severity() -> None:
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in load(CHART / "alerts.yaml")["rules"]}
    rows = markdown.rows(PAGE, "alert", "severity", "when")
    assert {re.findall(r"\[(\w+)\]", cells[0])[0]: cells[1] for cells in rows} == severities
    for cells in rows:
        name = cells[0].partition("]")[0].removeprefix("[")
        assert f"(runbooks/{name}.md)" in cells[0]


def test_versions_on_the_page_are_those_of_the_checks() -> None:
    requirements = markdown.read("tests/chart/requirements-helm.txt")
    newest, oldest = re.findall(r"\b(\d+\.\d+\.\d+) in the", requirements)
    assert f"Helm {oldest} and {newest}" in " ".join(PAGE.split())
    assert f"Kubernetes {OLDEST} and {NEWEST}" in " ".join(PAGE.split())
    assert f">={OLDEST}.0-0" in (CHART / "Chart.yaml").read_text("utf-8")
    fetched = {program.name for program in PROGRAMS.glob("helm-*")}
    if fetched and platform.machine() == "x86_64":
        assert fetched == {f"helm-{oldest}", f"helm-{newest}"}


@pytest.mark.parametrize("page", ["docs/install.md", "docs/kubernetes.md"])
def test_the_command_that_installs_the_chart_renders_it(helm: Helm, page: str) -> None:
    commands = re.findall(r"helm install ((?:[^\n]*\\\n)*[^\n]*)", markdown.blocks(markdown.read(page)))
    assert commands
    for command in commands:
        arguments = shlex.split(command.replace("\\\n", " "))
        done = subprocess.run(
            [helm.program, "template", *arguments, "--kube-version", "1.29.0"],
            cwd=markdown.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "kind: StatefulSet" in done.stdout


def test_the_chart_and_the_product_have_one_version() -> None:
    project = re.search(r'^version = "(.*)"$', markdown.read("pyproject.toml"), re.MULTILINE)
    assert project is not None
    chart = load(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (project[1], project[1])
