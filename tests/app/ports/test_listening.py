"""Both ports from the first moment on: what they answer until the engine is there, and the change to what serves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from loraplex.admin.app import create_starting_admin_app, create_starting_tenant_app
from loraplex.api.application import create_starting_data_app
from loraplex.api.drain import Drain
from loraplex.api.routes.probes import probe_routes
from loraplex.app.ports.sockets import open_ports, url
from loraplex.app.ports.swappable_app import Listening
from loraplex.app.settings import Settings
from support.engine.fake_engine import FakeEngineClient
from support.http.admin_plane import assert_problem
from support.servers.live_server import TINY_TORCH, LiveServer, write_tiny_model


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x")


@pytest.fixture
def engine() -> FakeEngineClient:
    """Not started."""
    return FakeEngineClient()


async def test_probes_of_a_server_that_starts(engine: FakeEngineClient) -> None:
    routes = probe_routes(engine, Drain(), serving=False)
    for app in (create_starting_data_app(engine, "tiny"), create_starting_admin_app(routes)):
        async with client(app) as http:
            assert (await http.get("/livez")).status_code == 200
            for path in ("/startupz", "/readyz", "/health"):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    # An engine that is ready is not enough: nothing is served before the apps are there.
    await engine.start()
    async with client(create_starting_data_app(engine, "tiny")) as http:
        for path in ("/startupz", "/readyz", "/health"):
            assert (await http.get(path)).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/admin/v1/tenants", "/", "/a%0ab"])
async def test_everything_else_is_asked_to_come_back(
    engine: FakeEngineClient, method: str, path: str
) -> None:
    async with client(create_starting_data_app(engine, "tiny")) as http:
        answer = await http.request(method, path, content=b"{")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]
    if "%0a" not in path:
        async with client(create_starting_admin_app()) as http:
            answer = await http.request(method, path, content=b"{")
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_restarting")
            assert answer.headers["content-type"] == "application/problem+json"
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/admin/v1/tenants", "/admin/v1/", "/admin/v1/tenants/acme/adapters/x/versions"]
)
async def test_the_tenants_routes_on_the_data_port_answer_in_their_own_shape(
    engine: FakeEngineClient, path: str
) -> None:
    mount = Mount("/admin/v1", create_starting_tenant_app())
    async with client(create_starting_data_app(engine, "tiny", extra_routes=[mount])) as http:
        answer = await http.post(path, content=b"{")
        assert_problem(answer, 503, "engine_restarting")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]
        assert (await http.post("/v1/completions")).json()["error"]["code"] == "engine_restarting"


async def test_a_connection_outlives_the_change(engine: FakeEngineClient, tmp_path: Path) -> None:
    settings = Settings(port=0, admin_port=0, data_dir=tmp_path, model="x")
    with open_ports(settings) as ports:
        before = create_starting_data_app(engine, "tiny")
        listening = Listening(ports, data=before, admin=create_starting_admin_app())
        try:
            while not listening.started:
                await asyncio.sleep(0.005)
            limits = httpx.Limits(max_connections=1)
            async with httpx.AsyncClient(limits=limits) as http:
                first = await http.get(f"{url(ports.data)}/v1/models")
                listening.switch(data=PlainTextResponse("data"), admin=PlainTextResponse("admin"))
                second = await http.get(f"{url(ports.data)}/v1/models")
                assert (first.status_code, second.text) == (503, "data")
                streams = {answer.extensions["network_stream"] for answer in (first, second)}
                assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url(ports.admin)}/x")).text == "admin"
        finally:
            assert await listening.close(), listening.failure


@pytest.mark.slow
def test_a_real_start_is_told_from_the_first_moment_on(tmp_path: Path) -> None:
    server = LiveServer(write_tiny_model(tmp_path / "model"), tmp_path / "data", **TINY_TORCH)
    try:
        server.start(wait=False)
        server.wait(lambda: server.engine_pid() is not None)
        engine = server.engine_pid()
        assert engine is not None
        os.kill(engine, signal.SIGSTOP)  # it gets no further before all has been asked
        server.wait(lambda: server.get("/livez") == 200)
        seen = {
            (path, admin): server.get(path, admin=admin)
            for path in ("/startupz", "/readyz")
            for admin in (False, True)
        }
        assert set(seen.values()) == {503}
        answer = httpx.get(f"{server.data_url}/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert_problem(httpx.get(f"{server.data_url}/admin/v1/tenants"), 503, "engine_restarting")
        assert server.get("/metrics", admin=True) == 200
        os.kill(engine, signal.SIGCONT)
        server.wait_ready()
        assert server.get("/startupz") == 200
        assert httpx.get(f"{server.data_url}/v1/models").status_code == 401
        assert server.stop() == 0
        # A signal in the middle of a start ends it.
        server.start(wait=False)
        server.wait(lambda: server.get("/livez") == 200)
        assert server.stop() == 0
    finally:
        server.reap()
