"""Releases with a guard, a schedule or a shadow: what their routes take, refuse and show."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http.admin_plane import AdminPlane, admin_client, assert_problem

PATH = "/tenants/acme/adapters/support/release"
BOTH = [{"version": "v1", "weight": 50}, {"version": "v2", "weight": 50}]
GUARD = {"metrics": [{"name": "error_rate", "margin": 0.02}], "max_false_alarm": 0.001, "min_requests": 5}
SCHEDULE = [{"weight": 1, "for_seconds": 600}, {"weight": 10, "for_seconds": 3600}]
SHADOW = {"version": "v3", "sample": 0.25, "keep_texts": True}


@pytest.fixture(autouse=True)
def _versions(plane: AdminPlane) -> None:
    plane.make_tenant("acme")
    for seed in (1, 2, 3):
        plane.make_adapter(seed=seed)


async def put(admin: httpx.AsyncClient, **plan: Any) -> httpx.Response:
    return await admin.put(PATH, json={"targets": BOTH, "sticky": "user"} | plan)


async def test_a_plan_is_shown_as_it_was_given_and_where_it_stands(admin: httpx.AsyncClient) -> None:
    made = (await put(admin, guard=GUARD, schedule=SCHEDULE, shadow=SHADOW)).json()
    assert (made["guard"], made["schedule"], made["shadow"]) == (GUARD, SCHEDULE, SHADOW)
    assert made["targets"] == [{"version": "v1", "weight": 99}, {"version": "v2", "weight": 1}]
    run = made["run"]
    assert (run["status"], run["step"], run["reason"], run["began"]) == ("running", 0, None, 2)
    assert (run["control"], run["candidate"]) == ("v1", "v2")
    assert run["since"] == made["created_at"]
    assert (await admin.get(PATH)).json() == made
    newest, first = (await admin.get(f"{PATH}/history")).json()["data"]
    assert newest == made
    assert [first[field] for field in ("guard", "schedule", "shadow", "run", "began", "reason")] == [None] * 6


async def test_what_a_guard_leaves_out_has_its_default(admin: httpx.AsyncClient) -> None:
    guard = (await put(admin, guard={})).json()["guard"]
    assert (guard["max_false_alarm"], guard["min_requests"]) == (0.01, 20)
    assert {metric["name"]: metric["margin"] for metric in guard["metrics"]} == {
        "error_rate": 0.005,
        "ttft": 0.1,
        "itl": 0.1,
        "output_length": 0.2,
        "length_share": 0.05,
    }
    guard = (await put(admin, guard={"metrics": [{"name": "ttft"}]})).json()["guard"]
    assert guard["metrics"] == [{"name": "ttft", "margin": 0.1}]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guard": []}, "guard"),
    ({"guard": {"margin": 0.1}}, "guard"),
    ({"guard": {"metrics": [{"name": "speed"}]}}, "guard.metrics[0].name"),
    ({"guard": {"metrics": [{"name": "ttft", "margin": 11}]}}, "guard.metrics[0].margin"),
    ({"guard": {"max_false_alarm": 0.5}}, "guard.max_false_alarm"),
    ({"guard": {"min_requests": -1}}, "guard.min_requests"),
    ({"schedule": []}, "schedule"),
    ({"schedule": [SCHEDULE, SCHEDULE]}, "schedule[0]"),
    ({"schedule": [SCHEDULE[1], SCHEDULE[0]]}, "schedule[1].weight"),
    ({"schedule": [{"weight": 5, "for_seconds": 0}]}, "schedule[0].for_seconds"),
    ({"shadow": {"version": "v3"}}, "shadow.sample"),
    ({"shadow": SHADOW | {"sample": 0}}, "shadow.sample"),
    ({"shadow": SHADOW | {"sample": 1.5}}, "shadow.sample"),
    ({"shadow": SHADOW | {"version": "v9"}}, "shadow.version"),
    ({"shadow": SHADOW | {"version": "v1"}}, "shadow.version"),
    ({"shadow": SHADOW | {"texts": True}}, "shadow.texts"),
    ({"guard": {}, "targets": BOTH[:1]}, "targets"),
]


async def test_a_wrong_plan_names_its_field_and_changes_nothing(admin: httpx.AsyncClient) -> None:
    before = (await admin.get(PATH)).json()
    for plan, param in WRONG:
        code = "unknown_field" if param == "shadow.texts" else "invalid_value"
        assert assert_problem(await put(admin, **plan), 400, code)["param"] == param, plan
    assert (await admin.get(PATH)).json() == before


async def test_a_pause_keeps_the_revision_and_a_resume_begins_the_step_again(
    admin: httpx.AsyncClient, plane: AdminPlane
) -> None:
    begun = await put(admin, schedule=SCHEDULE)
    etag = begun.headers["etag"]
    for action, status in (("pause", "paused"), ("resume", "running")):
        stale = await admin.post(f"{PATH}/{action}", headers={"if-match": '"1"'})
        assert_problem(stale, 412, "precondition_failed")
        done = await admin.post(f"{PATH}/{action}", headers={"if-match": etag})
        assert (done.status_code, done.headers["etag"], done.json()["run"]["status"]) == (200, etag, status)
        assert (await admin.get(PATH)).json() == done.json()
        assert_problem(await admin.post(f"{PATH}/{action}"), 409, "conflict")
    rows = (await admin.get("/audit", params={"action": "release.pause", "outcome": "done"})).json()["data"]
    assert [(row["actor"], row["after"]["status"]) for row in rows] == [("admin", "paused")]


async def test_nothing_that_runs_can_be_paused(admin: httpx.AsyncClient) -> None:
    for action in ("pause", "resume"):
        assert_problem(await admin.post(f"{PATH}/{action}"), 409, "conflict")


async def test_a_second_schedule_waits_for_the_end_of_the_first(admin: httpx.AsyncClient) -> None:
    before = (await put(admin, schedule=SCHEDULE)).json()
    assert_problem(await put(admin, schedule=SCHEDULE), 409, "conflict")
    assert (await admin.get(PATH)).json() == before
    await admin.post(f"{PATH}/promote", json={"version": "v2"})
    assert (await put(admin, schedule=SCHEDULE)).status_code == 200


async def test_a_key_of_the_tenant_pauses_by_its_scope(plane: AdminPlane) -> None:
    async with admin_client(plane.tenant_app, plane.make_key("acme")) as tenant:
        # The application that the data port mounts has no prefix.
        tenant.base_url = "http://data"
        assert (await tenant.put(PATH, json={"targets": BOTH, "guard": {}})).status_code == 200
        assert (await tenant.post(f"{PATH}/pause")).json()["run"]["status"] == "paused"
        assert (await tenant.get(f"{PATH}/comparison")).status_code == 200
    async with admin_client(plane.tenant_app, plane.make_key("acme", "adapters:read")) as reader:
        reader.base_url = "http://data"
        assert_problem(await reader.post(f"{PATH}/resume"), 403, "insufficient_scope")
