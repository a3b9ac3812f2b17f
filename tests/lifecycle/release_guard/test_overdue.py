"""Requests that run long: what counts as an answer without an end, and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard, Verdict
from loraplex.lifecycle.release_guard.rules import MetricName, Rules
from loraplex.lifecycle.release_guard.window import MAX_OLDEST, RunningArm
from support.releases.traffic import CANDIDATE, CONTROL, ended

RATE, TTFT, ITL, TOKENS = 20, 0.1, 0.038, 51
"""An answer takes 2 s."""


def answer(
    number: int, version: int, *, itl: float = 1.0, length: float = 1.0, status: str = "stop"
) -> Outcome:
    """An answer whose time between tokens and whose length are these multiples of the usual ones."""
    tokens = 1 + (TOKENS - 1) * length
    began = number / RATE
    return replace(
        ended(version=version, key=f"u{number}", status=status, started_at=began),
        ended_at=began + TTFT + (tokens - 1) * ITL * itl,
        first_token_s=TTFT,
        inter_token_s=ITL * itl,
        output_tokens=tokens,
    )


def lasts(number: int) -> float:
    """One answer in five is 1.9 times as long."""
    return 1.9 if number % 10 in (3, 8) else 1.0


def breach(rules: Rules, candidate: Callable[[int], Outcome], seconds: int) -> tuple[float, Verdict] | None:
    """When and how a guard that looks each second calls the candidate worse."""
    guard = Guard(rules, Arms(CONTROL, CANDIDATE, 50.0, 50.0), since=0.0)
    requests = [answer(n, CONTROL, length=lasts(n)) if n % 2 else candidate(n) for n in range(seconds * RATE)]
    for now in range(1, seconds + 1):
        rows = []
        for version in (CONTROL, CANDIDATE):
            oldest = [
                (one.key_hash, one.started_at)
                for one in requests
                if one.version == version and one.started_at <= now < one.ended_at
            ]
            rows.append(RunningArm(version, len(oldest), tuple(oldest[:MAX_OLDEST])))
        verdict = guard.observe([one for one in requests if now - 1 < one.ended_at <= now], rows, float(now))
        if verdict.breach is not None:
            return now, verdict
    return None


def only(*names: MetricName) -> Rules:
    return Rules({name: Rules().margins[name] for name in names})


@pytest.mark.parametrize("itl", [1.0, 1.09])
def test_long_answers_of_a_version_within_its_margins_are_no_cut_ones(itl: float) -> None:
    assert breach(Rules(), lambda n: answer(n, CANDIDATE, itl=itl, length=lasts(n)), 60) is None


def test_a_slow_version_is_not_called_long_where_times_are_not_watched() -> None:
    """Its answers are as long as the control's, in tokens."""
    rules = only("output_length", "length_share")
    assert breach(rules, lambda n: answer(n, CANDIDATE, itl=3.0, length=lasts(n)), 40) is None


def test_requests_that_fail_late_are_failures() -> None:
    def late(number: int) -> Outcome:
        failed = answer(number, CANDIDATE, status="deadline_exceeded")
        return replace(failed, ended_at=failed.started_at + 30.0, first_token_s=None, inter_token_s=None)

    found = breach(only("error_rate"), late, 40)
    assert found is not None
    at, verdict = found
    assert at <= 35
    assert verdict.reason.startswith("guard: error_rate: 100 % ended with an error")


def test_answers_that_never_end_are_found_in_seconds() -> None:
    found = breach(Rules(), lambda n: replace(answer(n, CANDIDATE), ended_at=math.inf), 20)
    assert found is not None
    at, verdict = found
    assert at <= 12
    assert verdict.breach is not None
    assert verdict.breach.metric in ("length_share", "output_length")
