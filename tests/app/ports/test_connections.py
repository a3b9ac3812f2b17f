"""What a stranger can hold of a server without a key: nothing for long, and nothing without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from loraplex.app.ports.connections import Bounds, ConnectionTable, bounded_protocol, raise_open_files
from support.http.api_server import RunningServer, serve_app
from support.waiting import eventually

BIG_ANSWER = 48 << 20
TIMES_S = (0.1, 0.4, 1.6, 6.4)
"""Tried by turns where something has to be done in time: a busy machine needs longer ones."""
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers the body's length; /big answers much, /early before it has read the body, /headers its headers."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    headers = b",".join(name for name, _ in scope["headers"])
    body = {"/big": bytes(BIG_ANSWER), "/headers": headers}.get(scope["path"], b"%d" % size)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
    )
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serve(
    bounds: Bounds | None = None, *, limit: int = 1000, keep_alive: int = 60
) -> Iterator[tuple[RunningServer, ConnectionTable]]:
    table = ConnectionTable(limit)
    with serve_app(echo, http=bounded_protocol(table, bounds), timeout_keep_alive=keep_alive) as server:
        yield server, table


def hurry(table: ConnectionTable, bounds: Bounds) -> None:
    """From now on these bounds are those of the one connection."""
    (connection,) = table._open
    connection._bounds = bounds


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve() as (running, _):
        yield running


def read_all(sock: socket.socket) -> bytes:
    """Up to the end, or a reset."""
    data = b""
    try:
        while chunk := sock.recv(1 << 16):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def exchange(sock: socket.socket, request: bytes, answer: bytes) -> None:
    """Send, and read until `answer` has come."""
    sock.sendall(request)
    data = b""
    while not data.endswith(answer):
        chunk = sock.recv(1 << 16)
        assert chunk, f"the connection ended after {data!r}"
        data += chunk


def flood(sock: socket.socket, chunk: bytes, at_most: int) -> int:
    """Send `chunk` over and over until the other side has had enough; bytes sent."""
    sent = 0
    try:
        while sent < at_most:
            sock.sendall(chunk)
            sent += len(chunk)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("beginning", "rest"),
    [
        (HEAD + b"X-Endless: ", b"a" * 65536),
        (HEAD, b"a: b\r\n" * 8192),
        (b"GET /", b"a" * 65536),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 65536),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 8192),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Endless: ", b"a" * 65536),
        (b"", b"GET /wait HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n" * 1000),
        (b"", HEAD + b"\r\n" + (HEAD + b"\r\n") * 2000),
    ],
    ids=["a header", "headers", "a URL", "a chunk's header", "trailers", "a trailer", "bodies", "requests"],
)
def test_nothing_endless_is_read(server: RunningServer, beginning: bytes, rest: bytes) -> None:
    sock = server.connect()
    sock.sendall(beginning)
    # Beyond the bound only what the kernel's buffers hold goes out.
    assert flood(sock, rest, 256 << 20) < 64 << 20
    read_all(sock)
    exchange(server.connect(), HEAD + b"\r\n", b"\r\n\r\n0")


def test_a_large_head_is_told_so(server: RunningServer) -> None:
    sock = server.connect()
    sock.sendall(HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(200)))
    assert read_all(sock).startswith(b"HTTP/1.1 431 ")


def test_requests_within_the_bounds_pass(server: RunningServer) -> None:
    sock = server.connect()
    head = HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(100)) + b"y: " + b"z" * 20000 + b"\r\n"
    for _ in range(3):
        exchange(sock, head + b"\r\n", b"\r\n\r\n0")
    body = b"b" * (5 << 20)
    exchange(
        sock,
        HEAD.replace(b"GET", b"POST") + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        b"\r\n\r\n5242880",
    )
    chunks = b"".join(b"1;name=value\r\nc\r\n" for _ in range(20000))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange(sock, head + chunks + b"0\r\nTrailer: t\r\n\r\n", b"\r\n\r\n20000")
    exchange(sock, (HEAD + b"\r\n") * 4, b"\r\n\r\n0")


def test_a_trailer_is_no_header(server: RunningServer) -> None:
    sock = server.connect()
    request = b"POST /headers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: x\r\n\r\n"
    exchange(sock, request, b"\r\n\r\nhost,transfer-encoding")


@pytest.mark.parametrize(
    "sent",
    [b"", HEAD, HEAD + b"\r\n" + HEAD],
    ids=["nothing", "half a head", "half a second head"],
)
def test_a_head_has_its_time(sent: bytes) -> None:
    with serve(Bounds(head_s=0.2)) as (server, table):
        sock = server.connect()
        with contextlib.suppress(ConnectionError):  # a busy machine may send it when the time is over
            sock.sendall(sent)
        read_all(sock)
        eventually(lambda: len(table) == 0)


def test_an_empty_line_does_not_keep_a_connection() -> None:
    with serve() as (server, table):
        sock = server.connect()
        exchange(sock, HEAD + b"\r\n", b"\r\n\r\n0")
        hurry(table, Bounds(head_s=0.2))
        sock.sendall(b"\r\n")
        eventually(lambda: len(table) == 0)


def test_a_head_that_drips_has_no_more_time() -> None:
    with serve(Bounds(head_s=0.3)) as (server, table):
        sock = server.connect()
        sock.settimeout(0.02)
        drips = itertools.chain([HEAD + b"a: "], itertools.repeat(b"b"))
        ended, end = False, time.monotonic() + 60
        while not ended:
            assert time.monotonic() < end, "it goes on"
            try:
                sock.sendall(next(drips))
                ended = sock.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        eventually(lambda: len(table) == 0)


def is_asked_for_its_body(sock: socket.socket) -> bool:
    """Whether its head comes in time."""
    try:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        return sock.recv(100).startswith(b"HTTP/1.1 100")
    except ConnectionError:
        return False


def test_a_body_takes_the_time_that_its_reader_gives_it() -> None:
    for head_s in TIMES_S:
        with serve(Bounds(head_s=head_s)) as (server, _):
            sock = server.connect()
            if not is_asked_for_its_body(sock):
                continue
            sock.sendall(b"a")
            sock.settimeout(4 * head_s)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            sock.settimeout(60)
            exchange(sock, b"b", b"\r\n\r\n2")
            return
    raise AssertionError(f"no head comes within {head_s} s")


def test_rest_of_a_refused_body_is_bounded() -> None:
    with serve() as (server, table):
        sock = server.connect()
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\na"
        exchange(sock, head, b"\r\n\r\n0")
        hurry(table, Bounds(head_s=0.2))
        eventually(lambda: flood(sock, b"a" * 1000, 1000) == 0)
        eventually(lambda: len(table) == 0)


@pytest.mark.parametrize("close", [True, False])
def test_an_answer_that_nobody_reads_is_dropped(close: bool) -> None:
    with serve(Bounds(linger_s=0.1), keep_alive=0) as (server, table):
        sock = server.connect(receive_buffer=2048)
        sock.sendall(
            b"GET /big HTTP/1.1\r\nHost: x\r\n" + (b"Connection: close\r\n" if close else b"") + b"\r\n"
        )
        assert sock.recv(1) == b"H"
        eventually(lambda: len(table) == 0)
        assert len(read_all(sock)) < BIG_ANSWER


def read_slowly(sock: socket.socket, step: int, pause_s: float) -> int:
    """Bytes read up to the end, with a pause behind each of the first twenty steps of `step` bytes."""
    size, pauses = 0, 0
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(min(step, 1 << 20)):
            size += len(chunk)
            if pauses < 20 and size > (pauses + 1) * step:
                time.sleep(pause_s)
                pauses += 1
    return size


@pytest.mark.parametrize("step", [64 << 10, BIG_ANSWER // 20])
def test_an_answer_that_is_read_slowly_comes_whole(step: int) -> None:
    """For longer than a client may read nothing, and also where it reads less than the kernel has."""
    for linger_s in TIMES_S:
        with serve(Bounds(linger_s=linger_s), keep_alive=0) as (server, _):
            sock = server.connect(receive_buffer=65536)
            sock.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            size = read_slowly(sock, step, linger_s / 4)
        if size > BIG_ANSWER:
            break
    assert size > BIG_ANSWER


class Held:
    """Answers a request in two parts; /held sends the second one when it is `released`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if scope["path"] == "/held":
            gone, released = asyncio.create_task(receive()), asyncio.create_task(self.released.wait())
            await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
            self.num_gone += gone.done() and gone.result()["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b"b"})


HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
REFUSED = b"HTTP/1.1 400 Bad Request"


@contextmanager
def serve_held() -> Iterator[tuple[Held, RunningServer]]:
    app = Held()
    with serve_app(app, http=bounded_protocol(ConnectionTable(100))) as server:
        yield app, server


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        chunk = sock.recv(1 << 16)
        assert chunk, data
        data += chunk
    return data


@pytest.mark.parametrize(
    ("behind", "answers"),
    [(b"\x00\x01\r\n\r\n", 1), (b"GET / HTTP/3.0\r\n\r\n", 1), (20 * (HEAD + b"\r\n"), 9)],
    ids=["no-http", "version", "too-many"],
)
def test_what_is_refused_waits_for_the_answers_before_it(
    caplog: pytest.LogCaptureFixture, behind: bytes, answers: int
) -> None:
    with serve_held() as (app, server):
        sock = server.connect()
        sock.sendall(HELD)
        data = read_until(sock, b"\r\n\r\na")
        sock.sendall(behind)
        sock.sendall(b"more")  # nobody looks at it
        server.loop.call_soon_threadsafe(app.released.set)
        data += read_all(sock)
    *answered, refused = data.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] + answer[-2:] for answer in answered] == [b"200ab"] * answers
    assert refused.startswith(b"400 ")
    assert not caplog.records


def test_a_request_whose_body_is_broken_is_refused_at_once() -> None:
    with serve() as (server, _):
        sock = server.connect()
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        assert read_all(sock).startswith(REFUSED)
        sock = server.connect()
        sock.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        data = read_until(sock, b"\r\n\r\n0")
        sock.sendall(b"zz\r\n")
        assert (data + read_all(sock)).count(b"HTTP/1.1 ") == 2


def test_a_client_that_goes_is_told_to_each_of_its_pipelined_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve_held() as (app, server):
        with server.connect() as sock:
            sock.sendall(3 * HELD)
            read_until(sock, b"\r\n\r\na")
        eventually(lambda: app.num_gone == 1)  # those that had not begun do not
    assert not caplog.records


def test_idle_connections_keep_no_client_out() -> None:
    with serve(limit=8) as (server, table):
        busy = server.connect()
        busy.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert busy.recv(100).startswith(b"HTTP/1.1 100")
        held = [server.connect() for _ in range(50)]
        eventually(lambda: len(table) == 8)
        for _ in range(20):
            exchange(server.connect(), HEAD + b"\r\n", b"\r\n\r\n0")
        exchange(busy, b"ab", b"\r\n\r\n2")
        assert read_all(held[0]) == b""


def test_a_full_server_of_busy_connections_refuses_at_once() -> None:
    with serve(limit=2) as (server, table):
        busy = [server.connect() for _ in range(2)]
        for sock in busy:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 100")
        assert read_all(server.connect()) == b""
        for sock in busy:
            exchange(sock, b"ab", b"\r\n\r\n2")
        newest = server.connect()
        exchange(newest, HEAD + b"\r\n", b"\r\n\r\n0")
        assert len(table) == 2


def test_all_file_descriptors_that_may_be_had_are_taken() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        connections = raise_open_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard or soft == 1 << 20
        assert 64 <= connections <= max(64, soft - 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
