"""What only a raw socket shows: hang-ups, readers that stall, bodies that never end, broken HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from support.engine.fake_engine import Reply
from support.http.data_plane import DataPlane, running_data_plane

STALL_S = 0.4
MAX_BODY = 64 << 10


@pytest.fixture(
    scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def shared_plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DataPlane]:
    with running_data_plane(
        tmp_path_factory.mktemp("model"),
        loop_factory=request.param,
        max_body=MAX_BODY,
        max_model_len=1 << 20,
    ) as running:
        yield running


@pytest.fixture
def plane(shared_plane: DataPlane) -> Iterator[DataPlane]:
    shared_plane.be_patient(60)
    shared_plane.reset()
    yield shared_plane
    shared_plane.settle_all()


@pytest.fixture
def brisk(plane: DataPlane) -> DataPlane:
    """A data plane with little patience: for tests that are about it alone, as a busy machine loses it too."""
    plane.be_patient(STALL_S)
    return plane


def request_bytes(body: bytes, route: str = "completions", *, length: int | None = None) -> bytes:
    head = (
        f"POST /v1/{route} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def completion(**fields: Any) -> bytes:
    return request_bytes(json.dumps({"model": "pirate", "prompt": "x", **fields}).encode())


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        chunk = sock.recv(65536)
        assert chunk, data
        data += chunk
    return data


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower-case) and as much of the body as Content-Length says."""
    head, _, body = read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += sock.recv(65536)
    return int(first.split()[1]), headers, body


def wait_for(plane: DataPlane, condition: Callable[[], bool], timeout: float = 60) -> None:
    """Until the server's state is so."""
    end = time.monotonic() + timeout
    while not plane.on_loop(condition):
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


def cut(plane: DataPlane, reason: str) -> float:
    return plane.metrics._cut.labels(reason)._value.get()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 2])
def test_a_client_that_hangs_up_frees_the_engine(plane: DataPlane, stream: bool, hold_after: int) -> None:
    """Also before the first token, and while nothing is being produced."""
    before = cut(plane, "gone")
    plane.engine.script(*[Reply(text="abcdef", hold=True, hold_after=hold_after)] * 2)
    with plane.server.connect() as sock:
        sock.sendall(completion(stream=stream, n=2))
        if stream and hold_after:
            read_until(sock, b'"text":"b"')
        else:
            wait_for(plane, lambda: len(plane.engine.live) == 2)
    wait_for(
        plane, lambda: sorted(plane.engine.aborted) == sorted(r.request_id for r in plane.engine.requests)
    )
    plane.settle_all()
    assert len(plane.limiter.settled) == 1
    assert cut(plane, "gone") == before + 1


def test_a_hang_up_while_the_limits_are_asked(plane: DataPlane) -> None:
    """The reservation is made, and then given back except for the request; the engine never sees it."""
    held = plane.limiter.held = asyncio.Event()
    with plane.server.connect() as sock:
        sock.sendall(completion())
        wait_for(plane, lambda: plane.limiter.asked == 1)
    before = cut(plane, "gone")
    wait_for(plane, lambda: not plane.server.server.server_state.connections)
    plane.on_loop(held.set)
    plane.settle_all()
    assert plane.limiter.settled == [("r0", 0)]
    assert plane.engine.requests == []
    assert cut(plane, "gone") == before + 1


def test_a_hang_up_during_the_body(plane: DataPlane) -> None:
    with plane.server.connect() as sock:
        sock.sendall(request_bytes(b'{"model": ', length=500))
        wait_for(plane, lambda: plane.drain.in_flight == 1)
    wait_for(plane, lambda: plane.drain.in_flight == 0)
    assert plane.limiter.reserved == {}


def test_a_body_that_stops_coming(brisk: DataPlane) -> None:
    with brisk.server.connect() as sock:
        sock.sendall(request_bytes(b'{"model": ', length=500))
        status, headers, body = read_answer(sock)
        assert (status, headers["connection"]) == (408, "close")
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert sock.recv(1) == b""


def test_a_reader_that_stalls_is_cut(brisk: DataPlane) -> None:
    before = cut(brisk, "stalled")
    brisk.engine.script(Reply(text="x" * 400_000, chunk=1))
    with brisk.server.connect(receive_buffer=4096) as sock:
        sock.sendall(completion(stream=True, max_tokens=500_000))
        wait_for(brisk, lambda: cut(brisk, "stalled") == before + 1)
        assert brisk.limiter.settled
        # The connection itself is gone too, not only the answer.
        wait_for(brisk, lambda: not brisk.server.server.server_state.connections)


def reads_on(sock: socket.socket, pause_s: float) -> bool:
    """Whether there is something to read for a dozen pauses."""
    try:
        for _ in range(12):
            time.sleep(pause_s)
            if not all(sock.recv(4096) for _ in range(40)):
                return False
    except ConnectionError:
        return False
    return True


def test_a_slow_reader_that_goes_on_reading_is_not_cut(plane: DataPlane) -> None:
    for stall_s in (STALL_S, 4 * STALL_S, 16 * STALL_S):  # a busy machine stops reading for a while
        plane.be_patient(stall_s)
        before = cut(plane, "stalled")
        plane.engine.script(Reply(text="x" * 400_000, chunk=1))
        with plane.server.connect(receive_buffer=4096) as sock:
            sock.sendall(completion(stream=True, max_tokens=500_000))
            if reads_on(sock, stall_s / 4) and cut(plane, "stalled") == before:
                return
        plane.settle_all()
    raise AssertionError(f"it was cut, though it read on every {stall_s / 4} s")


def test_a_whole_answer_that_nobody_reads(brisk: DataPlane) -> None:
    brisk.engine.script(Reply(text="\x01" * 900_000, chunk=50_000))
    with brisk.server.connect(receive_buffer=4096) as sock:
        sock.sendall(completion(max_tokens=1_000_000))
        wait_for(brisk, lambda: bool(brisk.limiter.settled))
    assert brisk.limiter.settled == [("r0", 900_000 + 2)]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_too_large(plane: DataPlane, chunked: bool) -> None:
    """The answer comes though the client has not stopped sending, and the connection can be used again."""
    with plane.server.connect() as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
        size = 10 * MAX_BODY
        if chunked:
            pieces = b"".join(b"%x\r\n%s\r\n" % (4096, b"x" * 4096) for _ in range(size // 4096))
            message = head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
        else:
            message = head + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
        sender = threading.Thread(target=sock.sendall, args=(message,))
        sender.start()
        status, _, body = read_answer(sock)
        sender.join()
        assert status == 413
        assert json.loads(body)["error"]["code"] == "request_too_large"
        sock.sendall(completion())
        assert read_answer(sock)[0] == 200


def test_a_body_in_many_pieces(plane: DataPlane) -> None:
    message = completion()
    with plane.server.connect() as sock:
        for start in range(0, len(message), 7):
            sock.sendall(message[start : start + 7])
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize(
    "message",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n\r\nzz\r\n",
    ],
)
def test_broken_http_hurts_nobody(plane: DataPlane, message: bytes) -> None:
    with plane.server.connect() as sock:
        sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
        assert data == b"" or data.split()[1].startswith(b"4"), data
    answer = plane.http.get(f"{plane.url}/readyz")
    assert answer.status_code == 200


def test_two_requests_in_one_packet(plane: DataPlane) -> None:
    with plane.server.connect() as sock:
        sock.sendall(completion() + completion(max_tokens=1))
        answers = read_until(sock, b'"finish_reason":"length"')
    assert answers.count(b"HTTP/1.1 200") == 2


def test_expect_100_continue(plane: DataPlane) -> None:
    message = completion().replace(b"Host: x", b"Host: x\r\nExpect: 100-continue")
    head, _, body = message.partition(b"\r\n\r\n")
    with plane.server.connect() as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        assert read_answer(sock)[0] == 200


def test_many_hang_ups_at_random_moments_leave_nothing(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="abcdefgh" * 20)
    for number in range(60):
        with plane.server.connect() as sock:
            sock.sendall(completion(stream=bool(number % 3), n=1 + number % 3, stop=["h"] * (number % 2)))
            if number % 4:
                sock.settimeout(0.001 * (number % 7))
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    sock.recv(100 * (number % 5) + 1)
    plane.settle_all()
