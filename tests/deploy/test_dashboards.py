"""The committed dashboards are those of the code, are whole, and reach Grafana in compose and the chart."""

from __future__ import annotations

import json
import re
from typing import Any

import promql_parser
import pytest
import yaml

from support import markdown
from support.chart.helm import NAME, NEEDED, Helm, need_helm
from support.markdown import ROOT
from tools.dashboards.__main__ import FOLDER
from tools.dashboards.boards import BOARDS
from tools.dashboards.grafana import RUNBOOK, to_json
from tools.dashboards.queries import choices, fill_in, panels, read_board

FILES = sorted(FOLDER.glob("*.json"))
UNITS = {"reqps", "percentunit", "s", "short", "bytes", "ops", "none"}


def test_generating_again_gives_the_committed_bytes() -> None:
    assert {path.stem: path.read_text("utf-8") for path in FILES} == {
        board.uid: to_json(board) for board in BOARDS
    }, "run python -m tools.dashboards"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_are_described_and_lead_to_their_runbooks(path: Any) -> None:
    board = read_board(path)
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles))
    for panel in panels(board):
        plain = panel.plain
        assert len(plain["description"]) > 30, panel.title
        assert plain["fieldConfig"]["defaults"]["unit"] in UNITS, panel.title
        assert plain["datasource"]["uid"] == "${datasource}"
        for link in plain["links"]:
            alert = link["title"].removeprefix("Runbook: ")
            assert link["url"] == RUNBOOK.format(alert=alert)
            assert (ROOT / f"docs/runbooks/{alert}.md").is_file()
            assert f"docs/runbooks/{alert}.md" in plain["description"]


def test_every_alert_has_a_panel_that_leads_to_its_runbook() -> None:
    linked = {
        link["title"].removeprefix("Runbook: ")
        for path in FILES
        for panel in panels(read_board(path))
        for link in panel.plain["links"]
    }
    assert linked == {path.stem for path in (ROOT / "docs/runbooks").glob("*.md")}


def documented() -> set[str]:
    rows = markdown.rows(markdown.read("docs/metrics.md"), "metric", "type", "labels", "meaning")
    found = {"up"}
    for name, kind, _, _ in rows:
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        found |= {name.strip("`") + part for part in parts}
    return found


def test_queries_are_promql_over_documented_metrics() -> None:
    known = documented()
    for path in FILES:
        board = read_board(path)
        values = choices(board, {"tenant": "t", "adapter": "a", "release": "a"}, one_of_each)
        for panel in panels(board):
            for expression, legend in panel.targets:
                filled = fill_in(expression, values)
                promql_parser.parse(filled)
                assert set(re.findall(r"\b((?:vllm:|loraplex_)\w+|up)\b", filled)) <= known, panel.title
                assert legend


def one_of_each(label: str, selector: str) -> list[str]:
    assert set(re.findall(r"loraplex_\w+", selector)) <= documented()
    return {"adapter": ["a", "a@v1"], "tenant": ["t"]}.get(label, [label])


def test_variables_are_filled_in_as_grafana_does() -> None:
    values = {"job": ".*", "release": "a.b", "__unused": ""}
    assert fill_in('{job=~"$job",adapter=~"${release:regex}@v.*"}[$__range]', values) == (
        '{job=~".*",adapter=~"a\\\\.b@v.*"}[1h]'
    )
    with pytest.raises(KeyError):
        fill_in("$unknown", values)


def test_compose_shows_them() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    assert mounts["./deploy/compose/grafana"] == "/etc/grafana/provisioning"
    provider = yaml.safe_load((ROOT / "deploy/compose/grafana/dashboards/loraplex.yaml").read_text("utf-8"))
    (given,) = provider["providers"]
    assert given["options"]["path"] == mounts["./charts/loraplex/dashboards"]
    assert (ROOT / "deploy/compose/grafana/datasources/prometheus.yaml").is_file()


@pytest.mark.slow
def test_the_chart_brings_them_with_links_to_the_runbooks() -> None:
    given = {
        "grafanaDashboards": {"enabled": True, "annotations": {"grafana_folder": "Loraplex"}},
        "prometheusRule": {"runbookUrl": "https://docs.test/$1/{alert}.html"},
    }
    helm = Helm(need_helm()[-1])
    maps = {one["metadata"]["name"]: one for one in helm.template(NEEDED, given).of("ConfigMap")}
    assert maps.keys() == {f"{NAME}-{board.uid.removeprefix('loraplex-')}-dashboard" for board in BOARDS}
    for board in BOARDS:
        found = maps[f"{NAME}-{board.uid.removeprefix('loraplex-')}-dashboard"]
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"grafana_folder": "Loraplex"}
        text = found["data"][f"{board.uid}.json"]
        expected = to_json(board).replace(RUNBOOK.split("{alert}")[0], "https://docs.test/$1/")
        expected = re.sub(r"(https://docs\.test/\$1/\w+)/", r"\1.html", expected)
        assert json.loads(text) == json.loads(expected)
    assert not helm.template(NEEDED).of("ConfigMap")
    assert "grafanaDashboards.enabled needs prometheusRule.runbookUrl" in helm.refusal(
        NEEDED, {"grafanaDashboards": {"enabled": True}}
    )
