"""What the admin port takes over from `loraplex.http`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import structlog

from loraplex.admin import app
from support.http.admin_plane import AdminPlane, assert_problem
from support.http.quiet import all_levels


async def test_a_405_names_every_method_of_the_path(admin: httpx.AsyncClient) -> None:
    answer = await admin.put("/tenants")
    assert_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert "Allowed: GET, HEAD, POST." in answer.json()["detail"]
    head = await admin.head("/tenants")
    assert (head.status_code, head.content) == (200, b"")


async def test_log_lines_carry_an_id_that_no_client_chooses(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(plane.services.tenants, "list", fails)
    merged = structlog.contextvars.merge_contextvars
    with all_levels(), structlog.testing.capture_logs(processors=[merged]) as lines:
        for _ in range(2):
            assert_problem(
                await admin.get("/tenants", headers={"x-request-id": "chosen"}), 500, "internal_error"
            )
    assert [line["event"] for line in lines] == ["request_failed", "admin_request"] * 2
    assert {line["request_id"] for line in lines} == {"chosen"}
    first, second = {line["id"] for line in lines[:2]}, {line["id"] for line in lines[2:]}
    assert len(first) == len(second) == 1
    assert first != second


async def test_a_secret_that_is_not_ascii_is_a_malformed_header(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/tenants", headers={"authorization": "Bearer schlüssel".encode("latin-1")})
    problem = assert_problem(answer, 401, "invalid_api_key")
    assert problem["param"] == "Authorization"
    assert "Authorization: Bearer" in problem["detail"]
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_concurrent_first_requests_share_one_document(
    admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    original = app.openapi_document

    def counted(*given: Any) -> dict[str, Any]:
        made.append(original(*given))
        return made[-1]

    monkeypatch.setattr(app, "openapi_document", counted)
    paths = ["/openapi.json", "/docs"] * 4
    answers = await asyncio.gather(*(admin.get(str(admin.base_url.copy_with(path=path))) for path in paths))
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json() == made[0]
    assert len(made) == 1
