"""The list of requests that failed or were slow: whose, by which filters, a page after another."""

from __future__ import annotations

import httpx
import pytest

from loraplex.control.recent_requests import EndedRequest
from support.control.requests import ended_request
from support.http.admin_plane import AdminPlane, admin_client, assert_problem


def note(plane: AdminPlane, number: int, **changes: object) -> EndedRequest:
    made = ended_request(number, status=503, code="adapter_unavailable", **changes)
    plane.services.recent.note(made)
    return made


async def test_a_request_as_it_is_shown(admin: httpx.AsyncClient, plane: AdminPlane) -> None:
    plane.make_tenant("acme")
    note(plane, 1)
    (row,) = (await admin.get("/requests")).json()["data"]
    assert row == {
        "request_id": "req-1",
        "id": f"{1:032x}",
        "time": "1970-01-12T13:46:40.001Z",
        "kind": "failed",
        "tenant": "acme",
        "key": "k",
        "route": "/v1/chat/completions",
        "model": None,
        "adapter": "support",
        "version": "v3",
        "status": 503,
        "code": "adapter_unavailable",
        "seconds": {"queue": 0.1, "load": None, "first_token": 0.5, "total": 2.0},
        "tokens": {"prompt": 7, "cached": 0, "completion": 5},
        "trace_id": None,
    }
    plane.services.recent.note(ended_request(2, tenant_id="", key_id="", adapter=None, version=0, status=401))
    (row, _) = (await admin.get("/requests")).json()["data"]
    assert [row[name] for name in ("tenant", "key", "adapter", "version")] == [None] * 4


async def test_filters_and_pages(admin: httpx.AsyncClient, plane: AdminPlane) -> None:
    for number in range(7):
        note(plane, number, tenant_id="acme" if number % 2 else "rival")
    found: list[str] = []
    cursor = None
    while True:
        page = (
            await admin.get("/requests", params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
        ).json()
        found += [row["request_id"] for row in page["data"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert found == [f"req-{number}" for number in reversed(range(7))]

    async def ids(**params: object) -> list[str]:
        return [row["request_id"] for row in (await admin.get("/requests", params=params)).json()["data"]]  # type: ignore[arg-type]

    assert await ids(tenant="acme") == ["req-5", "req-3", "req-1"]
    assert await ids(id="req-2") == ["req-2"]
    assert await ids(id=f"cmpl-{2:032x}") == ["req-2"]
    assert await ids(adapter="support@v3", status=503, kind="failed", tenant="rival", limit=2) == [
        "req-6",
        "req-4",
    ]
    assert await ids(kind="refused") == await ids(status=200) == await ids(adapter="(base)") == []


@pytest.mark.parametrize(
    "query",
    [
        "status=99",
        "status=ok",
        "kind=bad",
        "adapter=",
        f"adapter={'a' * 81}",
        f"id={'a' * 161}",
        "id=%00",
        "tenant=",
        "limit=0",
        "since=1",
        "id=a&id=b",
        "cursor=YQ==",
        "cursor=4oKB",
        "cursor=%21",
    ],
)
async def test_wrong_filters_are_refused(admin: httpx.AsyncClient, query: str) -> None:
    assert (await admin.get(f"/requests?{query}")).status_code == 400


async def test_a_tenant_sees_its_own_alone(admin: httpx.AsyncClient, plane: AdminPlane) -> None:
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
        note(plane, 1, tenant_id=tenant, label=f"of-{tenant}")
    plane.services.recent.note(ended_request(2, tenant_id="", status=401))
    for app in (plane.app, plane.tenant_app):
        prefix = "" if app is plane.app else "http://admin"
        async with admin_client(app, plane.make_key("acme", "usage:read")) as client:
            for query in ("", "?id=of-rival", f"?id={1:032x}"):
                answer = await client.get(f"{prefix}/tenants/acme/requests{query}")
                shown = [row["request_id"] for row in answer.json()["data"]]
                assert shown == ([] if "rival" in query else ["of-acme"])
            assert_problem(await client.get(f"{prefix}/tenants/rival/requests"), 404, "tenant_not_found")
            wrong = await client.get(f"{prefix}/tenants/acme/requests?tenant=rival")
            assert_problem(wrong, 400, "unknown_parameter")
    assert_problem(await admin.get("/tenants/nobody/requests"), 404, "tenant_not_found")
