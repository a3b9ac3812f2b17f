"""What is not understood is refused with a problem document, never ignored and never a 500."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import pytest

from loraplex.admin.app import PREFIX, admin_routes
from support.http.admin_plane import ADMIN_TOKEN, AdminPlane, admin_client

ROUTES = [
    "GET /tenants",
    "GET /tenants/acme",
    "DELETE /tenants/acme",
    "GET /tenants/acme/adapters/support/versions",
    "POST /tenants/acme/adapters/support/release/rollback",
    "GET /engine",
    "GET /engine/experts",
    "GET /cache",
]


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    assert set(body) >= {"type", "title", "status", "detail", "code"}
    assert body["status"] == answer.status_code
    return answer.status_code, body["code"]


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/tenants", {"id": "a", "limit": {}}, "'limit', did you mean 'limits'?"),
        (
            "/tenants",
            {"id": "a", "limits": {"request_per_minute": 1}},
            "'limits.request_per_minute', did you mean 'requests_per_minute'?",
        ),
        ("/tenants/acme/keys", {"expires_on": None}, "'expires_on', did you mean 'expires_at'?"),
        ("/tenants", {"id": "a", "x" * 100_000: 1}, "There is no field 'xxxx"),
    ],
)
async def test_what_an_unknown_field_may_have_meant(
    plane: AdminPlane, admin: httpx.AsyncClient, path: str, body: Any, meant: str
) -> None:
    plane.make_tenant()
    answer = await admin.post(path, json=body)
    assert problem(answer)[0] == 400
    assert meant in answer.json()["detail"]


async def test_what_an_unknown_parameter_may_have_meant(admin: httpx.AsyncClient) -> None:
    told = (await admin.get("/usage?group_bye=tenant")).json()["detail"]
    assert told.startswith("There is no query parameter 'group_bye', did you mean 'group_by'? Known here: ")


@pytest.mark.parametrize("route", ROUTES)
async def test_unknown_query_parameters(plane: AdminPlane, admin: httpx.AsyncClient, route: str) -> None:
    plane.make_tenant()
    method, path = route.split(" ")
    for query in ("?nonsense=1", "?Limit=3", "?limit=1&limit=2", "?=x"):
        code = problem(await admin.request(method, path + query))
        assert code[0] == 400, query
    assert plane.services.tenants.get("acme").id == "acme"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nonsense", 404, "not_found"),
        ("GET", "/tenants/", 404, "not_found"),
        ("GET", "/tenants/a/b/c/d", 404, "not_found"),
        ("GET", "/usages", 404, "not_found"),
        ("PUT", "/tenants", 405, "method_not_allowed"),
        ("DELETE", "/tenants", 405, "method_not_allowed"),
        ("OPTIONS", "/tenants", 405, "method_not_allowed"),
        ("TRACE", "/tenants", 405, "method_not_allowed"),
        ("POST", "/cache", 405, "method_not_allowed"),
        ("GET", "/tenants/" + "a" * 5000, 404, "not_found"),
        ("GET", "/tenants/a%00b", 404, "not_found"),
        ("GET", "/tenants/a%0D%0Ab", 404, "not_found"),
        ("GET", "/tenants/%F0%9F%98%80", 404, "tenant_not_found"),
        ("GET", "/tenants/%ff", 404, "tenant_not_found"),
    ],
)
async def test_unknown_paths_and_methods(
    admin: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    answer = await admin.request(method, path)
    assert problem(answer) == (status, code)
    if status == 405:
        assert "GET" in answer.headers["allow"]


BODIES = {
    "not json": b"{",
    "an array": b"[]",
    "a string": b'"acme"',
    "nothing": b"",
    "NaN": b'{"id": "acme", "weight": NaN}',
    "infinity": b'{"id": "acme", "weight": 1e999}',
    "a key twice": b'{"id": "acme", "id": "other"}',
    "a lone surrogate": b'{"id": "acme", "display_name": "\\ud800"}',
    "not utf-8": b'{"id": "acme", "display_name": "\xff"}',
    "utf-16": '{"id": "acme"}'.encode("utf-16"),
    "nested deeply": b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an endless number": b'{"id": "acme", "weight": ' + b"9" * 5000 + b"}",
    "trailing text": b'{"id": "acme"} extra',
}


@pytest.mark.parametrize("name", list(BODIES))
async def test_bodies_that_are_no_object(plane: AdminPlane, admin: httpx.AsyncClient, name: str) -> None:
    answer = await admin.post("/tenants", content=BODIES[name], headers={"content-type": "application/json"})
    code = "invalid_value" if name == "infinity" else "invalid_json"  # a number, of the wrong size
    assert problem(answer) == (400, code)
    assert plane.services.tenants.list().items == ()


async def test_body_types_and_sizes(admin: httpx.AsyncClient, plane: AdminPlane) -> None:
    good = b'{"id": "acme"}'
    form = await admin.post("/tenants", content=good, headers={"content-type": "text/plain"})
    assert problem(form) == (415, "unsupported_media_type")
    packed = await admin.post("/tenants", content=good, headers={"content-encoding": "gzip"})
    assert problem(packed) == (415, "unsupported_media_type")
    large = await admin.post("/tenants", content=b" " * 300_000 + good)
    assert problem(large) == (413, "request_too_large")
    plane.make_tenant()
    unwanted = await admin.request("DELETE", "/tenants/acme/adapters/x", json={"to": 1})
    assert problem(unwanted) == (400, "invalid_value")
    with_charset = await admin.post(
        "/tenants", content=b'{"id": "b"}', headers={"content-type": "application/json; charset=utf-8"}
    )
    assert with_charset.status_code == 201


async def test_random_bodies_are_never_a_500(admin: httpx.AsyncClient) -> None:
    rng = random.Random(7)
    scraps: list[Any] = [None, True, 0, -1, 2**53, 1.5, "", "acme", "\u0000", [], {}, ["a"], {"a": 1}]
    fields = ["id", "weight", "display_name", "limits", "scopes", "models", "expires_at", "x", ""]
    for _ in range(400):
        body = {rng.choice(fields): rng.choice(scraps) for _ in range(rng.randint(0, 4))}
        for path in ("/tenants", "/tenants/acme/keys", "/tenants/acme/keys/k/rotate"):
            answer = await admin.post(path, json=body)
            assert answer.status_code in (200, 201, 400, 404, 409), (path, body, answer.text)


async def test_an_unforeseen_failure_is_a_500_that_tells_nothing(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail /path")

    monkeypatch.setattr(plane.services.tenants, "list", broken)
    answer = await admin.get("/tenants", headers={"x-request-id": "my id\n1"})
    assert problem(answer) == (500, "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "myid1"


async def test_head_is_get_without_a_body(admin: httpx.AsyncClient) -> None:
    assert (await admin.head("/tenants")).status_code == 200


class TestDocument:
    async def test_openapi_describes_every_route_and_resolves(
        self, plane: AdminPlane, admin: httpx.AsyncClient
    ) -> None:
        async with admin_client(plane.app, None) as client:  # no token needed
            client.base_url = httpx.URL("http://admin")
            answer = await client.get("/openapi.json")
        document = answer.json()
        described = {
            f"{method.upper()} {path.removeprefix(PREFIX)}"
            for path, methods in document["paths"].items()
            for method in methods
        }
        assert described == {row.label for row in admin_routes()}
        names = [m["operationId"] for methods in document["paths"].values() for m in methods.values()]
        assert len(set(names)) == len(names)
        for ref in re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document)):
            target: Any = document
            for step in ref.removeprefix("#/").split("/"):
                target = target[step]
            assert isinstance(target, dict)
        assert ADMIN_TOKEN not in answer.text

    async def test_the_page_needs_nothing_from_elsewhere(self, plane: AdminPlane) -> None:
        async with admin_client(plane.app, None) as client:
            client.base_url = httpx.URL("http://admin")
            answer = await client.get("/docs")
        assert answer.headers["content-type"].startswith("text/html")
        assert "http://" not in answer.text.lower()
        assert "https://" not in answer.text
        assert "<script" not in answer.text
        for row in admin_routes():
            assert row.path in answer.text

    async def test_other_paths_of_the_port_are_problems_too(self, plane: AdminPlane) -> None:
        async with admin_client(plane.app, None) as client:
            client.base_url = httpx.URL("http://admin")
            for path in ("/", "/admin", "/v1/models", "/docs/"):
                assert problem(await client.get(path)) == (404, "not_found")
            assert problem(await client.post("/docs")) == (405, "method_not_allowed")
