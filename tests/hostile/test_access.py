"""Every route of both ports with every kind of key. A route that is not in the table fails the first test."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from starlette.routing import Mount, Route, Router

from loraplex.admin.plane import Plane
from loraplex.control.tables import ApiKey
from support.admin import ADMIN_TOKEN
from support.whole_server import WholeServer, bearer

OPEN, INFER, OPERATOR = "open", "inference", "operator"
READ, WRITE, USAGE = "adapters:read", "adapters:write", "usage:read"

OWN = "/admin/v1/tenants/{tenant}/adapters"
TENANT_ROUTES = {
    f"GET {OWN}": READ,
    f"GET {OWN}/{{name}}": READ,
    f"DELETE {OWN}/{{name}}": WRITE,
    f"POST {OWN}/{{name}}/versions": WRITE,
    f"GET {OWN}/{{name}}/versions": READ,
    f"GET {OWN}/{{name}}/versions/{{version}}": READ,
    f"GET {OWN}/{{name}}/versions/{{version}}/archive": READ,
    f"DELETE {OWN}/{{name}}/versions/{{version}}": WRITE,
    f"PUT {OWN}/{{name}}/versions/{{version}}/pin": WRITE,
    f"DELETE {OWN}/{{name}}/versions/{{version}}/pin": WRITE,
    f"GET {OWN}/{{name}}/release": READ,
    f"PUT {OWN}/{{name}}/release": WRITE,
    f"POST {OWN}/{{name}}/release/promote": WRITE,
    f"POST {OWN}/{{name}}/release/rollback": WRITE,
    f"GET {OWN}/{{name}}/release/history": READ,
    "GET /admin/v1/tenants/{tenant}/usage": USAGE,
}
PROBES = dict.fromkeys(("GET /livez", "GET /readyz", "GET /startupz", "GET /health"), OPEN)
DATA: dict[str, str] = {
    "POST /v1/chat/completions": INFER,
    "POST /v1/completions": INFER,
    "GET /v1/models": INFER,
    "GET /v1/models/{id}": INFER,
    "GET /metrics": OPEN,
    "GET /openapi.json": OPEN,
    "GET /version": OPEN,
    **PROBES,
    **TENANT_ROUTES,
}
ADMIN: dict[str, str] = {
    "POST /admin/v1/tenants": OPERATOR,
    "GET /admin/v1/tenants": OPERATOR,
    "GET /admin/v1/tenants/{tenant}": OPERATOR,
    "PATCH /admin/v1/tenants/{tenant}": OPERATOR,
    "DELETE /admin/v1/tenants/{tenant}": OPERATOR,
    "POST /admin/v1/tenants/{tenant}/keys": OPERATOR,
    "GET /admin/v1/tenants/{tenant}/keys": OPERATOR,
    "PATCH /admin/v1/tenants/{tenant}/keys/{key}": OPERATOR,
    "POST /admin/v1/tenants/{tenant}/keys/{key}/rotate": OPERATOR,
    "DELETE /admin/v1/tenants/{tenant}/keys/{key}": OPERATOR,
    "GET /admin/v1/audit": OPERATOR,
    "GET /admin/v1/usage": OPERATOR,
    "GET /admin/v1/engine": OPERATOR,
    "GET /admin/v1/cache": OPERATOR,
    "GET /metrics": OPEN,
    "GET /openapi.json": OPEN,
    "GET /docs": OPEN,
    **PROBES,
    **TENANT_ROUTES,
}
PORTS = {"data": DATA, "admin": ADMIN}
TABLE = [(port, route) for port, routes in PORTS.items() for route in routes]

VALID: dict[str, frozenset[str]] = {
    "inference only": frozenset({INFER}),
    "restricted to models": frozenset({INFER}),
    "adapters:read": frozenset({READ}),
    "adapters:write": frozenset({WRITE}),
    "usage:read": frozenset({USAGE}),
    "every scope": frozenset({INFER, READ, WRITE, USAGE}),
    "rotated, within the grace time": frozenset({INFER, READ, WRITE, USAGE}),
}
INVALID = (
    "none",
    "empty",
    "garbage",
    "not ASCII",
    "endless",
    "another scheme",
    "another header",
    "twice",
    "unknown",
    "unknown secret of a known key",
    "expired",
    "revoked",
    "rotated away",
    "of a deleted tenant",
    "almost the admin token",
)


def routes_of(app: Any, prefix: str = "") -> Iterable[str]:
    """`METHOD /path` of every route that an app really has, through its layers and mounts."""
    while not isinstance(app, Router):
        app = app._router if isinstance(app, Plane) else getattr(app, "_app", None) or app.app
    for route in app.routes:
        if isinstance(route, Mount):
            yield from routes_of(route.app, prefix + route.path)
            continue
        assert isinstance(route, Route), route
        methods = route.methods or set(route.endpoint._by_method)
        for method in methods - {"HEAD"}:
            yield f"{method} {prefix}{route.path.replace(':path', '')}"


def test_the_table_has_every_route(server: WholeServer) -> None:
    assert set(routes_of(server.apps.data)) == set(DATA)
    assert set(routes_of(server.apps.admin)) == set(ADMIN)


@pytest.mark.parametrize("port", ["data", "admin"])
def test_the_document_has_every_route(server: WholeServer, port: str) -> None:
    document = server.http.get(f"{getattr(server, f'{port}_url')}/openapi.json").json()
    described = {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    without = {route for route, access in ADMIN.items() if access == OPEN} if port == "admin" else set()
    assert described == set(PORTS[port]) - without
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            is_open = PORTS[port][f"{method.upper()} {path}"] == OPEN
            assert (operation.get("security") == []) is is_open


@pytest.fixture(scope="module")
def secrets(server: WholeServer) -> dict[str, dict[str, str]]:
    """Headers of each kind of key of `acme`, and of `rival`."""
    keys, tenants = server.plane.services.keys, server.plane.services.tenants

    def make(scopes: Iterable[str], tenant: str = "acme", **options: Any) -> tuple[str, str]:
        info, secret = keys.create(tenant, scopes=sorted(scopes), **options)
        return info.id, secret

    every = VALID["every scope"]
    made = {kind: bearer(make(scopes)[1]) for kind, scopes in VALID.items()}
    made["restricted to models"] = bearer(make({INFER}, models=["nothing-of-this-name"])[1])
    rotated_id, rotated = make(every)
    keys.rotate("acme", rotated_id, grace_seconds=3600)
    made["rotated, within the grace time"] = bearer(rotated)
    gone_id, gone = make(every)
    keys.rotate("acme", gone_id)
    revoked_id, revoked = make(every)
    keys.revoke("acme", revoked_id)
    expired_id, expired = make(every, expires_at=datetime.now(UTC) + timedelta(days=1))
    with server.plane.database.write() as session:
        past = datetime.now(UTC) - timedelta(seconds=5)
        session.execute(update(ApiKey).where(ApiKey.id == expired_id).values(expires_at=past))
    tenants.create("deleted")
    _, deleted = make(every, "deleted")
    tenants.delete("deleted")
    good = make(every)[1]
    made |= {
        "none": {},
        "empty": {"authorization": "Bearer"},
        "garbage": bearer("a b;c,d"),
        "not ASCII": {"authorization": b"Bearer \xff\xfe"},  # type: ignore[dict-item]
        "endless": bearer("lpx_" + "x" * 20_000),
        "another scheme": {"authorization": f"Basic {good}"},
        "another header": {"x-api-key": good},
        "twice": [("authorization", f"Bearer {good}")] * 2,  # type: ignore[dict-item]
        "unknown": bearer("lpx_" + "0" * 16 + "_" + "a" * 43),
        "unknown secret of a known key": bearer(good[:-1] + ("a" if good[-1] != "a" else "b")),
        "expired": bearer(expired),
        "revoked": bearer(revoked),
        "rotated away": bearer(gone),
        "of a deleted tenant": bearer(deleted),
        "almost the admin token": bearer(ADMIN_TOKEN[:-1]),
        "admin token": bearer(ADMIN_TOKEN),
        "of another tenant": bearer(make(every, "rival")[1]),
    }
    return made


def ask(server: WholeServer, port: str, route: str, headers: Any, tenant: str = "acme") -> Any:
    """A request that gets no further than who may do this, with a body and names that nothing can be done with."""
    method, path = route.split(" ")
    values = {"tenant": tenant, "name": "nothing", "version": "v9", "key": "nokey", "id": "tiny"}
    url = getattr(server, f"{port}_url") + path.format(**values)
    content = b'{"nonsense": 1}' if method in ("POST", "PUT", "PATCH") else None
    return server.http.request(method, url, headers=headers, content=content)


def code_of(answer: Any) -> Any:
    body = answer.json()
    if "error" in body:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
        return body["error"]["code"]
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(body) >= {"type", "title", "status", "detail", "code"}
    return body["code"]


@pytest.mark.parametrize(("port", "route"), TABLE)
def test_keys_that_are_none(server: WholeServer, secrets: Any, port: str, route: str) -> None:
    for kind in INVALID:
        answer = ask(server, port, route, secrets[kind])
        assert answer.headers["x-request-id"]
        if PORTS[port][route] == OPEN:
            assert answer.status_code == 200, kind
            continue
        assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key"), kind
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("port", "route"), TABLE)
def test_keys_that_are_some(server: WholeServer, secrets: Any, port: str, route: str) -> None:
    access = PORTS[port][route]
    for kind, scopes in VALID.items():
        answer = ask(server, port, route, secrets[kind])
        if access == OPEN:
            assert answer.status_code == 200
        elif access in scopes:
            # It is let in; what it asks for is not there, or is not understood, or is what it wanted.
            wanted = (200, 400, 404, 415) if kind != "restricted to models" else (200, 400, 403)
            assert answer.status_code in wanted, (kind, answer.text)
            assert answer.status_code == 200 or code_of(answer) != "insufficient_scope"
        else:
            assert (answer.status_code, code_of(answer)) == (403, "insufficient_scope"), (kind, answer.text)


@pytest.mark.parametrize(("port", "route"), TABLE)
def test_the_admin_token(server: WholeServer, secrets: Any, port: str, route: str) -> None:
    access = PORTS[port][route]
    # On its own port it may do everything: there only to what is not there.
    answer = ask(server, port, route, secrets["admin token"], tenant="acme" if port == "data" else "nobody")
    if access == OPEN:
        assert answer.status_code == 200
    elif port == "admin":
        assert answer.status_code in (200, 400, 404, 415), answer.text
    elif access == INFER:
        assert (answer.status_code, code_of(answer)) == (403, "insufficient_scope")
    else:
        assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key")


@pytest.mark.parametrize(("port", "route"), [row for row in TABLE if "{tenant}" in row[1]])
def test_another_tenants_key_sees_what_is_not_there(
    server: WholeServer, secrets: Any, port: str, route: str
) -> None:
    key = secrets["of another tenant"]
    theirs, nobodys = ask(server, port, route, key), ask(server, port, route, key, tenant="nobody")
    assert (theirs.status_code, code_of(theirs)) == (404, "tenant_not_found")
    assert (nobodys.status_code, code_of(nobodys)) == (404, "tenant_not_found")
    assert theirs.text.replace("acme", "nobody") == nobodys.text


def test_the_tenants_are_all_still_there(server: WholeServer, secrets: Any) -> None:
    answer = server.http.get(f"{server.admin_url}/admin/v1/tenants", headers=secrets["admin token"])
    assert [row["id"] for row in answer.json()["data"]] == ["acme", "rival"]
    adapters = server.http.get(
        f"{server.data_url}/admin/v1/tenants/acme/adapters", headers=secrets["adapters:read"]
    )
    assert [row["name"] for row in adapters.json()["data"]] == ["support"]
