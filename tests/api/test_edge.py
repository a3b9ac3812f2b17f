"""What holds for every route: ids, unknown paths and methods, draining, probes, CORS, the log."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from loraplex.api.drain import Drain
from loraplex.api.errors import ANSWERS, ApiError
from loraplex.api.limit_headers import duration
from loraplex.api.routes.probes import probe_routes
from loraplex.http.application import create_app
from support.engine.fake_engine import FakeEngineClient, Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.placement.fake_cluster import fake_report

KEY = {"Authorization": "Bearer lpx_acme"}
TEXT = {"model": BASE, "prompt": "x"}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/nothing", "/v1/chat/completions/", "/docs/", "/metrics", "/%00%ff"]
)
def test_unknown_paths(plane: DataPlane, path: str) -> None:
    answer = plane.http.get(plane.url + path, headers=KEY)
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "unknown_url"


def test_the_version(plane: DataPlane) -> None:
    """Without a key, as vLLM has it."""
    answer = plane.http.get(f"{plane.url}/version")
    assert answer.status_code == 200
    assert answer.json() == {"version": version("loraplex")}


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/pirate", "GET, HEAD"),
        ("POST", "/livez", "GET, HEAD"),
    ],
)
def test_wrong_methods(plane: DataPlane, method: str, path: str, allow: str) -> None:
    answer = plane.http.request(method, plane.url + path, headers=KEY)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allow
    assert error_of(answer)["code"] == "method_not_supported"


def test_head(plane: DataPlane) -> None:
    answer = plane.http.head(f"{plane.url}/v1/models", headers=KEY)
    assert (answer.status_code, answer.content) == (200, b"")
    assert plane.http.head(f"{plane.url}/v1/nothing").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "lpx_acme"},
        {"Authorization": "Basic lpx_acme"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer lpx_acme lpx_acme"},
        {"Authorization": b"Bearer lpx_\xe9"},
        {"Authorization": "Bearer " + "x" * 1000},
        {"x-api-key": "lpx_acme"},
    ],
)
def test_missing_and_malformed_keys(plane: DataPlane, headers: Any) -> None:
    answer = plane.http.post(f"{plane.url}/v1/completions", headers=headers, content=b"not even JSON")
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "invalid_api_key"


def test_the_scheme_of_a_key_is_not_case_sensitive(plane: DataPlane) -> None:
    answer = plane.http.get(f"{plane.url}/v1/models", headers={"Authorization": "bearer  lpx_acme"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-123", "abc-123"), ("x" * 500, "x" * 128), ("a b\tc{}<>\u00e9", "abc")],
)
def test_a_clients_own_request_id(plane: DataPlane, given: str, echoed: str) -> None:
    headers = {**KEY, "x-request-id": given.encode("latin-1")}
    for path in ("/v1/models", "/nothing", "/livez"):
        assert plane.http.get(plane.url + path, headers=headers).headers["x-request-id"] == echoed


def test_a_request_id_is_a_label_only(plane: DataPlane) -> None:
    headers = {**KEY, "x-request-id": "same"}
    for _ in range(2):
        assert plane.http.post(f"{plane.url}/v1/completions", json=TEXT, headers=headers).status_code == 200
    first, second = plane.engine.requests
    assert first.request_id != second.request_id
    assert "same" not in first.request_id
    assert plane.http.get(f"{plane.url}/v1/models", headers={**KEY, "x-request-id": "<>"}).headers[
        "x-request-id"
    ]


def test_probes(plane: DataPlane) -> None:
    for path in ("/livez", "/readyz", "/startupz", "/health"):
        answer = plane.http.get(plane.url + path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_path_with_a_slash_in_a_models_name(plane: DataPlane) -> None:
    for path in ("org/tiny", "org%2Ftiny", "org/tiny:pirate"):
        assert plane.http.get(f"{plane.url}/v1/models/{path}", headers=KEY).status_code == 200
    answer = plane.http.get(f"{plane.url}/v1/models/", headers=KEY)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


# Draining.


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path / "model", drain=Drain(max_in_flight=4)) as running:
        yield running
        running.settle_all()


def test_a_drain(own: DataPlane) -> None:
    own.engine.script(Reply(text="abcdef", hold=True, hold_after=2))
    client = httpx.Client(headers=KEY, timeout=60)
    with client.stream("POST", f"{own.url}/v1/completions", json={**TEXT, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        own.on_loop(own.drain.begin)
        # The grace: not ready, but still serving, and telling clients to connect elsewhere.
        assert own.http.get(f"{own.url}/readyz").status_code == 503
        assert own.http.get(f"{own.url}/livez").status_code == 200
        answer = own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=KEY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        own.on_loop(own.drain.refuse)
        answer = own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=KEY)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "draining"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["connection"] == "close"
        assert own.server.call(lambda: own.drain.wait_idle(0.01)) is False
        own.on_loop(own.engine.release)
        text = "".join(
            json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")
        )
        assert text == "bcdef"
    assert own.server.call(lambda: own.drain.wait_idle(60)) is True


def test_more_requests_than_the_server_takes(own: DataPlane) -> None:
    own.engine.script(*[Reply(text="ab", hold=True)] * 2)
    answers: list[int] = []

    def ask() -> None:
        answers.append(own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=KEY).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    while own.on_loop(lambda: own.drain.in_flight) < 2 or len(own.on_loop(lambda: own.engine.live)) < 2:
        pass
    answer = own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=KEY)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "server_overloaded")
    assert "2 of them yours" in error_of(answer)["message"]
    # The others have room, which no tenant can take from them.
    rival = {"Authorization": "Bearer lpx_rival"}
    assert own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=rival).status_code == 200
    assert own.http.get(f"{own.url}/readyz").status_code == 200
    own.on_loop(own.engine.release)
    for thread in threads:
        thread.join()
    assert answers == [200, 200]


def test_bodies_that_do_not_come_keep_no_other_tenant_out(own: DataPlane) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Length: 99\r\n\r\n"
    held = [own.server.connect() for _ in range(2)]
    for sock in held:
        sock.sendall(head)
    while own.on_loop(lambda: own.drain.in_flight) < 2:
        pass
    third = own.server.connect()
    third.sendall(head)
    assert third.recv(100).startswith(b"HTTP/1.1 503 ")
    rival = {"Authorization": "Bearer lpx_rival"}
    assert own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=rival).status_code == 200
    for sock in held:
        sock.close()
    while own.on_loop(lambda: own.drain.in_flight) > 0:
        pass
    assert own.http.post(f"{own.url}/v1/completions", json=TEXT, headers=KEY).status_code == 200


def test_a_body_that_drips_has_no_more_time(tmp_path: Path) -> None:
    with running_data_plane(tmp_path / "model", stall_timeout=0.2) as plane:
        sock = plane.server.connect()
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
            b"Content-Length: 100000\r\n\r\n"
        )
        sock.settimeout(0.05)
        started = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - started < 60:
            with contextlib.suppress(ConnectionError):  # it may be answered and closed by now
                sock.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = sock.recv(100)
        assert answer.startswith(b"HTTP/1.1 408 ")
        plane.settle_all()


async def test_the_steps_of_a_drain() -> None:
    drain = Drain()
    with drain.admitted():
        assert await drain.run(0, 0.01) is False
    assert await drain.wait_idle(60) is True
    with pytest.raises(ApiError, match="shutting down"), drain.admitted():
        pass


# CORS and routes from elsewhere.


def test_cors_is_off(plane: DataPlane) -> None:
    answer = plane.http.get(f"{plane.url}/v1/models", headers={**KEY, "Origin": "https://a.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_cors_where_it_is_configured(tmp_path: Path) -> None:
    origin = {"Origin": "https://a.example"}
    with running_data_plane(tmp_path / "model", cors_origins=("https://a.example",)) as plane:
        ask = {
            **origin,
            "Access-Control-Request-Method": "POST",
            # As the clients of OpenAI and Anthropic send them from a page.
            "Access-Control-Request-Headers": "anthropic-version,authorization,content-type,x-api-key,x-stainless-os",
        }
        preflight = plane.http.options(f"{plane.url}/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = plane.http.post(f"{plane.url}/v1/completions", headers=origin, json={})
        assert refused.status_code == 401  # and a page may read why
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        stranger = plane.http.get(f"{plane.url}/v1/models", headers={**KEY, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_extra_routes_and_metrics_on_the_data_port(tmp_path: Path) -> None:
    async def extra(_: Request) -> JSONResponse:
        return JSONResponse({"extra": True})

    async def broken(_: Request) -> JSONResponse:
        raise RuntimeError("secret")

    routes = [Route("/admin/v1/extra", extra), Route("/admin/v1/broken", broken)]
    with running_data_plane(tmp_path / "model", extra_routes=routes, metrics_on_data_port=True) as plane:
        assert plane.http.get(f"{plane.url}/admin/v1/extra").json() == {"extra": True}
        answer = plane.http.get(f"{plane.url}/admin/v1/broken")
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
        assert "secret" not in answer.text
        text = plane.http.get(f"{plane.url}/metrics").text
        assert "vllm:num_requests_running" in text
        assert "loraplex_" not in text


# The log.


class KeptLog:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(json.dumps({"event": event, **fields}))


def test_access_log_names_tenant_and_route_but_no_prompt_and_no_key(tmp_path: Path) -> None:
    kept = KeptLog()
    with running_data_plane(tmp_path / "model", access_log=kept) as plane:
        url = f"{plane.url}/v1/completions"
        httpx.post(url, json={"model": "pirate", "prompt": "my secret prompt"}, headers=KEY)
        body = {"model": "bad\nname\x1b[0m", "prompt": "my secret prompt"}
        httpx.post(url, json=body, headers={**KEY, "x-request-id": "r-1"})
        plane.http.get(f"{plane.url}/livez")
        plane.settle_all()
    first, second = (json.loads(line) for line in kept.lines)
    assert first["tenant"] == "acme"
    assert first["key"] == "key-acme"
    assert (first["model"], first["version"], first["status"]) == ("pirate", "pirate@v2", 200)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (16, 3)
    assert first["ms"] > 0
    assert (second["status"], second["outcome"], second["request_id"]) == (404, "model_not_found", "r-1")
    for line in kept.lines:
        assert not [bad for bad in ("secret", "lpx_", "\n", "\x1b") if bad in line]


def test_the_access_log_of_a_refusal_names_the_field_and_the_model(tmp_path: Path) -> None:
    kept = KeptLog()
    url = "/v1/completions"
    long = "a\x1b\u202e" + "b" * 600
    cases: list[tuple[str, Any, dict[str, str], tuple[Any, ...]]] = [
        (url, {**TEXT, "temperature": "secret"}, KEY, (BASE, 400, "invalid_value", "temperature")),
        (url, {**TEXT, "frob": "secret"}, KEY, (BASE, 400, "unsupported_field", "frob")),
        (url, {"model": "pirate"}, KEY, ("pirate", 400, "invalid_value", "prompt")),
        (url, {"model": "nobody", "prompt": "x"}, KEY, ("nobody", 404, "model_not_found", "model")),
        (url, {**TEXT, "prompt": [999]}, KEY, (BASE, 400, "invalid_value", "prompt")),
        (url, {**TEXT, "stop": ["x", 5], "model": ["secret"]}, KEY, (None, 400, "invalid_value", "model")),
        (url, ["secret"], KEY, (None, 400, "invalid_value", None)),
        (url, {**TEXT, long: "secret"}, KEY, (BASE, 400, "unsupported_field", "a??" + "b" * 125)),
        (url, {"model": long, "prompt": 5}, KEY, ("a??" + "b" * 253, 400, "invalid_value", "model")),
        (url, TEXT, {}, (None, 401, "invalid_api_key", None)),
        ("/v1/nothing", TEXT, KEY, (None, 404, "unknown_url", None)),
        (
            url,
            TEXT,
            {**KEY, "content-type": "x/secret"},
            (None, 415, "unsupported_media_type", "Content-Type"),
        ),
        (url, TEXT, KEY, (BASE, 200, None, None)),
    ]
    with running_data_plane(tmp_path / "model", access_log=kept) as plane:
        for path, body, headers, _ in cases:
            kind = {"content-type": "application/json"}
            plane.http.post(plane.url + path, content=json.dumps(body), headers={**kind, **headers})
        plane.engine.script(Reply(text="a", error=("adapter_not_finite", "too large")))
        plane.http.post(plane.url + url, json={**TEXT, "stream": True}, headers=KEY)
        plane.settle_all()
    *lines, streamed = map(json.loads, kept.lines)
    told = [(line["model"], line["status"], line["outcome"], line["param"]) for line in lines]
    assert told == [wanted for *_, wanted in cases]
    assert (streamed["outcome"], streamed["param"]) == ("adapter_not_finite", "model")
    assert "secret" not in "".join(kept.lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.2, "1s"),
        (59.1, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (90_061, "25h1m1s"),
        (-1, "0s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_answer_is_a_409() -> None:
    assert {status for status, _ in ANSWERS.values()} == {
        400,
        401,
        403,
        404,
        405,
        408,
        413,
        415,
        429,
        500,
        503,
        504,
    }


async def test_readiness_warns_while_limits_are_not_shared() -> None:
    """Requests are taken all the same."""
    said: list[str | None] = ["the Redis of the limits has not been reached for 3 s", None]
    engine = FakeEngineClient()
    await engine.start()
    routes = probe_routes(engine, Drain(), limits_warning=lambda: said[0])
    transport = httpx.ASGITransport(create_app("x", routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "warning": said[0]})
        assert (await client.get("/livez")).json() == {"status": "ok"}
        said.pop(0)
        assert (await client.get("/readyz")).json() == {"status": "ok"}


async def test_readiness_warns_while_engines_are_missing() -> None:
    engine = FakeEngineClient()
    await engine.start()
    engine.num_wanted = 3
    engine.replicas = {
        "replica-1": fake_report("replica-1"),
        "replica-2": fake_report("replica-2", "it died"),
    }
    transport = httpx.ASGITransport(create_app("x", probe_routes(engine, Drain())))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        warning = "1 of 3 engines take requests: replica-2: it died; 1 have not joined"
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "warning": warning})
        engine.num_wanted = 1
        assert (await client.get("/readyz")).json() == {"status": "ok"}


def test_readiness_says_that_adapters_are_being_warmed(own: DataPlane) -> None:
    assert own.http.get(f"{own.url}/readyz").json() == {"status": "ok"}
    own.engine.warming = True
    assert own.http.get(f"{own.url}/readyz").json() == {"status": "ok", "warming": True}
    assert own.http.get(f"{own.url}/livez").json() == {"status": "ok"}
