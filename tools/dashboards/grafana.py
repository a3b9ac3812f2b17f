"""Grafana's JSON of a dashboard, made with Grafana's own library."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards.model import Board, Panel, Query, Variable

TAG = "loraplex"
RUNBOOK = "https://docs.example.com/loraplex/runbooks/{alert}/"
"""The chart puts `prometheusRule.runbookUrl` in its place; in compose it is an address to replace."""
HEIGHT, WIDTH, COLUMNS = 8, 8, 24
_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


def to_json(board: Board) -> str:
    """The file of a dashboard."""
    made = (
        build.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .readonly()
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            build.DashboardLink("Loraplex")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
            .as_dropdown(True)
        )
        .with_variable(build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    for number, query in enumerate(board.annotations):
        made = made.annotation(_annotation(query, number))
    top = 0
    for row in board.rows:
        made = made.with_row(build.Row(row.title).grid_pos(model.GridPos(h=1, w=COLUMNS, x=0, y=top)))
        top += 1
        for number, panel in enumerate(row.panels):
            x, y = number * WIDTH % COLUMNS, top + number * WIDTH // COLUMNS * HEIGHT
            made = made.with_panel(_panel(panel).grid_pos(model.GridPos(h=HEIGHT, w=WIDTH, x=x, y=y)))
        top += -(-len(row.panels) * WIDTH // COLUMNS) * HEIGHT
    plain: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    # Grafana's provisioning wants each panel's number to be fixed, or links to a panel break at every start.
    for number, shown in enumerate(plain["panels"], 1):
        shown["id"] = number
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(variable: Variable) -> build.QueryVariable:
    made = (
        build.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(_SOURCE)
        .query({"query": variable.query, "refId": variable.name, "qryType": 1})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if variable.pattern:
        made = made.regex(variable.pattern)
    if variable.several:
        # The value of "All" is every value, and not one pattern: what is gone meanwhile is shown too.
        made = made.multi(True).include_all(True).all_value(".*")
        made = made.current(model.VariableOption(selected=True, text="All", value="$__all"))
    return made


def _annotation(query: Query, number: int) -> build.AnnotationQuery:
    return (
        build.AnnotationQuery()
        .name(f"changes-{number}")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color("purple")
        .type("prometheus")
        .expr(query.text)
    )


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    links = [
        build.DashboardLink(f"Runbook: {alert}")
        .type(model.DashboardLinkType.LINK)
        .url(RUNBOOK.format(alert=alert))
        .target_blank(True)
        for alert in panel.runbooks
    ]
    pages = " ".join(f"Runbook: docs/runbooks/{alert}.md." for alert in panel.runbooks)
    made: timeseries.Panel | stat.Panel
    if panel.kind == "number":
        made = stat.Panel().decimals(0).reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        made = (
            timeseries.Panel()
            .line_width(1)
            .fill_opacity(60 if panel.kind == "stack" else 8)
            .min(0)
            .show_points(common.VisibilityMode.AUTO)
            .legend(VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
        )
        if panel.kind == "stack":
            made = made.stacking(StackingConfig().mode(common.StackingMode.NORMAL))
        if panel.most is not None:
            made = made.max(panel.most)
    made = (
        made.title(panel.title)
        .description(f"{panel.description} {pages}".strip())
        .unit(panel.unit)
        .datasource(_SOURCE)
        .links(links)
    )
    for number, query in enumerate(panel.queries):
        made = made.with_target(
            prometheus.Dataquery()
            .expr(query.text)
            .legend_format(query.legend or "__auto")
            .ref_id(chr(ord("A") + number))
        )
    return made
