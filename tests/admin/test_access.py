"""Every route with every kind of key. A route that is not in the table fails the first test."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from loraplex.admin.app import create_operations
from loraplex.admin.openapi import PREFIX
from support.admin import ADMIN_TOKEN, AdminPlane, admin_client

OPERATOR, READ, WRITE = "operator", "adapters:read", "adapters:write"

TABLE: dict[str, str] = {
    "POST /tenants": OPERATOR,
    "GET /tenants": OPERATOR,
    "GET /tenants/{tenant}": OPERATOR,
    "PATCH /tenants/{tenant}": OPERATOR,
    "DELETE /tenants/{tenant}": OPERATOR,
    "POST /tenants/{tenant}/keys": OPERATOR,
    "GET /tenants/{tenant}/keys": OPERATOR,
    "PATCH /tenants/{tenant}/keys/{key}": OPERATOR,
    "POST /tenants/{tenant}/keys/{key}/rotate": OPERATOR,
    "DELETE /tenants/{tenant}/keys/{key}": OPERATOR,
    "GET /tenants/{tenant}/adapters": READ,
    "GET /tenants/{tenant}/adapters/{name}": READ,
    "DELETE /tenants/{tenant}/adapters/{name}": WRITE,
    "POST /tenants/{tenant}/adapters/{name}/versions": WRITE,
    "GET /tenants/{tenant}/adapters/{name}/versions": READ,
    "GET /tenants/{tenant}/adapters/{name}/versions/{version}": READ,
    "GET /tenants/{tenant}/adapters/{name}/versions/{version}/archive": READ,
    "DELETE /tenants/{tenant}/adapters/{name}/versions/{version}": WRITE,
    "PUT /tenants/{tenant}/adapters/{name}/versions/{version}/pin": WRITE,
    "DELETE /tenants/{tenant}/adapters/{name}/versions/{version}/pin": WRITE,
    "GET /tenants/{tenant}/adapters/{name}/release": READ,
    "PUT /tenants/{tenant}/adapters/{name}/release": WRITE,
    "POST /tenants/{tenant}/adapters/{name}/release/promote": WRITE,
    "POST /tenants/{tenant}/adapters/{name}/release/rollback": WRITE,
    "GET /tenants/{tenant}/adapters/{name}/release/history": READ,
    "GET /audit": OPERATOR,
    "GET /usage": OPERATOR,
    "GET /tenants/{tenant}/usage": "usage:read",
    "GET /engine": OPERATOR,
    "GET /cache": OPERATOR,
}

KINDS = {
    "none": (),
    "inference": ("inference", "usage:read"),
    "reader": (READ,),
    "writer": (WRITE,),
    "both": (READ, WRITE),
}


def test_the_table_has_every_route(plane: AdminPlane) -> None:
    rows = {row.name: row.access for row in create_operations(plane.services)}
    assert rows == TABLE


async def call(client: httpx.AsyncClient, route: str, tenant: str) -> httpx.Response:
    """A request that gets as far as the question who may do this: what lies behind it is answered 4xx or 2xx."""
    method, path = route.split(" ")
    values = {"tenant": tenant, "name": "support", "version": "v99", "key": "nokey"}
    return await client.request(method, path.format(**values))


@pytest.mark.parametrize("route", list(TABLE))
async def test_who_may_call_what(plane: AdminPlane, route: str) -> None:
    plane.make_tenant("acme")
    plane.make_tenant("other")
    plane.make_adapter("support", "acme")
    plane.make_adapter("support", "other", seed=2)
    for kind, scopes in KINDS.items():
        if kind == "none":
            continue
        secret = plane.make_key("acme", *scopes)
        async with admin_client(plane.app, secret) as client:
            own = await call(client, route, "acme")
            allowed = TABLE[route] in scopes
            assert (own.status_code != 403) is allowed, (kind, own.text)
            assert own.status_code != 401
            if not allowed:
                assert own.json()["code"] == "insufficient_scope"
            if "{tenant}" in route:
                foreign, unknown = (await call(client, route, "other")), (await call(client, route, "nobody"))
                assert (foreign.status_code, unknown.status_code) == (404, 404)
                assert foreign.json()["code"] == "tenant_not_found"
                assert foreign.text.replace("other", "*") == unknown.text.replace("nobody", "*")
    async with admin_client(plane.app) as client:
        assert (await call(client, route, "acme")).status_code not in (401, 403)
    assert [info.id for info in plane.services.tenants.list().items if info.id == "other"] == ["other"]


async def test_nobody_gets_in_without_a_valid_secret(plane: AdminPlane) -> None:
    plane.make_tenant("acme")
    made, secret = plane.services.keys.create("acme", scopes=[READ, WRITE])
    plane.services.keys.revoke("acme", made.id)
    headers: list[dict[str, Any]] = [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {ADMIN_TOKEN}"},
        {"authorization": f"Bearer {ADMIN_TOKEN}x"},
        {"authorization": f"Bearer {ADMIN_TOKEN[:-1]}"},
        {"authorization": f"Bearer {secret}"},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": ADMIN_TOKEN},
    ]
    async with admin_client(plane.app, None) as client:
        for route, given in itertools.product(TABLE, headers):
            client.headers = httpx.Headers(given)
            answer = await call(client, route, "acme")
            assert answer.status_code == 401, (route, given)
            assert answer.json()["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["content-type"] == "application/problem+json"


async def test_a_stranger_learns_nothing_from_a_wrong_body_or_query(plane: AdminPlane) -> None:
    async with admin_client(plane.app, "lpx_x_y") as client:
        for content in (b"{", b"x" * 1_000_000, b'{"id": "acme", "unknown": 1}'):
            assert (await client.post("/tenants", content=content)).status_code == 401
        assert (await client.get("/tenants?nonsense=1")).status_code == 401


class TestDataPort:
    """The part that is mounted on the data plane."""

    async def test_it_has_the_tenants_own_routes_only(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        plane.make_adapter()
        secret = plane.make_key("acme", READ, WRITE, "usage:read")
        async with admin_client(plane.tenant_app, secret) as client:
            client.base_url = httpx.URL("http://data")
            for route, access in TABLE.items():
                answer = await call(client, route, "acme")
                if access == OPERATOR:
                    assert answer.status_code in (404, 405), route
                    assert answer.json()["code"] in ("not_found", "method_not_allowed")
                else:
                    assert answer.status_code not in (401, 403, 405), route

    async def test_the_admin_token_does_not_work_there(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")
        async with admin_client(plane.tenant_app) as client:
            client.base_url = httpx.URL("http://data")
            answer = await client.get("/tenants/acme/adapters")
            assert (answer.status_code, answer.json()["code"]) == (401, "invalid_api_key")


async def test_a_revoked_key_stops_at_once(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    plane.make_tenant("acme")
    made = (await admin.post("/tenants/acme/keys", json={"scopes": [READ]})).json()
    async with admin_client(plane.app, made["secret"]) as client:
        assert (await client.get("/tenants/acme/adapters")).status_code == 200
        assert (await admin.delete(f"/tenants/acme/keys/{made['id']}")).status_code == 204
        assert (await client.get("/tenants/acme/adapters")).status_code == 401


def test_the_prefix_is_the_documented_one() -> None:
    assert PREFIX == "/admin/v1"
