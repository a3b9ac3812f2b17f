"""Answers that break after they began, on both ports over a real uvicorn: no client may take one for a whole answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from loraplex.adapters.errors import LoraplexError
from loraplex.admin.app import create_admin_app
from support.http.admin_plane import AdminPlane
from support.http.api_server import RunningServer, serve_app
from support.http.data_plane import running_data_plane

PIECE = b"x" * 1000


async def broken(request: Request) -> StreamingResponse:
    """One piece of two, then an error. With `?length` the head says how long the answer would have been."""

    async def pieces() -> AsyncIterator[bytes]:
        yield PIECE
        raise LoraplexError("known") if "known" in request.query_params else RuntimeError("secret")

    headers = {"Content-Length": str(2 * len(PIECE))} if "length" in request.query_params else {}
    return StreamingResponse(pieces(), headers=headers)


async def whole(_: Request) -> JSONResponse:
    return JSONResponse({"whole": True})


ROUTES = [Route("/broken", broken), Route("/whole", whole)]


@contextmanager
def admin_port(directory: Path) -> Iterator[RunningServer]:
    plane = AdminPlane(directory)
    try:
        with serve_app(create_admin_app(plane.services, ROUTES)) as server:
            yield server
    finally:
        plane.close()


@contextmanager
def data_port(directory: Path) -> Iterator[RunningServer]:
    with running_data_plane(directory / "model", extra_routes=ROUTES) as plane:
        yield plane.server


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """To render a traceback takes the event loop seconds on a busy machine."""
    with capture_logs():
        yield


@pytest.mark.parametrize("serve", [admin_port, data_port])
def test_the_client_sees_a_broken_connection_and_the_server_goes_on(
    serve: Callable[[Path], AbstractContextManager[RunningServer]], tmp_path: Path
) -> None:
    with serve(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for query in ("", "?length", "?known", "?length&known"):
            assert client.get("/whole").json() == {"whole": True}
            with client.stream("GET", f"/broken{query}") as answer:
                assert answer.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    answer.read()
        assert client.get("/whole").json() == {"whole": True}


@pytest.mark.parametrize("serve", [admin_port, data_port])
def test_the_bytes_end_without_the_last_chunk(
    serve: Callable[[Path], AbstractContextManager[RunningServer]], tmp_path: Path
) -> None:
    with serve(tmp_path) as server, server.connect() as sock:
        sock.sendall(b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n")
        seen = b""
        while received := sock.recv(1 << 16):
            seen += received
    assert b"transfer-encoding: chunked" in seen.lower()
    assert seen.endswith(PIECE + b"\r\n")
    assert b"secret" not in seen
    assert b"\r\n0\r\n" not in seen
