"""The data plane is a FastAPI application, and no answer shows it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Query

from loraplex.api.application import create_data_app
from loraplex.api.route import DataRoute
from support.http.data_plane import DataPlane, running_data_plane

KEY = {"Authorization": "Bearer lpx_acme"}
GETS = ("/v1/models", "/v1/models/pirate", "/livez", "/version", "/openapi.json")


async def numbered(number: Annotated[int, Query(ge=1)]) -> int:
    """For all callers."""
    return number


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    """With a route whose query is typed."""
    route = DataRoute("/numbers", numbered, methods=["GET"])
    with running_data_plane(tmp_path_factory.mktemp("model"), extra_routes=[route]) as running:
        yield running


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("number=x", "valid integer"),
        ("number=0", "greater than or equal to 1"),
        ("", "Missing required field"),
    ],
)
def test_a_query_that_is_not_valid_is_a_400_in_openais_shape(
    numbers: DataPlane, query: str, reason: str
) -> None:
    answer = numbers.http.get(f"{numbers.url}/numbers?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "number")
    assert set(error) == {"message", "type", "param", "code"}
    assert reason in error["message"]
    assert numbers.http.get(f"{numbers.url}/numbers?number=1").json() == 1


@pytest.mark.parametrize("path", GETS)
def test_head_has_the_headers_of_get(plane: DataPlane, path: str) -> None:
    headers = KEY | {"x-request-id": "same"}
    given = [plane.http.request(method, plane.url + path, headers=headers) for method in ("GET", "HEAD")]
    (got, head) = (answer.headers for answer in given)
    assert [answer.status_code for answer in given] == [200, 200]
    assert given[1].content == b""
    got["date"] = head["date"]
    assert got == head


@pytest.mark.parametrize("path", GETS)
def test_a_query_that_nobody_asked_for_changes_nothing(plane: DataPlane, path: str) -> None:
    plain, asked = (
        plane.http.get(plane.url + path + query, headers=KEY) for query in ("", "?limit=1&limit=x&%ff")
    )
    assert (asked.status_code, asked.content) == (200, plain.content)


@pytest.mark.parametrize("path", GETS)
def test_the_body_of_a_get_is_not_asked_for(plane: DataPlane, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Type: application/json\r\n"
    with socket.create_connection((plane.server.host, plane.server.port), timeout=60) as sock:
        sock.sendall(f"{head}Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(64).startswith(b"HTTP/1.1 200 ")


async def test_the_document_is_made_once_and_only_when_it_is_asked_for(shared_plane: DataPlane) -> None:
    made: list[None] = []

    def extra() -> Mapping[str, Any]:
        made.append(None)
        return {"components": {"schemas": {}}, "paths": {}}

    app = create_data_app(shared_plane.services, extra_document=extra)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
        assert (await http.get("/version")).status_code == 200
        assert made == []
        answers = await asyncio.gather(*(http.get("/openapi.json") for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(made) == 1
