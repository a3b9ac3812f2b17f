"""Rules of a guard: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.control.errors import InvalidValue
from loraplex.lifecycle.release_guard.rules import METRICS, Rules, parse_rules


def test_all_metrics_have_default_margins_and_shares_that_add_up() -> None:
    rules = parse_rules({})
    assert rules == Rules()
    assert list(rules.margins) == list(METRICS)
    assert sum(rules.share(name) for name in rules.margins) == pytest.approx(1.0)
    assert rules.max_false_alarm == 0.01


def test_rules_are_read_as_they_are_written() -> None:
    document = {
        "metrics": [{"name": "ttft", "margin": 0.2}, {"name": "error_rate"}],
        "max_false_alarm": 0.001,
        "min_requests": 0,
    }
    rules = parse_rules(document)
    assert rules == Rules({"ttft": 0.2, "error_rate": 0.005}, 0.001, 0)
    assert parse_rules(rules.document()) == rules


@pytest.mark.parametrize(
    ("document", "param", "words"),
    [
        ([], "guard", "is an object"),
        ({"margin": 1}, "guard", "no field 'margin'"),
        ({"metrics": []}, "guard.metrics", "1 to 5 metrics"),
        ({"metrics": {}}, "guard.metrics", "list"),
        ({"metrics": [{"name": "latency"}]}, "guard.metrics[0].name", "error_rate, ttft"),
        ({"metrics": [{"name": ["ttft"]}]}, "guard.metrics[0].name", "is one of"),
        ({"metrics": [{"name": "ttft"}] * 2}, "guard.metrics[1].name", "has a margin already"),
        (
            {"metrics": [{"name": "error_rate", "margin": 0.6}]},
            "guard.metrics[0].margin",
            "from 0 to 0.5; not 0.6",
        ),
        ({"metrics": [{"name": "error_rate", "margin": -0.1}]}, "guard.metrics[0].margin", "not -0.1"),
        ({"metrics": [{"name": "ttft", "margin": 10.5}]}, "guard.metrics[0].margin", "from 0 to 10;"),
        ({"metrics": [{"name": "ttft", "margin": "10%"}]}, "guard.metrics[0].margin", "not '10%'"),
        ({"metrics": [{"name": "ttft", "margin": float("nan")}]}, "guard.metrics[0].margin", "not NaN"),
        ({"metrics": [{"name": "ttft", "margin": 10**400}]}, "guard.metrics[0].margin", "not 1000"),
        ({"metrics": [{"name": "ttft", "margin": True}]}, "guard.metrics[0].margin", "not true"),
        ({"max_false_alarm": 0}, "guard.max_false_alarm", "from 0.000001"),
        ({"max_false_alarm": 5e-324}, "guard.max_false_alarm", "from 0.000001"),
        ({"max_false_alarm": 0.5}, "guard.max_false_alarm", "to 0.1"),
        ({"min_requests": -1}, "guard.min_requests", "from 0 to 1,000,000"),
        ({"min_requests": 1.5}, "guard.min_requests", "whole number"),
    ],
)
def test_what_is_wrong_with_rules_is_named(document: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidValue, match="'") as refused:
        parse_rules(document)
    assert refused.value.param == param
    assert words in str(refused.value)
    assert len(str(refused.value)) < 400
