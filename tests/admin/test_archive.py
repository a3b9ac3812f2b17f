"""Downloads of a version's files: exactly what was uploaded, or an answer that is too short."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs

from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.admin.download import Download
from loraplex.control.db.tables import AdapterVersion
from loraplex.http.context import RequestContext
from support.http.admin_plane import AdminPlane, adapter_files, assert_problem
from support.http.api_server import serve_app
from support.http.whole_server import WholeServer, bearer, whole_server

VERSION = "/tenants/acme/adapters/support/versions/v1"
ARCHIVE = f"{VERSION}/archive"
LARGE = 24 << 20


def files_of(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def stored(plane: AdminPlane, version: str = "v1") -> Path:
    digest = plane.services.catalog.get_version("acme", "support", version).digest
    return plane.services.artifacts.store.path(digest)


def grow(plane: AdminPlane) -> bytes:
    """Give v1 other bytes, more than fit into a connection's buffers; those of its tensors."""
    tensors = hashlib.shake_128(b"seed").digest(LARGE)
    store = plane.services.artifacts.store
    with store.begin_staging() as staging:
        staging.config_path.write_bytes(b"{}")
        staging.tensors_path.write_bytes(tensors)
        digest = digest_upload(staging.config_path, staging.tensors_path)
        store.commit(staging, digest)
    with plane.database.write() as session:
        session.execute(update(AdapterVersion).values(digest=digest, bytes=LARGE + 2))
    return tensors


def damage(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


class TestPlainly:
    @pytest.fixture(autouse=True)
    def _adapter(self, plane: AdminPlane) -> None:
        plane.make_tenant("acme")

    async def test_archive_holds_the_uploaded_files_and_nothing_else(
        self, plane: AdminPlane, admin: httpx.AsyncClient, tmp_path: Path
    ) -> None:
        uploaded = adapter_files(tmp_path / "a")
        await admin.post(VERSION.removesuffix("/v1"), files=uploaded)
        answer = await admin.get(ARCHIVE)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-tar"
        assert answer.headers["content-disposition"] == 'attachment; filename="support-v1.tar"'
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert files_of(answer.content) == {name: data for name, (_, data) in uploaded.items()}
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            members = [(m.name, m.mode, m.uid, m.gid, m.mtime, m.type) for m in tar]
        assert members == [(name, 0o644, 0, 0, 0, b"0") for name in (CONFIG_NAME, TENSORS_NAME)]
        assert (await admin.get(ARCHIVE)).content == answer.content
        head = await admin.head(ARCHIVE)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == answer.headers["content-length"]
        again = await admin.post(VERSION.removesuffix("/v1"), files={"archive": ("a.tar", answer.content)})
        assert (again.status_code, again.json()["version"]) == (200, "v1")
        assert len(plane.services.download_gate.downloads) == 0

    async def test_refused_downloads(self, plane: AdminPlane, admin: httpx.AsyncClient) -> None:
        plane.make_adapter()
        for version in ("v2", "v01", "latest"):
            missing = await admin.get(ARCHIVE.replace("v1/", f"{version}/"))
            assert_problem(missing, 404, "version_not_found")
        assert_problem(await admin.get(ARCHIVE.replace("support", "x")), 404, "adapter_not_found")
        assert_problem(await admin.get(f"{ARCHIVE}?format=zip"), 400, "unknown_parameter")
        with plane.database.write() as session:
            session.execute(update(AdapterVersion).values(state="incompatible"))
        assert (await admin.get(ARCHIVE)).status_code == 200
        await admin.delete(VERSION)
        assert_problem(await admin.get(ARCHIVE), 404, "version_not_found")

    @pytest.mark.parametrize("kind", ["changed", "cut", "lost"])
    async def test_damage_is_told_and_recorded(
        self, plane: AdminPlane, admin: httpx.AsyncClient, kind: str
    ) -> None:
        plane.make_adapter()
        info = plane.services.catalog.get_version("acme", "support", "v1")
        tensors = stored(plane) / TENSORS_NAME
        if kind == "changed":
            damage(tensors, tensors.stat().st_size - 1)
        elif kind == "cut":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        else:
            tensors.unlink()
        for method in ("GET", "GET"):
            answer = await admin.request(method, ARCHIVE)
            problem = assert_problem(answer, 503, "adapter_unavailable")
            assert "upload the same files again" in problem["detail"]
        assert (await admin.get(VERSION)).json()["state"] == "corrupt"
        assert plane.engine.drops == [info.digest]
        plane.make_adapter()
        assert (await admin.get(ARCHIVE)).status_code == 200

    async def test_a_tenants_downloads_leave_room_for_others(
        self, plane: AdminPlane, admin: httpx.AsyncClient
    ) -> None:
        plane.make_adapter()
        gate = plane.services.download_gate
        while gate.downloads.acquire("acme", gate.max_downloads):
            pass
        refused = await admin.get(ARCHIVE)
        assert_problem(refused, 503, "server_overloaded")
        assert "retry-after" in refused.headers
        gate.downloads.release("acme")
        for _ in range(3):
            assert (await admin.get(ARCHIVE)).status_code == 200


class TestOnTheWire:
    @pytest.fixture
    def server(self, tmp_path: Path) -> Any:
        with whole_server(tmp_path) as server:
            server.plane.make_tenant("acme")
            server.plane.make_adapter()
            yield server

    def get(self, server: WholeServer, port: str = "data") -> Any:
        key = server.plane.make_key("acme", "adapters:read")
        url = server.data_url if port == "data" else server.admin_url
        return server.http.stream("GET", f"{url}/admin/v1{ARCHIVE}", headers=bearer(key))

    def test_a_large_one_comes_whole_on_both_ports(self, server: WholeServer) -> None:
        tensors = grow(server.plane)
        for port in ("data", "admin"):
            with self.get(server, port) as answer:
                content = answer.read()
            assert files_of(content) == {CONFIG_NAME: b"{}", TENSORS_NAME: tensors}
            assert len(content) == int(answer.headers["content-length"])
        server.settle()

    def test_one_that_is_deleted_meanwhile_comes_whole(self, server: WholeServer) -> None:
        tensors = grow(server.plane)
        with self.get(server) as answer:
            pieces = answer.iter_raw(1024)
            begun = next(pieces)
            (removed,) = server.plane.services.catalog.delete_adapter("acme", "support").digests
            assert removed not in set(server.plane.services.artifacts.store.digests())
            content = begun + b"".join(pieces)
        assert files_of(content)[TENSORS_NAME] == tensors
        with self.get(server) as answer:
            assert answer.status_code == 404

    @pytest.mark.parametrize("port", ["data", "admin"])
    def test_damage_at_the_end_cuts_the_connection(self, server: WholeServer, port: str) -> None:
        grow(server.plane)
        damage(stored(server.plane) / TENSORS_NAME, LARGE - 1)
        received = 0
        with capture_logs() as logs:
            with self.get(server, port) as answer:
                assert answer.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    for piece in answer.iter_raw():
                        received += len(piece)
            assert received < int(answer.headers["content-length"]) - 512
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
            "download_cut",
            "artifact_damaged",
        ]
        assert server.plane.services.catalog.get_version("acme", "support", "v1").state == "corrupt"
        with self.get(server, port) as answer:
            assert answer.status_code == 503
            assert answer.read()

    def test_a_client_that_goes_away_is_forgotten(self, server: WholeServer) -> None:
        grow(server.plane)
        with self.get(server) as answer:
            assert server.apps.shared.drain.in_flight == 1
            next(answer.iter_raw(1024))
        server.settle()
        assert server.plane.services.catalog.get_version("acme", "support", "v1").state == "ready"


def test_a_client_that_reads_nothing_is_cut() -> None:
    closed = threading.Event()

    async def read() -> bytes:
        return bytes(1 << 20)

    async def fail(error: Exception) -> None:
        raise AssertionError(error)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        RequestContext.of(scope["headers"], send).attach(scope)
        download = Download(
            b"first",
            read,
            num_bytes=1 << 40,
            headers={},
            media_type="application/x-tar",
            on_failure=fail,
            close=closed.set,
            stall_s=0.2,
        )
        await download(scope, receive, send)

    with serve_app(app, lifespan="off") as server, server.connect(receive_buffer=4096) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert closed.wait(60)
        received = 0
        try:
            while data := sock.recv(1 << 16):
                received += len(data)
        except ConnectionResetError:
            pass
        assert received < 32 << 20


def test_nothing_is_sent_of_a_file_that_fails_at_once() -> None:
    """The answer's head has gone out: the connection ends."""
    from loraplex.adapters.errors import ArtifactUnreadable

    told: list[Exception] = []

    async def read() -> bytes:
        raise ArtifactUnreadable("the disk")

    async def note(error: Exception) -> None:
        told.append(error)

    def make(on_failure: Callable[[Any], Awaitable[None]]) -> Download:
        return Download(
            b"x", read, num_bytes=9, headers={}, media_type="a/b", on_failure=on_failure, close=lambda: None
        )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        RequestContext.of(scope["headers"], send).attach(scope)
        await make(note)(scope, receive, send)

    with serve_app(app, lifespan="off") as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url)
        assert len(told) == 1
        with socket.create_connection((server.host, server.port), timeout=60):
            pass  # the server lives
