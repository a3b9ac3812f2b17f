"""`/admin/v1/batches`: all tenants' batches, by pages, and an operator's cancelling."""

from __future__ import annotations

from typing import Any

import httpx

from support.control.batches import make_batch, request_line
from support.http.admin_plane import AdminPlane, assert_problem


async def listed(admin: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while True:
        answer = await admin.get("/batches", params={"limit": 2} | query)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page["data"]) <= 2
        rows += page["data"]
        if page["next_cursor"] is None:
            return rows
        query["cursor"] = page["next_cursor"]


async def test_pages_of_batches_and_cancelling(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    tenants = ("acme", "rival", "acme", "rival", "acme")
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    made = [make_batch(plane.database, [request_line(1)], tenant).id for tenant in tenants]
    rows = await listed(admin)
    assert [row["id"] for row in rows] == made[::-1]
    assert rows[0]["counts"] == {"total": 1, "completed": 0, "failed": 0}
    assert (rows[0]["tenant"], rows[0]["status"], rows[0]["errors"]) == ("acme", "in_progress", [])
    assert [row["id"] for row in await listed(admin, tenant="rival")] == [made[3], made[1]]
    cancelled = await admin.post(f"/batches/{made[0]}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")
    assert_problem(await admin.post("/batches/batch_none/cancel"), 404, "batch_not_found")
    assert_problem(await admin.get("/batches?cursor=YQ=="), 400, "invalid_cursor")
