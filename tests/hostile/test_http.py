"""Requests written byte by byte: what is no HTTP, what two parsers might read in two ways, and what is merely rare.

Behind every request stands another one on the same connection. Its answer tells that the server and a proxy before it
agree on where the first one ended; nothing that was sent within the first may be answered for itself.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import pytest

from loraplex.app.ports.connections import Bounds
from loraplex.http.body import MIN_BYTES_PER_S
from support.http.whole_server import WholeServer, whole_server
from support.waiting import eventually

BODY = b'{"model":"tiny","prompt":"x"}'
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
NEXT = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


def post(*headers: bytes, body: bytes = BODY, version: bytes = b"1.1") -> bytes:
    """A completion; KEY is put in later. Without a framing header among `headers`, with the true Content-Length."""
    fields = b"".join(field + b"\r\n" for field in headers)
    if not re.search(rb"(?im)^(content-length|transfer-encoding)\s*:", fields):
        fields += b"Content-Length: %d\r\n" % len(body)
    return b"POST /v1/completions HTTP/%s\r\nHost: x\r\nKEY%s\r\n%s" % (version, fields, body)


def get(path: bytes = b"/v1/models", *headers: bytes, method: bytes = b"GET") -> bytes:
    fields = b"".join(field + b"\r\n" for field in headers)
    return b"%s %s HTTP/1.1\r\nHost: x\r\nKEY%s\r\n" % (method, path, fields)


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
REFUSED: dict[str, bytes] = {
    "a chunk's size that is none": post(CHUNKED, body=b"zz\r\n" + BODY),
    "a chunk's size beyond 64 bits": post(CHUNKED, body=b"f" * 18 + b"\r\n" + BODY),
    "a negative chunk": post(CHUNKED, body=b"-1\r\n" + BODY),
    "a chunk longer than its size": post(CHUNKED, body=b"1\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a chunk's size in 0x": post(CHUNKED, body=b"0x1d\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a bare LF after a chunk": post(CHUNKED, body=CHUNKS.replace(b"\r\n", b"\n")),
    "length and chunks": post(LENGTH, CHUNKED, body=CHUNKS),
    "chunks and length": post(CHUNKED, LENGTH, body=CHUNKS),
    "chunks and a short length": post(CHUNKED, b"Content-Length: 0", body=CHUNKS),
    "two lengths": post(LENGTH, b"Content-Length: 3"),
    "the same length twice": post(LENGTH, LENGTH),
    "a list of lengths": post(LENGTH + b", %d" % len(BODY)),
    "a signed length": post(b"Content-Length: +%d" % len(BODY)),
    "a negative length": post(b"Content-Length: -1"),
    "a length in hex": post(b"Content-Length: 0x1d"),
    "a length beyond 64 bits": post(b"Content-Length: " + b"9" * 30),
    "another coding": post(b"Transfer-Encoding: xchunked", body=CHUNKS),
    "identity, chunked": post(b"Transfer-Encoding: identity, chunked", body=CHUNKS),
    "chunked, identity": post(b"Transfer-Encoding: chunked, identity", body=CHUNKS),
    "gzip, chunked": post(b"Transfer-Encoding: gzip, chunked", body=CHUNKS),
    "chunked twice": post(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked, then another": post(CHUNKED, b"Transfer-Encoding: identity", body=CHUNKS),
    "a space before the colon": post(b"Transfer-Encoding : chunked", body=CHUNKS),
    "a vertical tab in the coding": post(b"Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "chunks in HTTP/1.0": post(CHUNKED, body=CHUNKS, version=b"1.0"),
    "a folded header": get(b"/v1/models", b"X-A: b\r\n c"),
    "bare LFs": get().replace(b"\r\n", b"\n"),
    "bare CRs": get().replace(b"\r\n", b"\r"),
    "NUL in a header": get(b"/v1/models", b"X-A: b\0c"),
    "NUL in a header's name": get(b"/v1/models", b"X\0A: b"),
    "a header without a colon": get(b"/v1/models", b"nonsense"),
    "a header without a name": get(b"/v1/models", b": x"),
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method nobody has": get(method=b"FROB"),
    "HTTP/0.9": b"GET /livez\r\n\r\n",
    "HTTP/2.0": b"GET /livez HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/9.9": b"GET /livez HTTP/9.9\r\nHost: x\r\n\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "UTF-8 in the path": get("/v1/models/é".encode()),
    "a tab in the request line": b"GET\t/livez\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "a space in the path": get(b"/v1/models/a b"),
}
ANSWERED: dict[str, tuple[bytes, int]] = {
    "a length": (post(), 200),
    "chunks": (post(CHUNKED, body=CHUNKS), 200),
    "chunks with extensions": (post(CHUNKED, body=b"1d;a=b;c\r\n" + BODY + b"\r\n0;x\r\n\r\n"), 200),
    "a trailer that is no header": (
        post(CHUNKED, b"Trailer: Authorization", body=CHUNKS[:-2] + b"Authorization: Bearer x\r\n\r\n"),
        200,
    ),
    "an early refusal": (post(body=b"x" * (5 << 20)), 413),
    "a length that is not JSON": (post(body=SMUGGLED), 400),
    "an upgrade to h2c": (post(UPGRADE.rstrip()), 200),
    "an upgrade in chunks": (post(UPGRADE.rstrip(), CHUNKED, body=CHUNKS), 200),
    "an upgrade with a request as its body": (post(UPGRADE.rstrip(), body=SMUGGLED), 400),
    "an upgrade to a websocket": (get(b"/v1/models", b"Connection: Upgrade", b"Upgrade: websocket"), 200),
    "a body that nobody wants": (get(b"/v1/models", b"Content-Length: %d" % len(SMUGGLED)) + SMUGGLED, 200),
    "an absolute form": (get(b"http://x/v1/models"), 200),
    "an absolute form with the port that is meant": (get(b"HTTP://X:80/v1/models"), 200),
    "an empty host": (get().replace(b"Host: x", b"Host:"), 200),
    "a host with a port": (get().replace(b"Host: x", b"Host: x.example:8000"), 200),
    "an address of IPv6 as host": (get().replace(b"Host: x", b"Host: [::1]:8000"), 200),
    "percents in the host": (get().replace(b"Host: x", b"Host: caf%C3%A9"), 200),
    "OPTIONS *": (get(b"*", method=b"OPTIONS"), 404),
    "OPTIONS": (get(method=b"OPTIONS"), 405),
    "TRACE": (get(method=b"TRACE"), 405),
    "HEAD": (get(method=b"HEAD"), 200),
    "HEAD of nothing": (get(b"/nothing", method=b"HEAD"), 404),
    "dots": (get(b"/v1/../v1/models"), 404),
    "dots in percents": (get(b"/v1/%2e%2e/v1/models"), 404),
    "a line feed at the end": (get(b"/v1/models%0a"), 404),
    "two slashes": (get(b"//v1/models"), 404),
    "a fragment": (get(b"/v1/models#x"), 200),
    "a model's name that climbs": (get(b"/v1/models/..%2f..%2f..%2fetc%2fpasswd"), 404),
    "a model's name of controls": (get(b"/v1/models/%00%0a%0d%1b%5b31m"), 404),
    "a model's name that is no UTF-8": (get(b"/v1/models/%ff%fe%ed%a0%80"), 404),
    "a model's name with bad percents": (get(b"/v1/models/%zz%f%"), 404),
    "a long model's name": (get(b"/v1/models/" + b"a" * 20_000), 404),
    "an expectation that is none": (post(b"Expect: frob"), 200),
    "two keys": (get(b"/v1/models", b"Authorization: Bearer x"), 401),
    "a tenant's name that climbs": (get(b"/admin/v1/tenants/..%2f..%2fx/adapters"), 404),
    "a tenant's name with a line feed": (get(b"/admin/v1/tenants/acme%0a/adapters"), 404),
    "an adapter's name that climbs": (get(b"/admin/v1/tenants/acme/adapters/..%2f..%2fx"), 404),
}

HOSTS: dict[str, tuple[bytes, bytes]] = {
    "none": (b"GET /livez HTTP/1.1\r\n\r\n", b"no Host header"),
    "none, and an absolute form": (b"GET http://x/livez HTTP/1.1\r\n\r\n", b"no Host header"),
    "two": (b"GET /livez HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"more than one"),
    "the same twice": (b"GET /livez HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n", b"more than one"),
    "two in HTTP/1.0": (b"GET /livez HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", b"more than one"),
    **{
        f"the value {value!r}": (b"GET /livez HTTP/1.1\r\nHost: %s\r\n\r\n" % value, b"is no host")
        for value in (
            b"a b",
            b"x, y",
            b"x/y",
            b"user@x",
            b"x:80a",
            b"x:1:2",
            b"x:-1",
            b"::1",
            b"[::1",
            b"[::1]x",
            b"x?y",
            b"x#y",
            b"x\\y",
            b"%zz",
            b"http://x",
            "é".encode(),
        )
    },
    "another in the target": (b"GET http://y/livez HTTP/1.1\r\nHost: x\r\n\r\n", b"different hosts"),
    "another port in the target": (b"GET http://x:81/livez HTTP/1.1\r\nHost: x\r\n\r\n", b"different hosts"),
    "another in a target of another scheme": (
        b"GET ftp://y/livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"different hosts",
    ),
    "a broken absolute form": (b"GET http://[::1/livez HTTP/1.1\r\nHost: x\r\n\r\n", b"names no host"),
    "a user in the target": (b"GET http://x@y/livez HTTP/1.1\r\nHost: y\r\n\r\n", b"names no host"),
}


@pytest.fixture(scope="module")
def key(server: WholeServer) -> bytes:
    return server.plane.make_key("acme", "inference", "adapters:read").encode()


def converse(server: WholeServer, key: bytes, request: bytes, url: str = "") -> list[tuple[int, bytes]]:
    """Status and body of every answer to `request` and what stands behind it, up to the connection's end."""
    host, port = (url or server.data_url).removeprefix("http://").split(":")
    raw = request.replace(b"KEY", b"Authorization: Bearer %s\r\n" % key) + NEXT
    data = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        try:
            sock.sendall(raw)
            while chunk := sock.recv(1 << 16):
                data += chunk
        except ConnectionError:
            pass
    answers = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length and not (request.startswith(b"HEAD") and not answers) else 0
        answers.append((status, rest[:size]))
        data = rest[size:]
    return answers


@pytest.mark.parametrize("name", list(REFUSED))
def test_malformed_http_ends_the_connection(server: WholeServer, key: bytes, name: str) -> None:
    answers = converse(server, key, REFUSED[name])
    assert [status for status, _ in answers] == [400]
    assert answers[-1][1] == b"Invalid HTTP request received."


@pytest.mark.parametrize("name", list(HOSTS))
def test_a_request_names_one_host(server: WholeServer, key: bytes, name: str) -> None:
    request, fault = HOSTS[name]
    for url in (server.data_url, server.admin_url):
        (status, text) = converse(server, key, request, url)[0]
        assert (status, fault in text) == (400, True), text
        # Behind requests that are answered, the refusal comes last.
        first, second = converse(server, key, NEXT.replace(b"Connection: close\r\n", b"") + request, url)
        assert (first[0], second[0], fault in second[1]) == (200, 400, True)


def test_a_length_shorter_than_the_body_is_believed(server: WholeServer, key: bytes) -> None:
    """What comes behind it is another message, and no HTTP."""
    (first, second) = converse(server, key, post(b"Content-Length: 5"))
    assert (first[0], b"not valid JSON" in first[1]) == (400, True)
    assert second == (400, b"Invalid HTTP request received.")


@pytest.mark.parametrize("name", list(ANSWERED))
def test_valid_http_is_answered_once(server: WholeServer, key: bytes, name: str) -> None:
    request, status = ANSWERED[name]
    answers = converse(server, key, request)
    assert [status for status, _ in answers] == [status, 200], answers
    assert json.loads(answers[1][1]) == {"status": "ok"}
    body = answers[0][1]
    if status != 200 and body:
        told = json.loads(body)
        assert set(told.get("error", told)) >= {"code"}
        assert body.isascii() or body.decode()
        assert not re.search(rb"[\x00-\x1f\x7f]", body)


def test_http_1_0_is_answered_and_closed(server: WholeServer, key: bytes) -> None:
    for extra in (b"", b"Connection: keep-alive\r\n"):
        request = b"GET /v1/models HTTP/1.0\r\nKEY" + extra + b"\r\n"
        assert [status for status, _ in converse(server, key, request)] == [200]


def test_pipelined_requests_are_answered_in_order(server: WholeServer, key: bytes) -> None:
    requests = b"".join(get(b"/v1/models/" + name) for name in (b"tiny", b"a", b"tiny")) + post() + get(b"/x")
    answers = converse(server, key, requests)
    assert [status for status, _ in answers] == [200, 404, 200, 200, 404, 200]


def test_a_body_is_asked_for_once(server: WholeServer, key: bytes) -> None:
    host, port = server.data_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        head, _, body = post(b"Expect: 100-continue", b"Connection: close").partition(b"\r\n\r\n")
        sock.sendall(head.replace(b"KEY", b"Authorization: Bearer %s\r\n" % key) + b"\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        data = b""
        while chunk := sock.recv(1 << 16):
            data += chunk
        assert data.startswith(b"HTTP/1.1 200 ")
        # A stranger is told no without being asked for the body.
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(head.replace(b"KEY", b"") + b"\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")


def test_body_that_comes_after_an_upgrade_request(server: WholeServer, key: bytes) -> None:
    """Not in one piece with its head: what the parser said of the head is no longer in its hands then."""
    head, _, body = post(UPGRADE.rstrip()).partition(b"\r\n\r\n")
    host, port = server.data_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(head.replace(b"KEY", b"Authorization: Bearer %s\r\n" % key) + b"\r\n\r\n")
        eventually(lambda: server.apps.shared.drain.in_flight > 0)
        sock.sendall(body + NEXT)
        data = b""
        while chunk := sock.recv(1 << 16):
            data += chunk
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"200"]


def test_early_closes_leave_nothing(server: WholeServer, key: bytes) -> None:
    """At every byte of a request's way a client may be gone."""
    raw = post(CHUNKED, body=CHUNKS).replace(b"KEY", b"Authorization: Bearer %s\r\n" % key)
    host, port = server.data_url.removeprefix("http://").split(":")
    for end in range(0, len(raw) + 1, 3):
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(raw[:end])
    server.settle()


def test_the_bounds_are_the_documented_ones() -> None:
    bounds = Bounds()
    assert (bounds.head_bytes, bounds.headers, bounds.pipelined) == (32 << 10, 128, 8)
    assert (bounds.head_s, bounds.linger_s, MIN_BYTES_PER_S) == (30.0, 30.0, 4096)


def test_malformed_http_is_not_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with whole_server(tmp_path) as own:
        for name in ("TLS", "CONNECT", "length and chunks", "HTTP/2.0"):
            converse(own, b"x", REFUSED[name])
        for name in ("an upgrade to a websocket", "an upgrade to h2c"):
            converse(own, b"x", ANSWERED[name][0])
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
