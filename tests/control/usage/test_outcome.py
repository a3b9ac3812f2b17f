"""Outcomes of requests, as their ledger rows tell them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from loraplex.api.errors import ANSWERS
from loraplex.control.usage.outcome import FAILURES, Outcome, key_hash
from loraplex.control.usage.records import CANCELLED, INTERRUPTED, Accepted, Ended

AT = datetime(2026, 11, 27, 12, 0, 10, tzinfo=UTC)


def row(status: str = "stop", *, n: int = 1, tokens: int = 51, first: float | None = 0.5) -> Ended:
    accepted = Accepted(
        "id1",
        AT,
        "acme",
        "key1",
        "support",
        2,
        "sha256:00",
        "/v1/chat/completions",
        streamed=False,
        n=n,
        key_hash=7,
    )
    return accepted.ended(AT, status, completion_tokens=tokens, first_token_s=first, total_s=3.0)


def test_an_outcome_has_the_times_of_its_row() -> None:
    outcome = Outcome.of(row())
    assert (outcome.tenant_id, outcome.adapter, outcome.version, outcome.key_hash) == (
        "acme",
        "support",
        2,
        7,
    )
    assert outcome.ended_at - outcome.started_at == pytest.approx(3.0)
    assert outcome.ended_at == AT.timestamp()
    assert outcome.first_token_s == 0.5
    assert outcome.inter_token_s == pytest.approx(2.5 / 50)
    assert outcome.output_tokens == 51


def test_tokens_of_several_choices_are_their_mean() -> None:
    assert Outcome.of(row(n=3, tokens=153)).output_tokens == 51
    assert Outcome.of(row(n=3, tokens=153)).inter_token_s == pytest.approx(2.5 / 50)


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    assert Outcome.of(row(tokens=1)).inter_token_s is None
    assert Outcome.of(row("internal_error", tokens=0, first=None)).first_token_s is None


@pytest.mark.parametrize(
    ("status", "failed", "cut"),
    [
        ("stop", False, False),
        ("length", False, True),
        (CANCELLED, None, None),
        (INTERRUPTED, None, None),
        ("rate_limit_exceeded", None, None),
        ("invalid_value", None, None),
        ("server_overloaded", None, None),
        ("internal_error", True, None),
        ("adapter_unavailable", True, None),
        ("adapter_not_finite", True, None),
    ],
)
def test_errors_of_the_version_are_told_from_those_of_others(
    status: str, failed: bool | None, cut: bool | None
) -> None:
    outcome = Outcome.of(row(status))
    assert (outcome.failed, outcome.cut_at_length) == (failed, cut)


def test_every_failure_is_a_code_that_a_row_can_have() -> None:
    assert set(ANSWERS) >= FAILURES


def test_a_key_has_one_hash_of_64_bits() -> None:
    assert key_hash("user-1") == key_hash("user-1") != key_hash("user-2")
    assert 0 <= key_hash("\ud800") < 2**64
