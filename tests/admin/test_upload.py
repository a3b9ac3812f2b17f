"""Uploads over a real socket: streamed, capped, and without a trace when they end early."""

from __future__ import annotations

import errno
import functools
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import anyio
import httpx
import psutil
import pytest
from fastapi import FastAPI, Request

from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.admin.app import create_application
from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.admin.framework.dependencies import Audited, Operator
from loraplex.admin.framework.route import UPLOAD, AdminRoute, Guard
from loraplex.admin.uploads import receive
from loraplex.admin.uploads.receive import receive_upload
from loraplex.control.catalog.staged import StagedBytes, StagedUpload, UploadRoom
from loraplex.control.types import Principal
from support.http.api_server import RunningServer, serve_app
from support.http.multipart import CONTENT_TYPE, body, end, files, in_pieces, part
from support.waiting import eventually

MAX_BYTES = 96 << 20
CONFIG = b'{"r": 4}'


@dataclass
class Uploads:
    """An application with one route that takes uploads; `got` is what each whole one held."""

    root: Path
    silence_s: float = 20.0
    got: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = ArtifactStore(self.root)
        self.threads = anyio.CapacityLimiter(4)
        self.staged = StagedBytes()
        self.room: UploadRoom | None = None

    async def take(self, _: Annotated[Operator, Audited("x")], request: Request) -> None:
        """Take an upload."""
        with self.staged.upload("acme", "x", self.room) as staged:
            await self.receive(request, staged)

    async def receive(self, request: Request, staged: StagedUpload) -> None:
        async with receive_upload(
            request,
            self.store,
            max_bytes=MAX_BYTES,
            threads=self.threads,
            staged=staged,
            silence_s=self.silence_s,
        ) as received:
            directory = received.staging.directory
            self.got.append({path.name: path.stat().st_size for path in directory.iterdir()})

    async def authenticate(self, _secret: str) -> Principal:
        return Principal(None, None, frozenset(), is_admin=True)

    def app(self) -> FastAPI:
        route = AdminRoute("/upload", self.take, methods=["POST"], status_code=201, openapi_extra=UPLOAD)
        guard = Guard(self.authenticate, ChangeRateLimit(), self.note_refusal)
        return create_application([route], guard, services=None)

    async def note_refusal(self, *_: object) -> None:
        """This application has no log."""

    def leftovers(self) -> list[str]:
        return [path.name for path in (self.root / "staging").iterdir()]


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "store")


@pytest.fixture
def server(uploads: Uploads) -> Iterator[RunningServer]:
    with serve_app(uploads.app()) as running:
        yield running


HEADERS = {"authorization": "Bearer x", "content-type": CONTENT_TYPE}


def post(server: RunningServer, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}/upload", content=content, headers=HEADERS | headers, timeout=60)


def raw_request(server: RunningServer, *headers: str) -> socket.socket:
    sock = server.connect()
    lines = ["POST /upload HTTP/1.1", "Host: x", "Authorization: Bearer x", f"Content-Type: {CONTENT_TYPE}"]
    sock.sendall(("\r\n".join([*lines, *headers]) + "\r\n\r\n").encode())
    return sock


def test_upload_lies_in_staging_and_is_removed_afterwards(server: RunningServer, uploads: Uploads) -> None:
    assert post(server, files(CONFIG, b"x" * 3_000_000)).status_code == 201
    assert post(server, body(part("archive", b"y" * 500, filename="../../evil.tar"))).status_code == 201
    assert uploads.got == [
        {"adapter_config.json": len(CONFIG), "adapter_model.safetensors": 3_000_000},
        {"upload": 500},
    ]
    assert uploads.leftovers() == []


def test_an_empty_part_is_an_empty_file(server: RunningServer, uploads: Uploads) -> None:
    assert post(server, files(CONFIG, b"")).status_code == 201
    assert uploads.got[0]["adapter_model.safetensors"] == 0


def big_upload(size: int) -> Iterator[bytes]:
    yield part("adapter_config.json", CONFIG)
    yield part("adapter_model.safetensors", b"").removesuffix(b"\r\n")
    block = bytes(range(256)) * 256
    for _ in range(size // len(block)):
        yield block
    yield b"\r\n" + end()


def test_memory_stays_flat_under_a_large_upload(server: RunningServer, uploads: Uploads) -> None:
    post(server, big_upload(4 << 20))
    process = psutil.Process()
    before, highest, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert post(server, big_upload(64 << 20)).status_code == 201
    finally:
        done.set()
        watcher.join()
    assert uploads.got[-1]["adapter_model.safetensors"] == 64 << 20
    assert highest - before < 16 << 20  # client and server together


def test_a_declared_length_above_the_cap_is_refused_before_a_byte_of_it(
    server: RunningServer, uploads: Uploads
) -> None:
    with raw_request(server, f"Content-Length: {MAX_BYTES * 2}", "Expect: 100-continue") as sock:
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")  # and no "100 Continue" before it
    assert uploads.leftovers() == []


def test_a_body_without_a_declared_length_is_counted(server: RunningServer, uploads: Uploads) -> None:
    answer = post(server, big_upload(MAX_BYTES + (1 << 20)))
    assert answer.status_code == 413
    assert answer.json()["code"] == "too_large"
    assert answer.headers["content-type"] == "application/problem+json"
    assert uploads.leftovers() == []


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_epilogue_is_bounded_and_the_refusal_says_so(
    server: RunningServer, uploads: Uploads, is_declared: bool
) -> None:
    def send(epilogue: int) -> httpx.Response:
        whole = files(CONFIG, b"x" * 1_500_000) + b"z" * epilogue
        return post(server, whole if is_declared else in_pieces(whole, 4096))

    assert send(60_000).status_code == 201
    refused = send(70_000)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_multipart")
    assert "more than 65536 bytes beside its files" in refused.json()["detail"]
    assert len(uploads.got) == 1
    assert uploads.leftovers() == []


def test_a_client_that_hangs_up_leaves_nothing(server: RunningServer, uploads: Uploads) -> None:
    raw = files(CONFIG, b"x" * 8_000_000)
    sock = raw_request(server, f"Content-Length: {len(raw)}")
    sock.sendall(raw[:5_000_000])
    eventually(lambda: len(uploads.leftovers()) == 1)
    sock.close()
    eventually(lambda: uploads.leftovers() == [])
    assert uploads.got == []
    assert post(server, files(CONFIG, b"x")).status_code == 201


def test_a_client_that_falls_silent_gets_408(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "store", silence_s=0.2)
    with serve_app(uploads.app()) as server, raw_request(server, "Content-Length: 1000") as sock:
        sock.sendall(part("adapter_config.json", CONFIG))
        answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        eventually(lambda: uploads.leftovers() == [])


def test_a_refusal_reaches_a_client_that_is_still_sending(server: RunningServer, uploads: Uploads) -> None:
    raw = body(part("optimizer.pt", b"x" * 6_000_000))
    answer = post(server, raw)
    assert answer.status_code == 400
    assert "optimizer.pt" in answer.json()["detail"]
    assert uploads.leftovers() == []


def test_a_simple_client_that_sends_all_before_it_reads_learns_why(
    server: RunningServer, uploads: Uploads
) -> None:
    raw = body(part("optimizer.pt", b"x" * 6_000_000))
    with raw_request(server, f"Content-Length: {len(raw)}") as sock:
        sock.sendall(raw)  # a connection closed in the middle of this would raise
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_compressed_body_is_refused(server: RunningServer) -> None:
    answer = post(server, files(CONFIG, b"x"), **{"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


def test_a_full_disk_is_507_and_keeps_nothing(
    server: RunningServer, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(receive, "write_all", no_room)
    answer = post(server, files(CONFIG, b"x"))
    assert (answer.status_code, answer.json()["code"]) == (507, "storage_full")
    assert uploads.leftovers() == []


@pytest.mark.parametrize(
    ("code", "status", "name"),
    [
        (errno.EDQUOT, 507, "storage_full"),
        (errno.EFBIG, 507, "storage_full"),
        (errno.EIO, 503, "storage_unavailable"),
        (errno.EROFS, 503, "storage_unavailable"),
        (errno.EACCES, 500, "internal_error"),
    ],
)
def test_disk_error_is_reported_without_internals(
    server: RunningServer,
    uploads: Uploads,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    status: int,
    name: str,
) -> None:
    def broken(*_: object) -> None:
        raise OSError(code, "no luck", "/secret/path")

    monkeypatch.setattr(receive, "write_all", broken)
    answer = post(server, files(CONFIG, b"x"))
    assert (answer.status_code, answer.json()["code"]) == (status, name)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert "secret" not in answer.text
    assert uploads.leftovers() == []


def test_many_uploads_at_once_stay_apart(server: RunningServer, uploads: Uploads) -> None:
    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=60) as client:
            statuses: list[int] = []

            async def one(size: int) -> None:
                answer = await client.post("/upload", content=files(CONFIG, b"x" * size))
                statuses.append(answer.status_code)

            async with anyio.create_task_group() as group:
                for size in range(1000, 1020):
                    group.start_soon(functools.partial(one, size))
            return statuses

    assert anyio.run(run) == [201] * 20
    assert sorted(got["adapter_model.safetensors"] for got in uploads.got) == list(range(1000, 1020))
    assert uploads.leftovers() == []


def test_a_body_that_comes_byte_by_byte(server: RunningServer, uploads: Uploads) -> None:
    def content() -> Iterator[bytes]:
        for byte in files(CONFIG, b"x" * 3000):
            yield bytes([byte])

    assert post(server, content()).status_code == 201
    assert uploads.got == [{"adapter_config.json": len(CONFIG), "adapter_model.safetensors": 3000}]
