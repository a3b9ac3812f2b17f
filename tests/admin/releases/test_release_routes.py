"""Releases: what their routes answer, over the real control services."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from loraplex.admin.app import create_admin_app
from support.http.admin_plane import AdminPlane, admin_client, assert_problem


class TestReleases:
    PATH = "/tenants/acme/adapters/support/release"

    @pytest.fixture(autouse=True)
    def _versions(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        plane.make_adapter(seed=1)
        plane.make_adapter(seed=2)

    async def test_life(self, admin: httpx.AsyncClient) -> None:
        first = (await admin.get(self.PATH)).json()
        assert first["targets"] == [{"version": "v1", "weight": 100}]
        body = {
            "targets": [{"version": "v1", "weight": 90}, {"version": "v2", "weight": 10}],
            "sticky": "user",
        }
        changed = (await admin.put(self.PATH, json=body)).json()
        assert (changed["targets"], changed["sticky"]) == (body["targets"], "user")
        assert (await admin.get(self.PATH)).json() == changed
        promoted = (await admin.post(f"{self.PATH}/promote")).json()
        assert [t["version"] for t in promoted["targets"]] == ["v2"]
        promoted = (await admin.post(f"{self.PATH}/promote", json={"version": "v1"})).json()
        assert [t["version"] for t in promoted["targets"]] == ["v1"]
        back = (await admin.post(f"{self.PATH}/rollback")).json()
        assert [t["version"] for t in back["targets"]] == ["v2"]

    async def test_changes_are_reported_by_action_and_refused_ones_are_not(self, plane: AdminPlane) -> None:
        seen: list[str] = []
        app = create_admin_app(replace(plane.services, on_change=seen.append))
        async with admin_client(app) as admin:
            assert (await admin.get(self.PATH)).status_code == 200
            assert (await admin.put(self.PATH, json={"targets": []})).status_code == 400
            assert (await admin.post(f"{self.PATH}/promote")).status_code == 200
            assert (await admin.post(f"{self.PATH}/rollback")).status_code == 200
        assert seen == ["release.promote", "release.rollback"]

    @pytest.mark.parametrize(
        "body",
        [
            {"targets": []},
            {"targets": [{"version": "v9", "weight": 1}]},
            {"targets": [{"version": "latest", "weight": 1}]},
            {"targets": [{"version": "v1", "weight": 0}]},
            {"targets": [{"version": "v1", "weight": -1}, {"version": "v2", "weight": 2}]},
            {"targets": [{"version": "v1", "weight": 1}, {"version": "v1", "weight": 1}]},
            {"targets": [{"version": "v1", "weight": 1}], "sticky": "sometimes"},
            {"targets": [{"version": "v1", "weight": 1}], "shadow": {"version": "v2"}},
        ],
    )
    async def test_wrong_releases_change_nothing(
        self, admin: httpx.AsyncClient, body: dict[str, Any]
    ) -> None:
        before = (await admin.get(self.PATH)).json()
        assert_problem(await admin.put(self.PATH, json=body), 400, "invalid_value")
        assert (await admin.get(self.PATH)).json() == before

    async def test_a_plan_may_be_null(self, admin: httpx.AsyncClient) -> None:
        body = {"targets": [{"version": "v2", "weight": 1}], "shadow": None, "guard": None, "schedule": None}
        assert (await admin.put(self.PATH, json=body)).status_code == 200

    async def test_rolling_back_step_by_step(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        plane.make_adapter(seed=3)
        for version in ("v2", "v3"):
            await admin.post(f"{self.PATH}/promote", json={"version": version})
        answers = [(await admin.post(f"{self.PATH}/rollback")).json() for _ in range(2)]
        assert [(a["targets"][0]["version"], a["restores"], a["skipped"]) for a in answers] == [
            ("v2", 2, []),
            ("v1", 1, []),
        ]
        assert_problem(await admin.post(f"{self.PATH}/rollback"), 409, "conflict")
        named = (await admin.post(f"{self.PATH}/rollback", json={"to": 3})).json()
        assert (named["targets"][0]["version"], named["restores"]) == ("v3", 3)
        refused = assert_problem(
            await admin.post(f"{self.PATH}/rollback", json={"to": 99}), 400, "invalid_value"
        )
        assert (refused["param"], "kept are 1 to 6" in refused["detail"]) == ("to", True)
        for body in ({"to": 0}, {"to": "2"}, {"to": 1.5}, {"revision": 2}):
            assert (await admin.post(f"{self.PATH}/rollback", json=body)).status_code == 400
        await admin.delete("/tenants/acme/adapters/support/versions/v2")
        answer = (await admin.post(f"{self.PATH}/rollback")).json()
        assert answer["skipped"] == [{"revision": 2, "reason": "v2 is deleted"}]
        assert answer["targets"] == [{"version": "v1", "weight": 100}]

    async def test_the_history_is_paged(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        await admin.post(f"{self.PATH}/promote")
        key = plane.make_key("acme", "adapters:write")
        async with admin_client(plane.app, key) as client:
            await client.post(f"{self.PATH}/rollback")
        first = (await admin.get(f"{self.PATH}/history?limit=2")).json()
        told = [(r["revision"], r["origin"], r["restores"], r["actor"]) for r in first["data"]]
        assert told == [(3, "rollback", 1, "key"), (2, "promote", None, "admin")]
        assert first["data"][0]["actor_key_id"] == key.split("_")[1]
        assert first["data"][0] == (await admin.get(self.PATH)).json()
        rest = await admin.get(f"{self.PATH}/history", params={"limit": 2, "cursor": first["next_cursor"]})
        assert [r["origin"] for r in rest.json()["data"]] == ["upload"]
        assert rest.json()["next_cursor"] is None
        missing = await admin.get(f"{self.PATH.replace('support', 'none')}/history")
        assert_problem(missing, 404, "adapter_not_found")

    async def test_a_change_may_be_made_conditional(self, admin: httpx.AsyncClient) -> None:
        seen = (await admin.get(self.PATH)).headers["etag"]
        assert seen == '"1"'
        body = {"targets": [{"version": "v2", "weight": 1}]}

        async def change(condition: str, path: str = "") -> httpx.Response:
            method, json = ("POST", None) if path else ("PUT", body)
            headers = {"if-match": condition}
            return await admin.request(method, self.PATH + path, json=json, headers=headers)

        for wrong in ('"2"', "1", 'W/"1"', '"x"', '"01x"', '"99999999999999999999"'):
            assert_problem(await change(wrong), 412, "precondition_failed")
        assert_problem(await change('"2"', "/promote"), 412, "precondition_failed")
        assert_problem(await change('"2"', "/rollback"), 412, "precondition_failed")
        assert (await admin.get(self.PATH)).headers["etag"] == seen
        assert (await change('"7", "1"')).headers["etag"] == '"2"'
        assert (await change('"2"', "/rollback")).headers["etag"] == '"3"'
        assert (await change("*", "/promote")).headers["etag"] == '"4"'

    async def test_nothing_to_release(self, admin: httpx.AsyncClient) -> None:
        assert_problem(await admin.get(self.PATH.replace("support", "none")), 404, "release_not_found")
        assert_problem(await admin.post(f"{self.PATH}/rollback"), 409, "conflict")
