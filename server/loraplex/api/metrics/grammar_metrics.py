"""Metrics of the checks of schemas and grammars."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from loraplex.serving.grammar.checker import CheckOutcome

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class GrammarMeter:
    """`checked` is the `on_check` of a `GrammarChecker`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        checks = Counter(
            "loraplex_grammar_checks",
            "Schemas and grammars that were built on trial, by outcome; one that was checked before is not counted.",
            ["outcome"],
            registry=registry,
        )
        self._checks = {outcome: checks.labels(outcome) for outcome in get_args(CheckOutcome)}
        self._seconds = Histogram(
            "loraplex_grammar_check_seconds",
            "Time of a check, the wait for its turn included.",
            buckets=SECONDS,
            registry=registry,
        )

    def checked(self, outcome: CheckOutcome, seconds: float) -> None:
        self._checks[outcome].inc()
        self._seconds.observe(seconds)
