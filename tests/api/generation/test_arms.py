"""Requests of a watched release: seen while they run, counted when they have ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from loraplex.control.release_types import RunStatus
from loraplex.control.usage.outcome import key_hash
from support.control.runs import running_release
from support.engine.fake_engine import Reply
from support.http.data_plane import DataPlane
from support.waiting import eventually

KEY = {"Authorization": "Bearer lpx_acme"}


def watch(plane: DataPlane, status: RunStatus = "running", candidate: int = 2) -> None:
    plane.resolver.releases["pirate"] = running_release(
        "acme", "pirate", control=1, candidate=candidate, status=status
    )


def post(plane: DataPlane, **fields: Any) -> httpx.Response:
    body = {"model": "pirate", "prompt": "xyz", "user": "u1", **fields}
    return plane.http.post(f"{plane.url}/v1/completions", json=body, headers=KEY)


def running(plane: DataPlane) -> list[dict[str, Any]]:
    return plane.on_loop(plane.services.running_arms.rows)


@contextmanager
def one_runs(plane: DataPlane, model: str = "pirate") -> Iterator[None]:
    """A request is being answered; at the end its engine dies."""
    plane.engine.script(Reply(text="abc", hold=True, hold_after=2))
    body = {"model": model, "prompt": "xyz", "user": "u1", "stream": True}
    with plane.http.stream("POST", f"{plane.url}/v1/completions", json=body, headers=KEY) as answer:
        eventually(lambda: plane.on_loop(lambda: plane.engine.live != []))
        yield
        plane.on_loop(plane.engine.kill)
        answer.read()
    plane.settle_all()


def counted(plane: DataPlane) -> dict[str, float]:
    """Ended requests of pirate@v2, by outcome."""
    text = plane.metrics.text(()).decode()
    found = re.findall(
        r'loraplex_release_requests_total\{adapter="pirate@v2",outcome="(\w+)",tenant="acme"\} (\S+)', text
    )
    return {outcome: float(value) for outcome, value in found}


def test_a_request_is_an_arms_from_its_acceptance_to_its_end(plane: DataPlane) -> None:
    watch(plane)
    before = counted(plane)

    with one_runs(plane):
        (row,) = running(plane)
        (request,) = plane.ledger.accepted
        assert (row["tenant_id"], row["name"], row["version"], row["count"]) == ("acme", "pirate", 2, 1)
        assert row["oldest"] == [[key_hash("u1"), request.at.timestamp()]]
    assert running(plane) == []
    after = counted(plane)
    assert after["failed"] == before.get("failed", 0) + 1


def test_an_answer_counts_as_one_of_the_arm_that_gave_it(plane: DataPlane) -> None:
    watch(plane)
    before = counted(plane)
    post(plane)
    plane.settle_all()
    assert running(plane) == []
    assert counted(plane)["ok"] == before.get("ok", 0) + 1


@pytest.mark.parametrize("why", ["paused", "no arm", "named"])
def test_other_requests_are_no_arms(plane: DataPlane, why: str) -> None:
    watch(plane, "paused" if why == "paused" else "running", candidate=7 if why == "no arm" else 2)
    before = counted(plane)
    model = "pirate@v2" if why == "named" else "pirate"
    with one_runs(plane, model):
        assert running(plane) == []
    assert counted(plane) == before
