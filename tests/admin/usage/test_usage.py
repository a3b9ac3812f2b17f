"""`/usage` over HTTP: who may ask, what is refused, and the two forms of its answer."""

from __future__ import annotations

import asyncio
import csv
import io
import threading
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert

from loraplex.control.db.tables import Usage
from loraplex.control.usage.report import UsageReports
from support.control.usage import ended
from support.http.admin_plane import AdminPlane, admin_client

DAY = {"start": "2026-03-01T00:00:00Z", "end": "2026-03-02T00:00:00Z"}


@pytest.fixture
def used(plane: AdminPlane) -> AdminPlane:
    """Two tenants' usage of a day, and some of the day after."""
    plane.make_tenant("acme")
    plane.make_tenant("rival")
    hours = [("acme", 1), ("acme", 1), ("acme", 5), ("rival", 5), ("acme", 24), ("rival", 23)]
    rows = [
        ended(
            at=datetime(2026, 3, 1 + hour // 24, hour % 24, 30, tzinfo=UTC),
            tenant_id=tenant,
            completion_tokens=10,
            **({"adapter": "json", "version": 3} if hour == 5 else {}),
        )
        for tenant, hour in hours
    ]
    with plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
    return plane


async def get(plane: AdminPlane, path: str, secret: str | None = None, **query: Any) -> Any:
    headers = query.pop("headers", {})
    options = {} if secret is None else {"secret": secret}
    app = plane.app if secret is None else plane.tenant_app
    async with admin_client(app, **options) as client:
        url = path if secret is None else f"http://admin{path}"
        return await client.get(url, params=query, headers=headers)


async def test_sums_of_all_tenants(used: AdminPlane) -> None:
    answer = await get(used, "/usage", **DAY, group_by="adapter,tenant,version")
    assert answer.status_code == 200
    empty = {"key": None, "status": None}
    assert answer.json() == {
        "data": [
            {
                "start": "2026-03-01T00:00:00Z",
                "tenant": tenant,
                "adapter": adapter,
                "version": version,
                "requests": requests,
                "prompt_tokens": 10 * requests,
                "cached_tokens": 0,
                "completion_tokens": 10 * requests,
            }
            | empty
            for tenant, adapter, version, requests in [
                ("acme", "(base)", None, 2),
                ("acme", "json", "v3", 1),
                ("rival", "(base)", None, 1),
                ("rival", "json", "v3", 1),
            ]
        ],
        "next_cursor": None,
    }


async def test_sums_of_one_tenant_by_the_hour(used: AdminPlane) -> None:
    answer = await get(used, "/usage", **DAY, bucket="hour", tenant="acme")
    assert [(row["start"][11:13], row["requests"]) for row in answer.json()["data"]] == [("01", 2), ("05", 1)]


async def test_a_tenant_sees_its_own_on_the_data_port(used: AdminPlane) -> None:
    secret = used.make_key("acme", "usage:read")
    answer = await get(used, "/tenants/acme/usage", secret, **DAY, bucket="none", group_by="tenant")
    (row,) = answer.json()["data"]
    assert (row["tenant"], row["requests"], row["start"]) == ("acme", 3, None)
    assert (await get(used, "/tenants/rival/usage", secret, **DAY)).status_code == 404
    assert (await get(used, "/usage", secret, **DAY)).status_code == 404  # not served there
    other = used.make_key("acme", "adapters:read", "inference")
    refused = await get(used, "/tenants/acme/usage", other, **DAY)
    assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")


async def test_pages(used: AdminPlane) -> None:
    rows, cursor = [], {}
    for _ in range(2):
        page = (await get(used, "/usage", **DAY, group_by="tenant", limit=1, **cursor)).json()
        rows += [row["tenant"] for row in page["data"]]
        cursor = {"cursor": page["next_cursor"]}
    assert rows == ["acme", "rival"]
    assert cursor == {"cursor": None}


async def test_csv(used: AdminPlane) -> None:
    answer = await get(
        used, "/usage", **DAY, group_by="tenant", limit=1, headers={"accept": "text/csv, */*;q=0.1"}
    )
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert "accept" in answer.headers["vary"].lower()
    assert list(csv.reader(io.StringIO(answer.text))) == [
        ["start", "tenant", "requests", "prompt_tokens", "cached_tokens", "completion_tokens"],
        ["2026-03-01T00:00:00Z", "acme", "3", "30", "0", "30"],
    ]
    cursor = answer.headers["x-next-cursor"]
    rest = await get(used, "/usage", **DAY, group_by="tenant", cursor=cursor, headers={"accept": "text/csv"})
    assert "rival" in rest.text
    assert "x-next-cursor" not in rest.headers


@pytest.mark.parametrize("accept", ["application/json", "*/*", "text/*", "text/csvx"])
async def test_json_unless_csv_is_asked_for(used: AdminPlane, accept: str) -> None:
    answer = await get(used, "/usage", **DAY, headers={"accept": accept})
    assert answer.headers["content-type"] == "application/json"


async def test_the_last_thirty_days_without_a_period(used: AdminPlane) -> None:
    with used.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(ended(at=datetime.now(UTC)))])
    answer = await get(used, "/usage", bucket="none")
    assert answer.json()["data"][0]["requests"] == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"bucket": "week"}, "bucket"),
        ({"group_by": "tenant,tenant"}, "group_by"),
        ({"group_by": "secret"}, "group_by"),
        ({"group_by": ""}, "group_by"),
        ({"start": "2026-03-01"}, "start"),
        ({"start": "2026-03-01T00:00:00"}, "start"),
        ({"start": "yesterday"}, "start"),
        ({"start": "2026-03-02T00:00:00Z", "end": "2026-03-01T00:00:00Z"}, "start"),
        ({"end": "0001-01-01T00:00:00Z"}, None),
        ({"limit": "0"}, "limit"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"tenant": "a\x00b"}, "tenant"),
        ({"what": "1"}, "what"),
    ],
)
async def test_invalid_queries_are_refused(
    used: AdminPlane, query: dict[str, str], param: str | None
) -> None:
    answer = await get(used, "/usage", **query)
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert param is None or answer.json()["param"] == param


async def test_a_tenants_usage_outlives_it(used: AdminPlane) -> None:
    used.services.tenants.delete("acme")
    answer = await get(used, "/usage", **DAY, bucket="none", tenant="acme")
    assert answer.json()["data"][0]["requests"] == 3


async def test_sums_that_take_long_keep_nobody_waiting(
    used: AdminPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant asks for half of what may be asked at a time; another still gets its own, and so does everything
    else."""
    go = threading.Event()
    real = UsageReports.sums

    def slow(*given: Any, tenant: str, **options: Any) -> Any:
        assert tenant != "acme" or go.wait(60)
        return real(*given, tenant=tenant, **options)

    monkeypatch.setattr(UsageReports, "sums", slow)
    keys = {tenant: used.make_key(tenant, "usage:read") for tenant in ("acme", "rival")}
    gate = used.services.report_gate

    async def ask(tenant: str) -> int:
        return int((await get(used, f"/tenants/{tenant}/usage", keys[tenant], **DAY)).status_code)

    asked = [asyncio.create_task(ask("acme")) for _ in range(4)]
    try:
        while gate.reports.held("acme") < 4:
            await asyncio.sleep(0.005)
        assert await ask("acme") == 503
        assert await ask("rival") == 200
        assert (await get(used, "/tenants")).status_code == 200
    finally:
        go.set()
    assert await asyncio.gather(*asked) == [200] * 4
    assert len(gate.reports) == 0
