"""Keys are made by operators alone, so that no key can make one that may more than it; and what a key is shows."""

from __future__ import annotations

import httpx
import pytest

from loraplex.admin.app import admin_routes
from loraplex.control.db.outage import Outage
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.types import SCOPES
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME, AdminPlane, admin_client


def test_every_route_about_keys_needs_the_operator() -> None:
    about_keys = [row for row in admin_routes() if "/keys" in row.path]
    assert len(about_keys) == 5
    assert {row.access for row in about_keys} == {"operator"}


@pytest.mark.parametrize("port", ["admin", "tenant"])
async def test_a_key_with_every_scope_can_neither_make_nor_change_a_key(plane: AdminPlane, port: str) -> None:
    plane.make_tenant()
    secret = plane.make_key("acme", *SCOPES)
    key_id = secret.split("_")[1]
    app = plane.app if port == "admin" else plane.tenant_app
    base = "/tenants/acme/keys"
    async with admin_client(app, secret) as client:
        if port == "tenant":
            client.base_url = httpx.URL("http://data/")
        answers = [
            await client.post(base, json={"scopes": list(SCOPES)}),
            await client.get(base),
            await client.patch(f"{base}/{key_id}", json={"models": None, "limits": None}),
            await client.post(f"{base}/{key_id}/rotate", json={"grace_seconds": 60}),
            await client.delete(f"{base}/{key_id}"),
        ]
    expected = (403, "insufficient_scope") if port == "admin" else (404, "not_found")
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [expected] * 5
    (only,) = plane.services.keys.list("acme").items
    assert (only.id, only.revoked_at, only.previous_valid_until) == (key_id, None, None)


async def test_a_keys_last_use_shows(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    plane.make_tenant()
    key_id = plane.make_key().split("_")[1]
    (shown,) = (await admin.get("/tenants/acme/keys")).json()["data"]
    assert shown["last_used_at"] is None
    use = KeyUse(plane.database)
    use.note(key_id)
    use.flush()
    (shown,) = (await admin.get("/tenants/acme/keys")).json()["data"]
    assert shown["last_used_at"].endswith("Z")
    rotated = (await admin.post(f"/tenants/acme/keys/{key_id}/rotate", json={"grace_seconds": 60})).json()
    assert rotated["last_used_at"] == shown["last_used_at"]
    assert rotated["previous_valid_until"] > shown["last_used_at"]


def never() -> None:
    raise OSError("still gone")


async def test_an_outage_is_a_503_that_says_when_to_come_again(
    plane: AdminPlane, admin: httpx.AsyncClient
) -> None:
    plane.make_tenant()
    plane.database.outage = Outage(never)  # it does not come back
    plane.database.outage.report_lost("as if")
    for answer in (await admin.get("/tenants"), await admin.post("/tenants", json={"id": "late"})):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "database_unavailable"
    plane.database.outage.close()


async def test_a_key_is_told_its_tenant_its_rights_and_the_base(plane: AdminPlane) -> None:
    plane.make_tenant()
    plane.make_tenant("rival")
    for scopes in (("inference",), ("adapters:read",), SCOPES):
        secret = plane.make_key("acme", *scopes)
        for app, base_url in ((plane.app, None), (plane.tenant_app, "http://data/")):
            async with admin_client(app, secret) as client:
                if base_url is not None:
                    client.base_url = httpx.URL(base_url)
                told = (await client.get("/caller")).json()
            assert (told["kind"], told["tenant"]) == ("key", "acme")
            assert told["key"]["id"] == secret.split("_")[1]
            assert set(told["key"]["scopes"]) == set(scopes)
            assert "secret" not in told["key"]
            assert told["max_upload_bytes"] == plane.max_upload_bytes
            assert told["data_url"] is None
            base = plane.services.catalog.base
            assert told["base"] == {
                "name": SERVED_NAME,
                "model_type": base.model_type,
                "num_layers": base.num_layers,
                "hidden_size": base.sites[0, "q_proj"].in_features,
                "vocab_size": base.sites[0, "embed_tokens"].in_features,
                "fingerprint": base.fingerprint,
                "max_adapter_rank": plane.services.catalog.max_rank,
            }


async def test_the_admin_token_is_no_tenants(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    told = (await admin.get("/caller")).json()
    assert (told["kind"], told["tenant"], told["key"]) == ("admin", None, None)
    async with admin_client(plane.tenant_app, ADMIN_TOKEN) as client:
        client.base_url = httpx.URL("http://data/")
        assert (await client.get("/caller")).status_code == 401
