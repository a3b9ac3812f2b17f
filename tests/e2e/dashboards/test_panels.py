"""Every panel's query against a real Prometheus, with data of a real server under load and in trouble."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.markdown import ROOT
from support.servers.busy_server import CHOSEN, BusyServer, busy_server
from tools.dashboards.queries import ShownPanel, choices, fill_in, panels, read_board

pytestmark = pytest.mark.slow

BOARDS = sorted((ROOT / "charts/loraplex/dashboards").glob("*.json"))
RATE = "15s"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BusyServer]:
    """After load, a canary and a rollback, a Redis that was away and an engine that died; Prometheus still runs."""
    # With pauses, as the load goes on for a minute beside other tests.
    with busy_server(tmp_path_factory.mktemp("busy"), pause=0.1) as busy:
        busy.get_into_trouble()
        yield busy


def shown(busy: BusyServer, expression: str) -> list[str]:
    """The series that have a number at some time since the load began."""
    found = busy.prometheus.query_range(expression, busy.began, time.time(), 1.0)
    return [
        str(series["metric"])
        for series in found
        if any(math.isfinite(float(value)) for _, value in series["values"])
    ]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_query_of_every_panel_has_data(busy: BusyServer, path: Path) -> None:
    board = read_board(path)
    values = choices(board, CHOSEN, busy.prometheus.label_values)
    empty: list[tuple[str, str]] = []
    asked: list[ShownPanel] = list(panels(board))
    for panel in asked:
        for expression, legend in panel.targets:
            filled = fill_in(expression, values, rate_interval=RATE, span="5m")
            assert "$" not in filled
            if not shown(busy, filled):
                empty.append((panel.title, legend))
    assert len(asked) >= 5
    assert empty == []


def test_marks_of_release_changes_have_data(busy: BusyServer) -> None:
    board = read_board(ROOT / "charts/loraplex/dashboards/loraplex-release.json")
    values = choices(board, CHOSEN, busy.prometheus.label_values)
    (changes,) = [one for one in board["annotations"]["list"] if one["name"] == "changes-0"]
    marked = " ".join(shown(busy, fill_in(changes["expr"], values, rate_interval=RATE)))
    assert "release.promote" in marked
    assert "release.rollback" in marked


@pytest.mark.parametrize(
    "expression",
    [
        'loraplex_http_responses_total{status="503"} > 0',
        'loraplex_http_responses_total{status="401"} > 0',
        'loraplex_http_responses_total{status="404"} > 0',
        'loraplex_limiter_limits_reached_total{owner="tenant",limit="requests"} > 0',
        'loraplex_limiter_limits_reached_total{owner="tenant",limit="budget"} > 0',
        'loraplex_adapter_evictions_total{tier="device"} > 0',
        'loraplex_streams_cut_total{reason="gone"} > 0',
        "loraplex_limiter_apart == 1",
        "loraplex_engine_up == 0",
        "loraplex_engine_restarts_total > 0",
    ],
)
def test_what_was_provoked_is_seen(busy: BusyServer, expression: str) -> None:
    """The load of this file is one in which panels are not empty for want of trouble."""
    assert shown(busy, expression)


def test_a_query_without_data_is_found(busy: BusyServer) -> None:
    assert shown(busy, 'loraplex_engine_up{job="nobody"}') == []
    assert shown(busy, "vllm:num_requests_waiting / 0 * 0") == []


def test_the_canary_s_share_is_that_of_its_weight(busy: BusyServer) -> None:
    """80 to 20, with some hundred requests; sums over versions are the name's."""
    version = 'sum(max_over_time(loraplex_requests_total{tenant="acme",adapter="support@v%d"}[5m]))'
    (share,) = busy.prometheus.query(f"{version % 2} / ({version % 1} + {version % 2})")
    assert 0.02 < float(share["value"][1]) < 0.6
