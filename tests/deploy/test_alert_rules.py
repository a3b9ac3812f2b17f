"""The alerts in Prometheus' own hands: promtool checks their form, and tests when they fire."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from support.chart.helm import NAME, NAMESPACE, NEEDED, Helm, need_helm
from support.deploy.alert_cases import CASES, Scraped, promtool_tests
from support.markdown import ROOT
from support.servers.prometheus import promtool

COMPOSE_RULES = ROOT / "deploy/compose/alerts.yml"
COMPOSE = Scraped({"job": "loraplex"}, "instance")


@pytest.fixture(scope="module")
def alert_rules() -> ModuleType:
    found = importlib.util.spec_from_file_location("alert_rules", ROOT / "tools/alert_rules.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def written(directory: Path, rules: list[dict[str, Any]]) -> Path:
    path = directory / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": rules}]}))
    return path


def run_tests(directory: Path, rules: list[dict[str, Any]], scraped: Scraped) -> None:
    path = written(directory, rules)
    promtool("check", "rules", path)
    tests = directory / "tests.yml"
    tests.write_text(yaml.safe_dump(promtool_tests(rules, path.name, scraped)))
    assert "SUCCESS" in promtool("test", "rules", tests)


def test_the_rules_of_compose_are_made_of_the_chart_s_alerts(alert_rules: ModuleType) -> None:
    assert COMPOSE_RULES.read_text("utf-8") == alert_rules.compose_rules(), "run tools/alert_rules.py"


def test_every_alert_fires_when_it_should_and_not_before(alert_rules: ModuleType, tmp_path: Path) -> None:
    rules = alert_rules.filled_in('job="loraplex"', "instance")
    assert {rule["alert"] for rule in rules} == CASES.keys()
    run_tests(tmp_path, rules, COMPOSE)


def test_an_alert_that_is_too_late_or_too_wide_is_found(alert_rules: ModuleType, tmp_path: Path) -> None:
    """The tests above can fail."""
    for name, field, value in (
        ("LoraplexRedisApart", "for", "3m"),
        ("LoraplexRequestsWaiting", "expr", 'vllm:num_requests_waiting{job="loraplex"} >= 256'),
    ):
        rules = alert_rules.filled_in('job="loraplex"', "instance")
        next(rule for rule in rules if rule["alert"] == name)[field] = value
        with pytest.raises(AssertionError, match=name):
            run_tests(tmp_path, rules, COMPOSE)


def test_no_target_at_all_is_a_target_that_is_down(alert_rules: ModuleType, tmp_path: Path) -> None:
    rules = alert_rules.filled_in('job="loraplex"', "instance")
    rule = next(rule for rule in rules if rule["alert"] == "LoraplexTargetDown")
    fired = [
        {
            "exp_labels": {"severity": "critical", "job": "loraplex"},
            "exp_annotations": rule["annotations"] | {"summary": "Prometheus does not reach the server "},
        }
    ]
    checks = [
        {"eval_time": f"{minute}m", "alertname": rule["alert"], "exp_alerts": fired if minute >= 5 else []}
        for minute in range(8)
    ]
    other = [{"series": 'up{job="other"}', "values": "1x10"}]
    document = {
        "rule_files": [written(tmp_path, rules).name],
        "tests": [{"interval": "1m", "input_series": other, "alert_rule_test": checks}],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", tmp_path / "tests.yml")


def test_errors_are_no_alert_where_nobody_asks(alert_rules: ModuleType, tmp_path: Path) -> None:
    rules = alert_rules.filled_in('job="loraplex"', "instance")
    series = [
        {"series": f'loraplex_tenant_requests_total{{job="loraplex",status="{status}"}}', "values": "7x30"}
        for status in (200, 500)
    ]
    checks = [
        {"eval_time": f"{minute}m", "alertname": "LoraplexErrorRate", "exp_alerts": []}
        for minute in range(20)
    ]
    document = {
        "rule_files": [written(tmp_path, rules).name],
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": checks}],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", tmp_path / "tests.yml")


def test_every_runbook_link_leads_to_its_page(alert_rules: ModuleType) -> None:
    for rule in alert_rules.filled_in("", "instance"):
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.read_text("utf-8").startswith(f"# {rule['alert']}\n")


def test_the_configuration_of_compose_s_prometheus(tmp_path: Path) -> None:
    config = (ROOT / "deploy/compose/prometheus.yml").read_text("utf-8")
    (mounted,) = yaml.safe_load(config)["rule_files"]
    volumes = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]["prometheus"]["volumes"]
    assert f"./deploy/compose/alerts.yml:{mounted}:ro" in volumes
    path = tmp_path / "prometheus.yml"
    path.write_text(config.replace(mounted, str(COMPOSE_RULES)))
    assert "16 rules found" in promtool("check", "config", path)


@pytest.mark.slow
def test_the_chart_s_rules_fire_as_well(tmp_path: Path) -> None:
    monitored = {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://example.com/{alert}"},
    }
    rendering = Helm(need_helm()[-1]).template(NEEDED, monitored)
    (group,) = rendering.one("PrometheusRule")["spec"]["groups"]
    scraped = Scraped({"namespace": NAMESPACE, "job": f"{NAME}-admin"}, "pod")
    run_tests(tmp_path, group["rules"], scraped)
