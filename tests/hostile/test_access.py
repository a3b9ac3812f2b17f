"""Every route of both ports with every kind of key. A route that is not in the table fails the first test.

The order of questions is the same everywhere: who calls, what the caller may do, and only then what the request holds.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from loraplex.admin.console.routes import static_files
from loraplex.control.db.tables import ApiKey
from support.http.admin_plane import ADMIN_TOKEN
from support.http.route_tables import (
    ADMIN,
    ANY,
    CONSOLE,
    DATA,
    INFER,
    OPEN,
    OPERATOR,
    READ,
    TINKER,
    TRAIN,
    TRAINED,
    USAGE,
    WRITE,
    routes_of,
    scopes_of,
)
from support.http.whole_server import WholeServer, bearer

KEY_IN_A_HEADER = {"POST /v1/messages", "POST /v1/messages/count_tokens"} | {*TINKER, *TRAINED}
"""The header `x-api-key` is as good as Authorization there."""
PORTS = {"data": DATA, "admin": ADMIN}
TABLE = [(port, route) for port, routes in PORTS.items() for route in routes]

VALID: dict[str, frozenset[str]] = {
    "inference only": frozenset({INFER}),
    "restricted to models": frozenset({INFER}),
    "adapters:read": frozenset({READ}),
    "adapters:write": frozenset({WRITE}),
    "adapters:train": frozenset({TRAIN}),
    "usage:read": frozenset({USAGE}),
    "inference and usage:read": frozenset({INFER, USAGE}),
    "adapters:read and adapters:write": frozenset({READ, WRITE}),
    "every scope": frozenset({INFER, READ, WRITE, TRAIN, USAGE}),
    "rotated, within the grace time": frozenset({INFER, READ, WRITE, TRAIN, USAGE}),
}
INVALID = (
    "none",
    "empty header",
    "empty",
    "garbage",
    "not ASCII",
    "endless",
    "another scheme",
    "the admin token in another scheme",
    "another header",
    "the admin token in another header",
    "twice",
    "unknown",
    "unknown secret of a known key",
    "expired",
    "revoked",
    "rotated away",
    "of a deleted tenant",
    "almost the admin token",
    "more than the admin token",
)


def test_the_table_has_every_route(server: WholeServer) -> None:
    for port, app in (("data", server.apps.data), ("admin", server.apps.admin)):
        assert {label for label, _ in routes_of(app)} == set(PORTS[port])
        for label, scopes in scopes_of(app).items():
            assert scopes == (() if PORTS[port][label] == OPEN else (PORTS[port][label],)), label


@pytest.mark.parametrize("port", ["data", "admin"])
def test_the_document_has_every_route(server: WholeServer, port: str) -> None:
    document = server.http.get(f"{getattr(server, f'{port}_url')}/openapi.json").json()
    described = {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    without = (
        {route for route, access in ADMIN.items() if access == OPEN}
        if port == "admin"
        else CONSOLE | set(TRAINED)
    )
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
    tenants.create("suspended")
    suspended = make(every, "suspended")[1]
    tenants.update("suspended", {"suspended": True})
    made |= {
        "of a suspended tenant": bearer(suspended),
        "none": {},
        "empty header": {"authorization": ""},
        "empty": {"authorization": "Bearer"},
        "garbage": bearer("a b;c,d"),
        "not ASCII": {"authorization": b"Bearer \xff\xfe"},  # type: ignore[dict-item]
        "endless": bearer("lpx_" + "x" * 20_000),
        "another scheme": {"authorization": f"Basic {good}"},
        "the admin token in another scheme": {"authorization": f"Basic {ADMIN_TOKEN}"},
        "another header": {"x-api-key": good},
        "the admin token in another header": {"x-api-key": ADMIN_TOKEN},
        "twice": [("authorization", f"Bearer {good}")] * 2,  # type: ignore[dict-item]
        "unknown": bearer("lpx_" + "0" * 16 + "_" + "a" * 43),
        "unknown secret of a known key": bearer(good[:-1] + ("a" if good[-1] != "a" else "b")),
        "expired": bearer(expired),
        "revoked": bearer(revoked),
        "rotated away": bearer(gone),
        "of a deleted tenant": bearer(deleted),
        "almost the admin token": bearer(ADMIN_TOKEN[:-1]),
        "more than the admin token": bearer(ADMIN_TOKEN + "x"),
        "admin token": bearer(ADMIN_TOKEN),
        "of another tenant": bearer(make(every, "rival")[1]),
        **{f"without {scope}": bearer(make(every - {scope}, "rival")[1]) for scope in every},
        "without operator": bearer(make(every, "rival")[1]),
    }
    return made


def ask(
    server: WholeServer, port: str, route: str, headers: Any, tenant: str = "acme", **options: Any
) -> Any:
    """A request that gets no further than who may do this, with a body and names that nothing can be done with."""
    method, path = route.split(" ")
    if method in ("POST", "PUT", "PATCH"):
        options = {"content": b'{"nonsense": 1}', **options}
    return server.http.request(method, url_of(server, port, path, tenant), headers=headers, **options)


def url_of(server: WholeServer, port: str, path: str, tenant: str = "acme") -> str:
    values = {
        "tenant": tenant,
        "name": "nothing",
        "version": "v9",
        "key": "nokey",
        "id": "tiny",
        "replica": "r",
        "verb": "forward",
        "session_id": "session-1",
        "sampler_id": "sampling-abcdefghijk-dGlueQ",
        "batch": "batch_none",
        "file": next(name for name in static_files() if name.endswith("/app.js")),
    }
    return str(getattr(server, f"{port}_url")) + path.format(**values)


def code_of(answer: Any) -> Any:
    """The code of an error, which has the shape of its plane: problem documents under /admin/v1, Anthropic's under
    /v1/messages, which have a type and no code, OpenAI's elsewhere."""
    body = answer.json()
    if answer.request.url.path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"}
        assert set(body["error"]) == {"type", "message"}
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        if body["error"]["type"] == "permission_error":
            return "insufficient_scope" if "model" not in body["error"]["message"] else "model_not_allowed"
        return {"authentication_error": "invalid_api_key"}.get(body["error"]["type"], body["error"]["type"])
    if "error" in body:
        assert not answer.request.url.path.startswith("/admin/v1")
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
        if kind == "another header" and route in KEY_IN_A_HEADER:
            assert answer.status_code in ((400,) if "/messages" in route else (200, 400, 404))
            continue
        if kind == "the admin token in another header" and route in KEY_IN_A_HEADER:
            assert (answer.status_code, code_of(answer)) == (403, "insufficient_scope")
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
        elif access == ANY:
            assert answer.status_code == 200, (kind, answer.text)
        elif access in scopes:
            # It is let in; what it asks for is not there, or is not understood, or is what it wanted.
            names_model = not any(part in route for part in ("/v1/files", "/v1/batches", "/api/v1/"))
            restricted = kind == "restricted to models" and names_model
            wanted = (200, 400, 403) if restricted else (200, 400, 404, 415)
            assert answer.status_code in wanted, (kind, answer.text)
            assert answer.status_code == 200 or code_of(answer) != "insufficient_scope"
        else:
            assert (answer.status_code, code_of(answer)) == (403, "insufficient_scope"), (kind, answer.text)


@pytest.mark.parametrize(("port", "route"), TABLE)
def test_keys_of_a_suspended_tenant(server: WholeServer, secrets: Any, port: str, route: str) -> None:
    answer = ask(server, port, route, secrets["of a suspended tenant"], tenant="suspended")
    if PORTS[port][route] == OPEN:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 403
        assert "tenant is suspended" in answer.text


@pytest.mark.parametrize(("port", "route"), TABLE)
def test_the_admin_token(server: WholeServer, secrets: Any, port: str, route: str) -> None:
    access = PORTS[port][route]
    # On its own port it may do everything: there only to what is not there.
    answer = ask(server, port, route, secrets["admin token"], tenant="acme" if port == "data" else "nobody")
    if access == OPEN:
        assert answer.status_code == 200
    elif port == "admin":
        assert answer.status_code in (200, 400, 404, 415), answer.text
    elif any(start in route for start in (" /v1/", " /skyrl/v1/")) or access == INFER:
        assert (answer.status_code, code_of(answer)) == (403, "insufficient_scope")
    else:
        assert (answer.status_code, code_of(answer)) == (401, "invalid_api_key")


@pytest.mark.parametrize("route", [route for route, access in ADMIN.items() if access == OPERATOR])
def test_the_operators_routes_are_not_on_the_data_port(server: WholeServer, secrets: Any, route: str) -> None:
    answer = ask(server, "data", route, secrets["every scope"])
    assert answer.status_code in (404, 405)
    assert code_of(answer) in ("not_found", "method_not_allowed")


FOREIGN = [
    ("of another tenant", "acme"),
    ("adapters:read", "rival"),
    ("adapters:write", "rival"),
    ("inference and usage:read", "rival"),
    ("adapters:read and adapters:write", "rival"),
]
"""A kind of key, and a tenant that is not its own."""


@pytest.mark.parametrize(("port", "route"), [row for row in TABLE if "{tenant}" in row[1]])
def test_another_tenants_key_sees_what_is_not_there(
    server: WholeServer, secrets: Any, port: str, route: str
) -> None:
    for key, other in FOREIGN:
        theirs = ask(server, port, route, secrets[key], tenant=other)
        nobodys = ask(server, port, route, secrets[key], tenant="nobody")
        assert (theirs.status_code, code_of(theirs)) == (404, "tenant_not_found"), key
        assert (nobodys.status_code, code_of(nobodys)) == (404, "tenant_not_found"), key
        assert theirs.text.replace(other, "*") == nobodys.text.replace("nobody", "*")


CLOSED = [(port, route) for port, route in TABLE if PORTS[port][route] != OPEN]
WRONG: list[dict[str, Any]] = [
    {"content": b"{"},
    {"content": b"x" * 1_000_000},
    {"content": b'{"id": "acme", "unknown": 1}'},
    {"content": b"{}", "headers": {"content-type": "text/plain", "content-encoding": "gzip"}},
    {"params": {"nonsense": "1"}},
]
"""What is wrong with a request that its caller may not make."""


def refusals(port: str, route: str) -> list[tuple[str, int]]:
    """The kinds of keys that a route turns away, with the status of each."""
    access = PORTS[port][route]
    return [("unknown", 401)] + ([] if access == ANY else [(f"without {access}", 403)])


@pytest.mark.parametrize(("port", "route"), CLOSED)
def test_a_stranger_learns_nothing_from_a_wrong_body_or_query(
    server: WholeServer, secrets: Any, port: str, route: str
) -> None:
    for kind, status in refusals(port, route):
        for wrong in WRONG:
            headers = secrets[kind] | wrong.get("headers", {})
            options = {name: value for name, value in wrong.items() if name != "headers"}
            answer = ask(server, port, route, headers, "rival", **options)
            assert answer.status_code == status, (kind, wrong.keys(), answer.text)


def first_words(server: WholeServer, port: str, route: str, key: dict[str, str], length: int) -> bytes:
    """The answer to a head that says how long a body is to come, and asks whether to send it."""
    method, path = route.split(" ")
    url = httpx.URL(url_of(server, port, path, "rival"))
    lines = [f"{method} {url.path} HTTP/1.1", "Host: x", f"Authorization: {key['authorization']}"]
    lines += ["Content-Type: application/json", f"Content-Length: {length}", "Expect: 100-continue"]
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return sock.recv(64)


@pytest.mark.parametrize(("port", "route"), CLOSED)
def test_body_of_a_forbidden_caller_is_not_read(
    server: WholeServer, secrets: Any, port: str, route: str
) -> None:
    for kind, status in refusals(port, route):
        for length in (100, 1 << 40):
            said = first_words(server, port, route, secrets[kind], length)
            assert said.startswith(b"HTTP/1.1 %d " % status), said
    # The same head with a key that may is asked for its body; an upload's is refused by its Content-Type before, and
    # verbs that are refused, and what tells of a client, have none that is read.
    unread = {*TRAINED, "POST /api/v1/telemetry"}
    if (
        route not in unread
        and route.split(" ")[0] in ("POST", "PUT", "PATCH")
        and not route.endswith(("/versions", "/v1/files", "/cancel"))
    ):
        allowed = "admin token" if port == "admin" else "of another tenant"
        assert first_words(server, port, route, secrets[allowed], 100).startswith(b"HTTP/1.1 100 ")


def test_a_revoked_key_stops_at_once(server: WholeServer, secrets: Any) -> None:
    admin = secrets["admin token"]
    keys = f"{server.admin_url}/admin/v1/tenants/acme/keys"
    made = server.http.post(keys, json={"scopes": [READ]}, headers=admin).json()
    for port_url in (server.admin_url, server.data_url):
        url = f"{port_url}/admin/v1/tenants/acme/adapters"
        assert server.http.get(url, headers=bearer(made["secret"])).status_code == 200
    assert server.http.delete(f"{keys}/{made['id']}", headers=admin).status_code == 204
    for port_url in (server.admin_url, server.data_url):
        url = f"{port_url}/admin/v1/tenants/acme/adapters"
        assert server.http.get(url, headers=bearer(made["secret"])).status_code == 401


def test_the_tenants_are_all_still_there(server: WholeServer, secrets: Any) -> None:
    answer = server.http.get(f"{server.admin_url}/admin/v1/tenants", headers=secrets["admin token"])
    assert [row["id"] for row in answer.json()["data"]] == ["acme", "rival", "suspended"]
    adapters = server.http.get(
        f"{server.data_url}/admin/v1/tenants/acme/adapters", headers=secrets["adapters:read"]
    )
    assert [row["name"] for row in adapters.json()["data"]] == ["support"]


def test_one_key_in_two_headers(server: WholeServer, secrets: Any) -> None:
    """Both headers may hold the key, but not two keys; on other routes only Authorization counts."""
    good = secrets["every scope"]
    same = good | {"x-api-key": good["authorization"].removeprefix("Bearer ")}
    two = good | {"x-api-key": secrets["inference only"]["authorization"].removeprefix("Bearer ")}
    for route in sorted(KEY_IN_A_HEADER):
        assert ask(server, "data", route, same).status_code in (
            (200, 400, 404) if "/api/" in route else (400,)
        )
        assert code_of(ask(server, "data", route, two)) == "invalid_api_key"
    assert ask(server, "data", "POST /v1/responses", two).status_code == 400
