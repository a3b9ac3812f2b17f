"""Alerts and scaling: only metrics that there are, a runbook for each alert, thresholds from the values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from support import markdown
from support.chart.helm import NAME, NAMESPACE, NEEDED, SEVERAL, Helm, merged

pytestmark = pytest.mark.slow

MONITORED = {"serviceMonitor": {"enabled": True}}
ALERTING = merged(
    MONITORED, {"prometheusRule": {"enabled": True, "runbookUrl": "https://example.com/{alert}.md"}}
)
KEDA = {"autoscaling": {"provider": "keda", "keda": {"prometheusUrl": "http://prometheus:9090"}}}
OTHERS_METRICS = {"up"}
"""Prometheus' own."""
RUNBOOKS = markdown.ROOT / "docs/runbooks"


def selectors(expression: Any) -> Iterator[Any]:
    """Every selector of series in a PromQL expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (part := getattr(expression, name, None)) is not None:
            yield from selectors(part)
    for part in getattr(expression, "args", None) or ():
        yield from selectors(part)


def series(query: str) -> dict[str, dict[str, str]]:
    """The metrics of a query, each with the labels that it selects by. Raises ValueError where it is no PromQL."""
    return {
        found.name: {matcher.name: matcher.value for matcher in found.matchers.matchers}
        for found in selectors(promql_parser.parse(query))
    }


def documented() -> dict[str, set[str]]:
    """Our metrics by name, with their labels; `test_interface_docs.py` compares that page with a scrape."""
    rows = markdown.rows(markdown.read("docs/metrics.md"), "metric", "type", "labels", "meaning")
    found: dict[str, set[str]] = {}
    for name, kind, labels, _ in rows:
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        for part in parts:
            found[name.strip("`") + part] = set(markdown.spans(labels))
    return found


def check(query: str) -> None:
    ours = documented()
    used = series(query)
    assert used
    for metric, labels in used.items():
        assert labels.pop("namespace") == NAMESPACE
        assert labels.pop("job") == f"{NAME}-admin", "the name of the Service that is scraped"
        if metric not in OTHERS_METRICS:
            assert labels.keys() <= ours[metric], metric


@pytest.fixture(scope="module")
def alerts(helm: Helm) -> dict[str, dict[str, Any]]:
    (group,) = helm.template(NEEDED, ALERTING).one("PrometheusRule")["spec"]["groups"]
    found = {rule["alert"]: rule for rule in group["rules"]}
    assert len(found) == len(group["rules"])
    return found


def test_the_selectors_of_a_query_are_found() -> None:
    query = (
        'sum by (le) (rate(a:b_total{x="1"}[5m])) / c > 2 and max_over_time(d{y=~"z"}[1h:5m]) or (topk(3, e))'
    )
    assert series(query) == {"a:b_total": {"x": "1"}, "c": {}, "d": {"y": "z"}, "e": {}}


def test_alerts_ask_for_metrics_and_labels_that_there_are(alerts: dict[str, dict[str, Any]]) -> None:
    for rule in alerts.values():
        check(rule["expr"])


def test_every_alert_has_a_runbook_and_every_runbook_an_alert(alerts: dict[str, dict[str, Any]]) -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == alerts.keys()
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"https://example.com/{name}.md"
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_runbooks_say_what_the_rules_say(alerts: dict[str, dict[str, Any]]) -> None:
    """Severity and waiting time, and the metrics of the expression."""
    for name, rule in alerts.items():
        text = (RUNBOOKS / f"{name}.md").read_text("utf-8")
        assert text.startswith(f"# {name}\n")
        assert f"Severity: {rule['labels']['severity']}. It fires after {rule['for']}" in " ".join(
            text.split()
        )
        for metric in series(rule["expr"]).keys() - {"up"}:
            assert metric.removesuffix("_bucket").removesuffix("_count") in text, (name, metric)
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings == ["What it means", "What to look at", "What to do", "When it is over"], name


def test_thresholds_are_the_values(helm: Helm, alerts: dict[str, dict[str, Any]]) -> None:
    thresholds = {
        "errorRatio": ("LoraplexErrorRate", 0.011),
        "queueSeconds": ("LoraplexQueueTime", 12.5),
        "waiting": ("LoraplexRequestsWaiting", 1234567),
        "kvUsage": ("LoraplexKvPressure", 0.77),
        "preemptionsPerSecond": ("LoraplexKvPressure", 3.25),
        "adapterLoadsPerSecond": ("LoraplexAdapterThrash", 7.5),
        "adapterMemoryUsage": ("LoraplexAdapterThrash", 0.66),
        "replicaRestarts": ("LoraplexReplicaFlapping", 5),
        "failoversPerMinute": ("LoraplexFailovers", 44),
        "ledgerLagSeconds": ("LoraplexLedgerLag", 777),
        "diskFree": ("LoraplexDiskFilling", 0.33),
    }
    given = {"prometheusRule": {"thresholds": {name: value for name, (_, value) in thresholds.items()}}}
    (group,) = helm.template(NEEDED, ALERTING, given).one("PrometheusRule")["spec"]["groups"]
    changed = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert {name for name, rule in alerts.items() if rule["expr"] != changed[name]} == {
        alert for alert, _ in thresholds.values()
    }
    for alert, value in thresholds.values():
        assert re.search(rf"[<>] {re.escape(str(value))}(?!\d)", changed[alert]), changed[alert]


def test_the_service_monitor_scrapes_the_admin_port(helm: Helm) -> None:
    rendering = helm.template(
        NEEDED, MONITORED, {"serviceMonitor": {"interval": "15s", "labels": {"a": "b"}}}
    )
    monitor = rendering.one("ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s")
    assert monitor["metadata"]["labels"]["a"] == "b"
    selected = [
        service
        for service in rendering.of("Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ]
    assert [service["metadata"]["name"] for service in selected] == [f"{NAME}-admin"]
    assert endpoint["port"] in [port["name"] for port in selected[0]["spec"]["ports"]]


def test_keda_asks_for_queue_and_batch(helm: Helm) -> None:
    given = {"autoscaling": {"waitingPerReplica": 3, "runningPerReplica": 30}}
    rendering = helm.template(NEEDED, SEVERAL, MONITORED, KEDA, given)
    scaled = rendering.one("ScaledObject")["spec"]
    asked = {}
    for trigger in scaled["triggers"]:
        check(trigger["metadata"]["query"])
        (metric,) = series(trigger["metadata"]["query"])
        asked[metric] = trigger["metadata"]["threshold"]
    assert asked == {"vllm:num_requests_waiting": "3", "vllm:num_requests_running": "30"}
    assert scaled["scaleTargetRef"]["name"] == rendering.one("StatefulSet")["metadata"]["name"]
    assert "replicas" not in rendering.one("StatefulSet")["spec"]
    assert rendering.of("HorizontalPodAutoscaler") == []


def test_the_autoscaler_asks_for_queue_and_batch(helm: Helm) -> None:
    given = {"autoscaling": {"provider": "hpa", "minReplicas": 1, "maxReplicas": 9}}
    rendering = helm.template(NEEDED, SEVERAL, MONITORED, given)
    scaler = rendering.one("HorizontalPodAutoscaler")["spec"]
    asked = {
        it["pods"]["metric"]["name"].replace("vllm_", "vllm:", 1): it["pods"]["target"]["averageValue"]
        for it in scaler["metrics"]
    }
    assert asked == {"vllm:num_requests_waiting": "8", "vllm:num_requests_running": "48"}
    assert asked.keys() <= documented().keys()
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 9)
    assert scaler["scaleTargetRef"]["name"] == rendering.one("StatefulSet")["metadata"]["name"]
    assert "replicas" not in rendering.one("StatefulSet")["spec"]
    assert rendering.of("ScaledObject") == []
