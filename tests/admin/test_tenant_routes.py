"""Tenants and keys: what each route answers, over the real control services."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from support.http.admin_plane import AdminPlane, admin_client, assert_problem

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


class TestTenants:
    async def test_life(self, admin: httpx.AsyncClient) -> None:
        body = {"id": "acme", "display_name": "Acme ✓", "weight": 2, "limits": {"requests_per_minute": 60}}
        made = await admin.post("/tenants", json=body)
        assert made.status_code == 201
        assert made.headers["location"] == "/admin/v1/tenants/acme"
        shown = made.json()
        assert RFC3339.fullmatch(shown.pop("created_at"))
        limits = shown.pop("limits")
        assert limits.pop("requests_per_minute") == 60
        assert set(limits) == {
            "tokens_per_minute",
            "max_concurrency",
            "max_sequences",
            "token_budget",
            "budget_period",
            "max_adapters",
            "max_adapter_bytes",
            "max_output_tokens",
            "device_bytes_reserved",
            "device_bytes_max",
            "host_bytes_max",
            "batch_tokens",
            "batch_percent",
            "file_days",
        }
        assert set(limits.values()) == {None}
        assert shown == {
            "id": "acme",
            "display_name": "Acme ✓",
            "weight": 2.0,
            "budget": None,
            "stored": {"adapters": None, "bytes": None},
            "suspended_at": None,
        }
        assert_problem(await admin.post("/tenants", json=body), 409, "conflict")
        changed = await admin.patch("/tenants/acme", json={"limits": {"max_concurrency": 3}})
        assert changed.json()["limits"]["requests_per_minute"] == 60
        assert changed.json()["limits"]["max_concurrency"] == 3
        changed = await admin.patch(
            "/tenants/acme", json={"display_name": None, "limits": {"max_concurrency": None}}
        )
        assert changed.json()["display_name"] is None
        assert changed.json()["limits"]["max_concurrency"] is None
        assert (await admin.get("/tenants/acme")).json() == changed.json()
        assert (await admin.delete("/tenants/acme")).status_code == 200
        for method in ("GET", "DELETE"):
            assert_problem(await admin.request(method, "/tenants/acme"), 404, "tenant_not_found")

    async def test_a_suspended_tenants_keys_wait_for_its_return(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        """In force at once, however often it is said; a revoked key is told no more than before."""
        for tenant in ("acme", "rival"):
            plane.make_tenant(tenant)
        secrets = {tenant: plane.make_key(tenant) for tenant in ("acme", "rival")}
        revoked = plane.make_key("acme")
        plane.services.keys.revoke("acme", revoked.split("_")[1])

        async def status(secret: str) -> tuple[int, str | None]:
            tenant = "rival" if secret == secrets["rival"] else "acme"
            async with admin_client(plane.tenant_app, secret) as client:
                answer = await client.get(f"http://admin/tenants/{tenant}/adapters")
                return answer.status_code, answer.json().get("code")

        assert await status(secrets["acme"]) == (200, None)
        since = [
            (await admin.patch("/tenants/acme", json={"suspended": True})).json()["suspended_at"]
            for _ in range(2)
        ]
        assert RFC3339.fullmatch(since[0])
        assert since[0] == since[1]
        assert await status(secrets["acme"]) == (403, "tenant_suspended")
        assert await status(plane.make_key("acme")) == (403, "tenant_suspended")
        assert await status(revoked) == (401, "invalid_api_key")
        assert await status(secrets["rival"]) == (200, None)
        (row, *_) = (await admin.get("/audit?action=tenant.update")).json()["data"]
        assert row["after"]["suspended"] is True
        assert (await admin.patch("/tenants/acme", json={"weight": 3})).json()["suspended_at"] == since[0]
        assert (await admin.patch("/tenants/acme", json={"suspended": False})).json()["suspended_at"] is None
        assert await status(secrets["acme"]) == (200, None)
        assert_problem(await admin.patch("/tenants/acme", json={"suspended": 1}), 400, "invalid_value")

    async def test_pages_have_everything_once(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        names = [f"t{n:02d}" for n in range(7)]
        for name in names:
            plane.make_tenant(name)
        found, cursor, pages = [], None, 0
        while True:
            page = (
                await admin.get("/tenants", params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
            ).json()
            found += [row["id"] for row in page["data"]]
            cursor, pages = page["next_cursor"], pages + 1
            if cursor is None:
                break
        assert (found, pages) == (names, 3)
        assert_problem(await admin.get("/tenants?cursor=%21%21"), 400, "invalid_cursor")
        assert_problem(await admin.get("/tenants?limit=0"), 400, "invalid_value")
        assert_problem(await admin.get("/tenants?limit=1e3"), 400, "invalid_value")

    @pytest.mark.parametrize(
        ("body", "code", "param"),
        [
            ({}, "invalid_value", "id"),
            ({"id": "UPPER"}, "invalid_value", "id"),
            ({"id": "../etc"}, "invalid_value", "id"),
            ({"id": "a" * 64}, "invalid_value", "id"),
            ({"id": 7}, "invalid_value", "id"),
            ({"id": "a", "weight": 0}, "invalid_value", "weight"),
            ({"id": "a", "weight": True}, "invalid_value", "weight"),
            ({"id": "a", "weight": "2"}, "invalid_value", "weight"),
            ({"id": "a", "display_name": "a\u0000b"}, "invalid_value", "display_name"),
            ({"id": "a", "nonsense": 1}, "unknown_field", "nonsense"),
            ({"id": "a", "limits": {"nonsense": 1}}, "unknown_field", "limits.nonsense"),
            (
                {"id": "a", "limits": {"requests_per_minute": 0}},
                "invalid_value",
                "limits.requests_per_minute",
            ),
            (
                {"id": "a", "limits": {"requests_per_minute": 1.5}},
                "invalid_value",
                "limits.requests_per_minute",
            ),
            (
                {"id": "a", "limits": {"requests_per_minute": 2**55}},
                "invalid_value",
                "limits.requests_per_minute",
            ),
            ({"id": "a", "limits": {"token_budget": 5}}, "invalid_value", "limits.budget_period"),
            (
                {"id": "a", "limits": {"token_budget": 5, "budget_period": "week"}},
                "invalid_value",
                "limits.budget_period",
            ),
        ],
    )
    async def test_wrong_values_are_named(
        self, admin: httpx.AsyncClient, body: dict[str, Any], code: str, param: str
    ) -> None:
        assert assert_problem(await admin.post("/tenants", json=body), 400, code)["param"] == param
        assert (await admin.get("/tenants")).json()["data"] == []


class TestKeys:
    async def test_life(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        given: dict[str, Any] = {"name": "ci", "scopes": ["adapters:read"], "models": ["support"]}
        given["expires_at"] = "2099-01-01T01:00:00+01:00"
        made = await admin.post("/tenants/acme/keys", json=given)
        assert made.status_code == 201
        assert made.headers["cache-control"] == "no-store"
        key = made.json()
        assert key["secret"].startswith(f"lpx_{key['id']}_")
        assert key["expires_at"] == "2099-01-01T00:00:00Z"
        listed = await admin.get("/tenants/acme/keys")
        assert "secret" not in listed.json()["data"][0]
        assert key["secret"] not in listed.text
        rotated = (
            await admin.post(f"/tenants/acme/keys/{key['id']}/rotate", json={"grace_seconds": 60})
        ).json()
        assert rotated["id"] == key["id"]
        assert rotated["secret"] != key["secret"]
        for secret in (key["secret"], rotated["secret"]):
            async with admin_client(plane.app, secret) as client:
                assert (await client.get("/tenants/acme/adapters")).status_code == 200
        again = (await admin.post(f"/tenants/acme/keys/{key['id']}/rotate")).json()
        for secret, status in ((key["secret"], 401), (rotated["secret"], 401), (again["secret"], 200)):
            async with admin_client(plane.app, secret) as client:
                assert (await client.get("/tenants/acme/adapters")).status_code == status
        assert (await admin.delete(f"/tenants/acme/keys/{key['id']}")).status_code == 204
        assert (await admin.get("/tenants/acme/keys")).json()["data"][0]["revoked_at"] is not None

    async def test_a_change_touches_what_it_names_alone(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.make_tenant("acme")
        limits = {"max_concurrency": 3, "requests_per_minute": 9}
        made = (await admin.post("/tenants/acme/keys", json={"name": "ci", "limits": limits})).json()
        secret, one = made.pop("secret"), f"/tenants/acme/keys/{made['id']}"
        changed = await admin.patch(one, json={"limits": {"max_concurrency": None, "tokens_per_minute": 5}})
        assert changed.status_code == 200
        assert secret not in changed.text
        made["limits"] |= {"max_concurrency": None, "tokens_per_minute": 5}
        assert changed.json() == made
        end = "2099-01-01T00:00:00Z"
        changed = await admin.patch(
            one, json={"name": None, "scopes": ["adapters:read"], "models": ["a"], "expires_at": end}
        )
        made |= {"name": None, "scopes": ["adapters:read"], "models": ["a"], "expires_at": end}
        assert changed.json() == made
        changed = await admin.patch(one, json={"scopes": None, "models": None, "expires_at": None})
        made |= {"models": None, "expires_at": None}
        assert changed.json() == made
        assert (await admin.get("/tenants/acme/keys")).json()["data"] == [made]
        assert (await admin.patch(one, json={})).json() == made
        await admin.delete(one)
        assert_problem(await admin.patch(one, json={"name": "x"}), 400, "invalid_value")

    async def test_no_body_makes_an_inference_key(self, admin: httpx.AsyncClient, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        assert (await admin.post("/tenants/acme/keys")).json()["scopes"] == ["inference"]

    @pytest.mark.parametrize(
        "body",
        [
            {"scopes": []},
            {"scopes": ["everything"]},
            {"scopes": "inference"},
            {"expires_at": "2001-01-01T00:00:00Z"},
            {"expires_at": "2099-01-01T00:00:00"},
            {"expires_at": 4070908800},
            {"expires_at": "9999-12-31T23:59:59-14:00"},
            {"expires_at": "0001-01-01T00:00:00+14:00"},
            {"models": [""]},
            {"models": ["a\u0000b"]},
            {"limits": {"max_adapters": 3}},
        ],
    )
    async def test_wrong_values(
        self, admin: httpx.AsyncClient, plane: AdminPlane, body: dict[str, Any]
    ) -> None:
        plane.make_tenant("acme")
        assert_problem(await admin.post("/tenants/acme/keys", json=body), 400, "invalid_value")
        made = (await admin.post("/tenants/acme/keys")).json()
        refused = await admin.patch(f"/tenants/acme/keys/{made['id']}", json=body)
        assert_problem(refused, 400, "invalid_value")
        (kept,) = (await admin.get("/tenants/acme/keys")).json()["data"]
        assert kept == {name: value for name, value in made.items() if name != "secret"}

    async def test_another_tenants_key_is_not_found(
        self, admin: httpx.AsyncClient, plane: AdminPlane
    ) -> None:
        plane.make_tenant("acme")
        plane.make_tenant("other")
        key = (await admin.post("/tenants/other/keys")).json()
        for method, path in (("DELETE", ""), ("POST", "/rotate"), ("PATCH", "")):
            answer = await admin.request(method, f"/tenants/acme/keys/{key['id']}{path}", json={})
            assert_problem(answer, 404, "key_not_found")
