"""The order of questions on a route, and the routes' exactness, in an application with nothing else in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import pytest
import structlog
from fastapi import APIRouter, Request, Security
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from loraplex.adapters.errors import LoraplexError
from loraplex.control.types import Principal
from loraplex.http.application import create_app, refused_until_started
from loraplex.http.bearer import bearer_secret
from loraplex.http.body import read_body
from loraplex.http.boundary import ErrorBoundary
from loraplex.http.context import context_of
from loraplex.http.document import describe
from loraplex.http.edge import Edge
from loraplex.http.errors import (
    BearerInvalid,
    BodyEncoded,
    BodyTooLarge,
    MethodNotAllowed,
    PathUnknown,
    RequestError,
)
from loraplex.http.routing import NO_BODY, OrderedRoute, caller

STATUS = {
    BearerInvalid: 401,
    PathUnknown: 404,
    MethodNotAllowed: 405,
    BodyTooLarge: 413,
    BodyEncoded: 415,
    PermissionError: 403,
    ValueError: 400,
}


class Refused:
    """Any error, as its type's name."""

    param = None

    def __init__(self, error: Exception) -> None:
        self.status = STATUS.get(type(error), 500)
        self.code = type(error).__name__
        self.allow = error.allowed if isinstance(error, MethodNotAllowed) else None

    def response(self) -> Response:
        return JSONResponse({"code": self.code, "allow": self.allow}, self.status)


class Boundary(ErrorBoundary):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, structlog.get_logger())

    def refusal(self, error: Exception) -> Refused:
        return Refused(error)


class Item(BaseModel):
    name: str


events: list[str] = []


class Route(OrderedRoute):
    """Knows the secrets `all` and `none`, by what they may do. Refuses bodies of more than 100 bytes."""

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        secret = bearer_secret(request.scope)
        if secret not in ("all", "none"):
            raise BearerInvalid(given=True)
        context_of(request.scope).principal = Principal("acme", secret, frozenset())
        if self.scopes and secret == "none":
            raise PermissionError
        if self.body_field is None:
            yield NO_BODY
        else:
            yield Item.model_validate_json(
                await read_body(request.scope, request.receive, max_bytes=100), strict=True
            )
        events.append("ended")


Caller = Annotated[Principal, Security(caller, scopes=["items"])]
Anyone = Annotated[Principal, Security(caller)]
router = APIRouter(route_class=Route)


@router.get("/items/{name:path}")
async def read_item(name: str, caller: Anyone) -> Item:
    """One of them."""
    return Item(name=name)


@router.post("/items", status_code=201)
async def make_item(item: Item, caller: Caller) -> Item:
    """A new one."""
    assert caller.tenant_id == "acme"
    events.append("answered")
    return item


@router.delete("/items", status_code=204)
async def drop_items(caller: Caller) -> None:
    """None is left."""


@router.get("/open")
async def is_open() -> dict[str, bool]:
    """Public."""
    return {"open": True}


def make_app() -> Any:
    return create_app("Items", router.routes, middleware=[Middleware(Edge), Middleware(Boundary)])


class Body:
    """A request's body that says whether it was read."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks, self.read = chunks, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.read += 1
            yield chunk


async def call(method: str, path: str, secret: str | None = None, **options: Any) -> httpx.Response:
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    transport = httpx.ASGITransport(app=make_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
        return await client.request(method, path, **options)


@pytest.mark.parametrize("content", [b'{"name": "a"}', b"{", b"x" * 10_000, b""])
@pytest.mark.parametrize(
    ("secret", "status"), [(None, 401), ("wrong", 401), ("", 401), ("none", 403)], ids=str
)
async def test_authentication_and_scope_come_before_the_body(
    secret: str | None, status: int, content: bytes
) -> None:
    body = Body(content)
    answer = await call("POST", "/items", secret, content=body)
    assert (answer.status_code, body.read) == (status, 0)
    assert answer.headers["x-request-id"]


async def test_the_body_is_bounded_and_checked_by_the_route() -> None:
    events.clear()
    made = await call("POST", "/items", "all", content=b'{"name": "a"}')
    assert (made.status_code, made.json()) == (201, {"name": "a"})
    assert events == ["answered", "ended"]
    assert (await call("POST", "/items", "all", content=b"x" * 101)).status_code == 413
    encoded = await call("POST", "/items", "all", content=b"{}", headers={"content-encoding": "gzip"})
    assert encoded.status_code == 415


async def test_the_framework_answers_nothing_itself() -> None:
    assert (await call("POST", "/items", "all", content=b"{")).json()["code"] == "ValidationError"
    assert (await call("GET", "/nothing")).json()["code"] == "PathUnknown"
    for path in ("/docs", "/redoc", "/openapi.json", "/items/../open/", "/open/"):
        assert (await call("GET", path)).status_code == 404
    refused = await call("PUT", "/items")
    assert (refused.status_code, refused.json()["allow"]) == (405, "DELETE, POST")
    refused = await call("POST", "/open")
    assert (refused.status_code, refused.json()["allow"]) == (405, "GET, HEAD")


async def test_paths_match_as_a_whole() -> None:
    assert (await call("GET", "/open%0A")).status_code == 404
    assert (await call("GET", "/items/a%0Ab%0A", "none")).json() == {"name": "a\nb\n"}


async def test_head_is_answered_as_get() -> None:
    assert (await call("HEAD", "/open")).status_code == 200
    assert (await call("HEAD", "/items/a")).status_code == 401
    assert (await call("HEAD", "/items")).status_code == 405


async def test_a_starting_server_refuses_everything() -> None:
    def error() -> LoraplexError:
        return RequestError("not yet")

    app = create_app("Items", [refused_until_started(error)], middleware=[Middleware(Boundary)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
        for method, path in (("GET", "/"), ("POST", "/items"), ("DELETE", "/a%0Ab")):
            assert (await client.request(method, path)).json()["code"] == "RequestError"


def test_the_document_has_routes_scopes_and_no_answer_of_the_frameworks() -> None:
    document = describe(make_app())
    assert {
        f"{method} {path}" for path, operations in document["paths"].items() for method in operations
    } == {"get /items/{name}", "post /items", "delete /items", "get /open"}
    assert document["paths"]["/items"]["post"]["security"] == [{"bearer": ["items"]}]
    assert document["paths"]["/items/{name}"]["get"]["security"] == [{"bearer": []}]
    assert document["paths"]["/open"]["get"]["security"] == []
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    assert set(document["components"]["schemas"]) == {"Item"}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert all("x-request-id" in answer["headers"] for answer in operation["responses"].values())


@pytest.mark.parametrize(
    "value", [b"", b"Bearer", b"Bearer ", b"Basic x", b"Bearer \xff", b"Bearer " + b"x" * 513]
)
def test_a_header_without_one_secret_is_refused(value: bytes) -> None:
    with pytest.raises(BearerInvalid):
        bearer_secret({"headers": [(b"authorization", value)]})


async def test_a_moved_route_is_the_same_elsewhere() -> None:
    """It asks who calls, and reads its path's parameter; the route that it was made of stays where it is."""
    (one,) = [route for route in router.routes if getattr(route, "name", "") == "read_item"]
    assert isinstance(one, Route)
    app = create_app("Items", [one, one.moved("/below/items/{name:path}")], middleware=[Middleware(Boundary)])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://items") as client:
        for path in ("/items/a/b", "/below/items/a/b"):
            refused = await client.get(path)
            answer = await client.get(path, headers={"authorization": "Bearer none"})
            assert (refused.status_code, answer.status_code) == (401, 200)
            assert answer.json() == {"name": "a/b"}
        secret = {"authorization": "Bearer none"}
        assert (await client.get("/below/items/a%0A", headers=secret)).json() == {"name": "a\n"}
        assert (await client.get("/below", headers=secret)).status_code == 404
