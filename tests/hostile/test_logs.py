"""What a client can write into the log and into the metrics: whole JSON lines without a control character, and no
series of its own making."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from loraplex.app.logs import configure_logging
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.log_schema import check_lines
from support.http.whole_server import WholeServer, bearer, whole_server

HOSTILE = (
    "a\nb",
    'x"}\n{"event":"forged","tenant":"rival"}',
    "\x1b[2J\x1b[31mred\x1b]0;title\x07",
    "\r\nX-Injected: 1",
    "\u2028\u2029\x85\x0b\x0c",
    "\u202egnp.exe\u200b",
    "%s%n{0}{request.__class__}${jndi:ldap://x}",
    "\0\x7f\x9b31m",
    "a" * 100_000,
    "é" * 500 + "𝄞",
    '\\"\\\\',
)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a server writes to standard error, with its own configuration of logging."""
    kept, before = io.StringIO(), structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stderr, sys.stderr = sys.stderr, kept
    try:
        configure_logging("info")
        yield kept
    finally:
        sys.stderr = stderr
        structlog.configure(**before)
        root.handlers[:] = handlers
        root.setLevel(level)


def lines_of(log: io.StringIO) -> list[dict[str, Any]]:
    text = log.getvalue()
    assert text.endswith("\n")
    # Only the line feed ends a line, whatever a reader takes for one: nothing else of that kind is in there.
    lines = text.removesuffix("\n").split("\n")
    assert lines == text.splitlines()
    assert text.replace("\n", "").isprintable()
    assert text.isascii()
    entries = check_lines(lines)
    assert all(
        isinstance(entry, dict) and len(line) < 8192 for entry, line in zip(entries, lines, strict=True)
    )
    return entries


def test_nobody_writes_lines_of_its_own(log: io.StringIO, tmp_path: Path) -> None:
    with whole_server(tmp_path) as server:
        server.plane.make_tenant("acme")
        key = server.plane.make_key("acme", "inference", "adapters:read", "adapters:write")
        asked = 0
        for text in HOSTILE:
            raw = text.encode("utf-8")
            headers = {
                **bearer(key),
                "x-request-id": raw.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b""),
            }
            headers = {name: value[:4000] for name, value in headers.items()}  # type: ignore[assignment]
            headers["user-agent"] = headers["x-request-id"]
            quoted = "".join(f"%{byte:02x}" for byte in raw[:800])
            for method, path, body in (
                ("POST", "/v1/completions", {"model": text, "prompt": text, "user": text[:500]}),
                ("POST", "/v1/chat/completions", {text: text}),
                ("GET", f"/v1/models/{quoted}", None),
                ("GET", f"/{quoted}", None),
                ("GET", f"/admin/v1/tenants/{quoted}/adapters", None),
                ("GET", f"/admin/v1/tenants/acme/adapters/{quoted}?{quoted}={quoted}", None),
                ("POST", f"/admin/v1/tenants/acme/adapters/{quoted}/versions", {}),
            ):
                # The client's own parser would refuse some of these.
                answer = server.http.request(
                    method, server.data_url + path, json=body, headers=clean(headers)
                )
                assert answer.status_code < 500, (path, answer.text)
                assert "x-injected" not in answer.headers
                asked += 1
            admin = {**clean(headers), **bearer(ADMIN_TOKEN)}
            for body in ({"id": text}, {"id": "x", "display_name": text}, {text: 1}):
                answer = server.http.post(f"{server.admin_url}/admin/v1/tenants", json=body, headers=admin)
                assert answer.status_code < 500
                asked += 1
        server.settle()
    entries = lines_of(log)
    requests = [entry for entry in entries if entry["event"] in ("request", "admin_request")]
    assert len(requests) == asked
    assert "forged" not in {entry["event"] for entry in entries}
    assert key not in log.getvalue()
    # The tenants' admin routes on the data port say who asked, too.
    own = [entry for entry in requests if entry["event"] == "request" and "/adapters" in entry["path"]]
    assert len(own) > 20
    assert {entry["tenant"] for entry in own if entry["status"] not in (401, 404)} == {"acme"}


def test_a_refusal_of_an_admin_route_names_its_code_and_field(log: io.StringIO, tmp_path: Path) -> None:
    with whole_server(tmp_path) as server:
        server.plane.make_tenant("acme")
        admin = bearer(ADMIN_TOKEN)
        key = bearer(server.plane.make_key("acme", "adapters:read"))
        url = f"{server.admin_url}/admin/v1/tenants"
        server.http.post(url, json={"id": "b", "weight": "secret"}, headers=admin)
        server.http.post(url, json={"id": "b", "a\x1b" + "c" * 600: "secret"}, headers=admin)
        server.http.get(f"{url}/nobody", headers=admin)
        server.http.get(url, headers=admin)
        # The tenants' own routes, on either port.
        for at in (server.admin_url, server.data_url):
            server.http.get(f"{at}/admin/v1/tenants/acme/adapters?colour=secret", headers=key)
        server.settle()
    told = [
        (entry["status"], entry["outcome"], entry["param"]) for entry in lines_of(log) if "status" in entry
    ]
    shown = told[1][2]
    assert told == [
        (400, "invalid_value", "weight"),
        (400, "unknown_field", shown),
        (404, "tenant_not_found", None),
        (200, None, None),
        (400, "unknown_parameter", "colour"),
        (400, "unknown_parameter", "colour"),
    ]
    assert 100 < len(shown) <= 128
    assert shown.isprintable()
    assert "secret" not in log.getvalue().replace("colour=secret", "")


def clean(headers: dict[str, Any]) -> dict[str, Any]:
    allowed = bytes({9, *range(32, 127), *range(128, 256)})
    return {
        name: bytes(byte for byte in value if byte in allowed).strip() if isinstance(value, bytes) else value
        for name, value in headers.items()
    }


def test_a_failure_behind_the_tenants_routes_can_be_found_by_its_id(
    log: io.StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a detail\nof two lines")

    with whole_server(tmp_path) as server:
        server.plane.make_tenant("acme")
        monkeypatch.setattr(server.plane.services.catalog, "list_adapters", broken)
        headers = {**bearer(server.plane.make_key("acme", "adapters:read")), "x-request-id": "find-me"}
        answer = server.http.get(f"{server.data_url}/admin/v1/tenants/acme/adapters", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
        server.settle()
    failed, request = (entry for entry in lines_of(log) if "request" in entry["event"])
    assert (failed["event"], failed["request_id"]) == ("request_failed", "find-me")
    assert (request["event"], request["request_id"], request["id"]) == ("request", "find-me", failed["id"])
    assert (request["tenant"], request["status"]) == ("acme", 500)
    assert request["key"]


def series(server: WholeServer) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    text = server.http.get(f"{server.admin_url}/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_nobody_makes_series(server: WholeServer) -> None:
    headers = bearer(server.plane.make_key("acme", "inference"))
    url = f"{server.data_url}/v1/completions"
    for model in (SERVED_NAME, "support", "nothing"):
        server.http.post(url, json={"model": model, "prompt": "x"}, headers=headers)
    before = series(server)
    for number in range(50):
        for text in ("nothing", "support@v", 'x",y="', "\n# TYPE z counter\nz "):
            body = {"model": f"{text}{number}", "prompt": "x", "user": f"{text}{number}"}
            assert server.http.post(url, json=body, headers=headers).status_code in (200, 404)
    assert {row for row in series(server) if "adapter" not in dict(row[1])} == {
        row for row in before if "adapter" not in dict(row[1])
    }
    added = {dict(labels)["adapter"] for name, labels in series(server) - before}
    assert added <= {"support@v1"}
