"""What a secret is told of itself, on both ports."""

from __future__ import annotations

import httpx

from loraplex.control.types import SCOPES
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME, AdminPlane, admin_client


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
            base = plane.services.catalog.base
            assert told["base"] == {
                "name": SERVED_NAME,
                "model_type": base.model_type,
                "num_layers": base.num_layers,
                "hidden_size": base.sites[0, "q_proj"].in_features,
                "fingerprint": base.fingerprint,
                "max_adapter_rank": plane.services.catalog.max_rank,
            }


async def test_the_admin_token_is_no_tenants(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    told = (await admin.get("/caller")).json()
    assert (told["kind"], told["tenant"], told["key"]) == ("admin", None, None)
    async with admin_client(plane.tenant_app, ADMIN_TOKEN) as client:
        client.base_url = httpx.URL("http://data/")
        assert (await client.get("/caller")).status_code == 401
