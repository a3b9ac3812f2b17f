"""Requests to the data plane are counted in the history of the last hour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from loraplex.control.history.figures import Figures
from loraplex.control.history.history import Report
from loraplex.engine.types import Timing
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, Refused

CLEARED_S = 4000.0
"""After so long a history has forgotten what other tests did."""
KEY = {"Authorization": "Bearer lpx_acme"}


@pytest.fixture
def counted(plane: DataPlane) -> Callable[[], Report]:
    """The report of what the test asked, once all of it has ended."""
    history = plane.services.history
    began = history.clock() + CLEARED_S
    history.clock = lambda: began

    def report() -> Report:
        plane.settle_all()
        history.clock = lambda: began + 10
        return plane.on_loop(lambda: history.past("5m")).report()

    return report


def ask(plane: DataPlane, model: str = "pirate", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "x" * 10, **fields}
    return plane.http.post(f"{plane.url}/v1/completions", json=body, headers=KEY)


def of(report: Report, adapter: str) -> Figures:
    (found,) = [row.figures for row in report.adapters if row.adapter == adapter]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_times(plane: DataPlane, counted: Callable[[], Report], stream: bool) -> None:
    timing = Timing(queue_s=0.0, first_token_s=0.1, total_s=0.5, last_token_s=0.4)
    plane.engine.script(Reply(text="abcd", cached_tokens=4, timing=timing), Reply(text="ab"))
    assert ask(plane, stream=stream).status_code == 200
    assert ask(plane, BASE).status_code == 200
    report = counted()
    assert {(row.tenant, row.adapter, row.version) for row in report.adapters} == {
        ("acme", "pirate", 2),
        ("acme", "(base)", 0),
    }
    told = of(report, "pirate")
    assert (told.requests, told.errors, told.limited) == (1, 0, 0)
    assert (told.computed_tokens, told.cached_tokens) == (6, 4)
    assert told.output_tokens == plane.ledger.rows[0].completion_tokens
    assert told.first_token_seconds is not None
    between = 0.3 / (told.output_tokens - 1)
    assert told.gap_seconds == pytest.approx(between, rel=0.5)
    assert report.total.requests == 2


def test_failures_of_the_server(plane: DataPlane, counted: Callable[[], Report]) -> None:
    """Before the answer began, within a stream, and of numbers that are not finite, which is a 400."""
    plane.engine.script(
        Reply(error=("adapter_unavailable", "no room")),
        Reply(text="ab", error=("engine_restarting", "the engine died")),
        Reply(error=("adapter_not_finite", "no number")),
        Reply(text="ok"),
    )
    statuses = [ask(plane, stream=stream).status_code for stream in (False, True, False, False)]
    assert statuses == [503, 200, 400, 200]
    told = of(counted(), "pirate")
    assert (told.requests, told.errors) == (4, 3)


def test_refusals(plane: DataPlane, counted: Callable[[], Report]) -> None:
    """A refusal by a limit counts before the adapter is known and after it; a wrong request does not count."""
    plane.limiter.refuse_admission_with = [Refused("rate_limit_exceeded")]
    assert ask(plane).status_code == 429
    plane.limiter.refuse_with = [Refused("rate_limit_exceeded")]
    assert ask(plane).status_code == 429
    assert ask(plane, "nothing-like-this").status_code == 404
    assert ask(plane, BASE, n=0).status_code == 400
    assert plane.http.get(f"{plane.url}/v1/models", headers=KEY).status_code == 200
    assert plane.http.get(f"{plane.url}/v1/models").status_code == 401
    report = counted()
    assert (report.total.requests, report.total.limited, report.total.errors) == (2, 2, 0)
    assert of(report, "pirate").limited == 1
    assert report.other_adapters.limited == 1


def test_a_caller_who_never_was_known_is_in_the_sums(plane: DataPlane, counted: Callable[[], Report]) -> None:
    """Where the server failed; a wrong key, and a probe that says no, are nothing."""
    before = {found.label for found in plane.services.recent.find()}
    plane.authenticator.broken = True
    assert ask(plane).status_code == 500
    plane.authenticator.broken = False
    assert plane.http.get(f"{plane.url}/v1/models").status_code == 401
    report = counted()
    assert (report.total.requests, report.total.errors, report.tenants) == (1, 1, [])
    noted = [found for found in plane.services.recent.find() if found.label not in before]
    assert [(found.status, found.tenant_id, found.kind) for found in noted] == [
        (401, "", "refused"),
        (500, "", "failed"),
    ]


def test_a_refused_sample_is_counted_once(plane: DataPlane, counted: Callable[[], Report]) -> None:
    """A request within the one that submits the sample answers it."""
    before = {found.id for found in plane.services.recent.find()}
    plane.limiter.refuse_admission_with = [Refused("rate_limit_exceeded")]
    asked = {
        "base_model": BASE,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    answer = plane.http.post(f"{plane.url}/api/v1/asample", json=asked, headers={"x-api-key": "tml-lpx_acme"})
    assert answer.status_code == 429, answer.text
    report = counted()
    assert (report.total.requests, report.total.limited) == (1, 1)
    assert len([found for found in plane.services.recent.find() if found.id not in before]) == 1


def test_a_client_that_goes_is_no_failure(plane: DataPlane, counted: Callable[[], Report]) -> None:
    plane.engine.script(Reply(text="abcdefgh", hold=True, hold_after=3))
    body = {"model": "pirate", "prompt": "x", "stream": True}
    with plane.http.stream("POST", f"{plane.url}/v1/completions", json=body, headers=KEY) as answer:
        next(answer.iter_bytes())
    told = of(counted(), "pirate")
    assert (told.requests, told.errors) == (1, 0)
