"""`GET …/release/comparison`: the ledger's requests by version, and the readings of the guard."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import insert

from loraplex.control.db.release_tables import ReleaseRun, ShadowCount
from loraplex.control.db.tables import Usage
from loraplex.lifecycle.release_guard.course import Course, Point
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard
from loraplex.lifecycle.release_guard.rules import parse_rules
from loraplex.lifecycle.release_guard.window import RunningArm
from support.control.usage import ended
from support.http.admin_plane import AdminPlane, admin_client, assert_problem
from support.releases.traffic import ended as outcome

PATH = "/tenants/acme/adapters/support/release"
TARGETS = [{"version": "v1", "weight": 3}, {"version": "v2", "weight": 1}]


@pytest.fixture(autouse=True)
def _versions(plane: AdminPlane) -> None:
    plane.make_tenant("acme")
    for seed in (1, 2):
        plane.make_adapter(seed=seed)


def use(plane: AdminPlane, version: int, count: int, **fields: Any) -> None:
    """Rows of the ledger, from now."""
    rows = [
        ended(adapter="support", version=version, at=datetime.now(UTC), **fields | {"completion_tokens": 11})
        for _ in range(count)
    ]
    with plane.database.write() as session:
        known = Usage.__table__.columns.keys()
        values = [{k: v for k, v in msgspec.structs.asdict(row).items() if k in known} for row in rows]
        session.execute(insert(Usage), values)


def keep(plane: AdminPlane, guard: Guard) -> None:
    with plane.database.write() as session:
        run = session.get(ReleaseRun, ("acme", "support"))
        assert run is not None
        run.guard_state = guard.to_json()


async def test_arms_are_side_by_side(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    await admin.put(PATH, json={"targets": TARGETS})
    use(plane, 1, 19, first_token_s=0.5, total_s=1.5)
    use(plane, 1, 1, status="length", first_token_s=0.5, total_s=1.5)
    use(plane, 2, 3, status="adapter_not_finite", first_token_s=None)
    use(plane, 2, 1, first_token_s=0.25, total_s=2.25)
    found = (await admin.get(f"{PATH}/comparison")).json()
    assert (found["revision"], found["run"], found["guard"]) == (2, None, None)
    first, second = found["arms"]
    assert (first["version"], first["role"], first["weight"]) == ("v1", None, 3)
    assert (first["requests"], first["errors"], first["output_tokens"]) == (20, 0, 11)
    assert first["error_rate"]["value"] == 0
    assert first["error_rate"]["low"] == pytest.approx(0)
    assert first["error_rate"]["high"] == pytest.approx(0.161, abs=0.001)
    bounds = {"p50_interval": {"low": 0.5, "high": 0.5}, "p95_interval": {"low": 0.5, "high": None}}
    assert first["ttft"] == {"p50": 0.5, "p95": 0.5} | bounds
    assert first["itl"]["p50"] == first["itl"]["p95"] == 0.1
    assert first["length_share"] == 0.05
    assert first["length_share_interval"]["low"] == pytest.approx(0.009, abs=0.001)
    assert first["output_length"] == first["output_length"] | {"p50": 11, "p95": 11}
    assert (second["requests"], second["errors"], second["error_rate"]["value"]) == (4, 3, 0.75)
    assert second["ttft"]["p50"] == 0.25


async def test_a_version_without_requests_has_no_numbers(admin: httpx.AsyncClient) -> None:
    (arm,) = (await admin.get(f"{PATH}/comparison")).json()["arms"]
    assert (arm["version"], arm["requests"]) == ("v1", 0)
    names = ("error_rate", "ttft", "itl", "output_tokens", "output_length", "length_share")
    assert [arm[name] for name in (*names, "length_share_interval")] == [None] * 7


async def test_the_guards_readings_stay_after_its_breach(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    begun = (await admin.put(PATH, json={"targets": TARGETS, "guard": {}, "sticky": "user"})).json()
    since = datetime.fromisoformat(begun["run"]["since"]).timestamp()
    guard = Guard(parse_rules({}), Arms(1, 2, 3.0, 1.0), since=since)
    found = (await admin.get(f"{PATH}/comparison")).json()
    assert found["guard"] is None  # nothing was looked at
    keep(plane, guard)
    shown = (await admin.get(f"{PATH}/comparison")).json()["guard"]
    assert shown["needs"] == max(metric["needs"] for metric in shown["metrics"]) > 0
    for number in range(60):
        both = [outcome(version=1, key=f"a{number}-{index}", started_at=since + number) for index in range(3)]
        both.append(outcome(version=2, key=f"b{number}", started_at=since + number, status="internal_error"))
        guard.observe(both, [], since + number + 2)
    keep(plane, guard)
    found = (await admin.get(f"{PATH}/comparison")).json()
    assert [(arm["version"], arm["role"]) for arm in found["arms"]] == [
        ("v1", "control"),
        ("v2", "candidate"),
    ]
    shown = found["guard"]
    assert (shown["verdict"], shown["breach"]) == ("breach", "error_rate")
    assert shown["evidence"] >= shown["threshold"]
    assert shown["needs"] == 0
    assert datetime.fromisoformat(shown["since"]).timestamp() == pytest.approx(since, abs=0.001)
    errors = shown["metrics"][0]
    assert (errors["name"], errors["control"], errors["candidate"]) == ("error_rate", 0, 1)
    assert (errors["allowed"], errors["unended"]) == (0.005, [])
    await admin.post(f"{PATH}/rollback")
    after = (await admin.get(f"{PATH}/comparison")).json()
    assert (after["run"]["status"], after["guard"]) == ("rolled_back", shown)
    assert [(arm["version"], arm["weight"]) for arm in after["arms"]] == [("v1", 100), ("v2", 0)]


async def test_the_evidence_over_time_is_shown_by_guard(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    begun = (await admin.put(PATH, json={"targets": TARGETS, "guard": {}})).json()
    assert (await admin.get(f"{PATH}/comparison")).json()["course"] == []
    since = datetime.fromisoformat(begun["run"]["since"]).timestamp()
    course = Course()
    course.add(0, since, Point(since + 1, 1.0, 200.0, 3, 80))
    course.add(0, since, Point(since + 2, 250.0, 200.0, 9, 0))
    course.add(1, since + 9, Point(since + 10, 1e-300, 1e9, 0, 0))
    with plane.database.write() as session:
        run = session.get(ReleaseRun, ("acme", "support"))
        assert run is not None
        run.course = course.to_json()
    first, second = (await admin.get(f"{PATH}/comparison")).json()["course"]
    assert (first["step"], first["since"]) == (0, begun["run"]["since"])
    numbers = [{key: value for key, value in point.items() if key != "time"} for point in first["points"]]
    assert numbers == [
        {"evidence": 1, "threshold": 200, "part": 0.005, "requests": 3, "needs": 80},
        {"evidence": 250, "threshold": 200, "part": 1.25, "requests": 9, "needs": 0},
    ]
    assert second["points"][0]["part"] == pytest.approx(0)
    times = [datetime.fromisoformat(point["time"]).timestamp() for point in first["points"]]
    assert times == pytest.approx([since + 1, since + 2], abs=0.001)
    # A run that has ended keeps its line; the next release has none of it.
    await admin.post(f"{PATH}/rollback")
    assert (await admin.get(f"{PATH}/comparison")).json()["course"] == [first, second]
    await admin.put(PATH, json={"targets": TARGETS})
    assert (await admin.get(f"{PATH}/comparison")).json()["course"] == []


async def test_answers_that_do_not_end_are_named(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    begun = (await admin.put(PATH, json={"targets": TARGETS, "guard": {}})).json()
    since = datetime.fromisoformat(begun["run"]["since"]).timestamp()
    names = ("output_length", "ttft", "itl")
    rules = parse_rules({"metrics": [{"name": name} for name in names], "max_false_alarm": 1e-6})
    guard = Guard(rules, Arms(1, 2, 1.0, 1.0), since=since)
    guard.observe([outcome(version=1, key=f"a{n}", started_at=since) for n in range(20)], [], since + 3)
    guard.observe(
        [outcome(version=1, key=f"c{n}", started_at=since + 3) for n in range(20)],
        [RunningArm(2, 20, tuple((n * 7919, since) for n in range(20)))],
        since + 60,
    )
    keep(plane, guard)
    metric, *_ = (await admin.get(f"{PATH}/comparison")).json()["guard"]["metrics"]
    assert (metric["candidate"], metric["unended"]) == (None, ["candidate"])


async def test_another_tenants_release_is_not_compared(plane: AdminPlane) -> None:
    plane.make_tenant("rival")
    async with admin_client(plane.app, plane.make_key("rival")) as rival:
        assert_problem(await rival.get(f"{PATH}/comparison"), 404, "tenant_not_found")


async def test_the_shadows_samples_are_summed_up(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    shadow = {"version": "v2", "sample": 1}
    await admin.put(PATH, json={"targets": TARGETS[:1], "shadow": shadow})
    assert (await admin.get(f"{PATH}/comparison")).json()["shadow"] is None
    sums = {"samples": 8, "exact": 6, "diverged_at": 10, "dropped": 1, "failed": 2, "live_tokens": 80}
    sums |= {"shadow_tokens": 90, "scored": 40, "live_logprob": -20.0, "shadow_logprob": -30.0}
    with plane.database.write() as session:
        session.add(ShadowCount(tenant_id="acme", name="support", began=2, version=2, **sums))
    assert (await admin.get(f"{PATH}/comparison")).json()["shadow"] == {
        "version": "v2",
        "began": 2,
        "samples": 8,
        "exact": 6,
        "mean_same_tokens": 5,
        "dropped": 1,
        "failed": 2,
        "live_tokens": 80,
        "shadow_tokens": 90,
        "logprob": -0.5,
        "shadow_logprob": -0.75,
    }
