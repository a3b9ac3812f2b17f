"""/history and a tenant's own: who may ask, what is refused, and what is told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http.admin_plane import AdminPlane, admin_client, assert_problem

SLICE_S = 10.0
NOTHING = {
    "requests": 0,
    "errors": 0,
    "limited": 0,
    "computed_tokens": 0,
    "cached_tokens": 0,
    "output_tokens": 0,
    "first_token_seconds": None,
    "first_token_p95_seconds": None,
    "gap_seconds": None,
    "gap_p95_seconds": None,
}


@pytest.fixture
def asked(plane: AdminPlane) -> AdminPlane:
    """Ten requests of two tenants in one slice. The three of rival have failed."""
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    history = plane.services.history
    began = history.clock() + SLICE_S
    history.clock = lambda: began
    for _ in range(6):
        history.count("acme", ("support", 2), computed=5, cached=4, output=3, first_token_s=0.3, gap_s=0.025)
    history.count("acme", ("(base)", 0), limited=True)
    for _ in range(3):
        history.count("rival", ("support", 1), failed=True)
    history.clock = lambda: began + SLICE_S
    return plane


async def get(plane: AdminPlane, path: str, secret: str) -> httpx.Response:
    async with admin_client(plane.tenant_app, secret) as client:
        return await client.get(f"http://admin{path}")


def named(body: Any) -> list[tuple[str, str, str | None, int]]:
    return [
        (row["tenant"], row["adapter"], row["version"], row["figures"]["requests"])
        for row in body["adapters"]
    ]


async def test_all_tenants(asked: AdminPlane, admin: httpx.AsyncClient) -> None:
    body = (await admin.get("/history")).json()
    assert (body["slice_seconds"], len(body["slices"]), body["exact"]) == (10, 30, True)
    assert [one["figures"] for one in body["slices"][:-1]] == [NOTHING] * 29
    assert body["slices"][-1]["figures"] == body["total"]
    assert (body["total"]["requests"], body["total"]["errors"], body["total"]["limited"]) == (10, 3, 1)
    assert [(row["tenant"], row["adapter"], row["figures"]["errors"]) for row in body["tenants"]] == [
        ("rival", None, 3),
        ("acme", None, 0),
    ]
    assert named(body) == [
        ("rival", "support", "v1", 3),
        ("acme", "(base)", None, 1),
        ("acme", "support", "v2", 6),
    ]
    assert body["adapters"][-1]["figures"] == {
        "requests": 6,
        "errors": 0,
        "limited": 0,
        "computed_tokens": 30,
        "cached_tokens": 24,
        "output_tokens": 18,
        "first_token_seconds": pytest.approx(0.3),
        "first_token_p95_seconds": pytest.approx(0.39),
        "gap_seconds": pytest.approx(0.025),
        "gap_p95_seconds": pytest.approx(0.0295),
    }
    assert body["other_tenants"] == body["other_adapters"] == NOTHING
    server = asked.services.history.server
    assert (body["server"]["id"], body["server"]["node"]) == (server.id, server.node)


async def test_a_filter_an_order_and_a_limit(asked: AdminPlane, admin: httpx.AsyncClient) -> None:
    of_acme = (await admin.get("/history?tenant=acme&sort=requests&limit=1")).json()
    assert named(of_acme) == [("acme", "support", "v2", 6)]
    assert (of_acme["total"]["requests"], of_acme["other_adapters"]["limited"]) == (7, 1)
    assert [row["tenant"] for row in of_acme["tenants"]] == ["acme"]
    of_name = (await admin.get("/history?adapter=support")).json()
    assert (len(named(of_name)), of_name["total"]["requests"], of_name["tenants"]) == (2, 9, [])
    assert (await admin.get("/history?tenant=nobody")).json()["total"] == NOTHING


async def test_an_hour(asked: AdminPlane, admin: httpx.AsyncClient) -> None:
    began = asked.services.history.clock()
    asked.services.history.clock = lambda: began + 60
    body = (await admin.get("/history?range=1h")).json()
    assert (body["slice_seconds"], len(body["slices"]), body["total"]["requests"]) == (60, 60, 10)


@pytest.mark.parametrize(
    "query", ["range=2h", "range=", "sort=name", "limit=0", "limit=501", "tenant=" + "a" * 64, "adapter=%00"]
)
async def test_what_is_refused(admin: httpx.AsyncClient, query: str) -> None:
    problem = assert_problem(await admin.get(f"/history?{query}"), 400, "invalid_value")
    assert problem["param"] == query.partition("=")[0]


async def test_a_tenant_sees_its_own_alone(asked: AdminPlane) -> None:
    secret = asked.make_key("acme", "usage:read")
    answer = await get(asked, "/tenants/acme/history", secret)
    body = answer.json()
    assert [row["tenant"] for row in (*body["tenants"], *body["adapters"])] == ["acme"] * 3
    assert (body["total"]["requests"], body["total"]["errors"]) == (7, 0)
    assert body["other_tenants"] == body["other_adapters"] == NOTHING
    assert body["server"]["node"] is None
    assert "rival" not in answer.text
    assert (await get(asked, "/tenants/rival/history", secret)).status_code == 404
    assert_problem(await get(asked, "/tenants/acme/history?tenant=rival", secret), 400, "unknown_parameter")
    assert (await get(asked, "/history", secret)).status_code == 404  # not served there
    other = asked.make_key("acme", "adapters:read", "inference")
    assert_problem(await get(asked, "/tenants/acme/history", other), 403, "insufficient_scope")
