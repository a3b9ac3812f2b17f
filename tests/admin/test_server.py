"""The whole admin port over real sockets: uploads that are abandoned, too many, or cut by a kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loraplex.admin.problem import from_exception
from loraplex.admin.services import UploadGate
from loraplex.control.catalog.adapters import Catalog
from loraplex.http.body import chunks
from loraplex.http.errors import BodyTooSlow
from support.http.admin_plane import ADMIN_TOKEN, AdminPlane, adapter_files
from support.http.api_server import serve_app
from support.http.multipart import CONTENT_TYPE, files
from support.waiting import eventually

PATH = "/admin/v1/tenants/acme/adapters/support/versions"
AUTH = {"authorization": f"Bearer {ADMIN_TOKEN}"}


def begin_upload(port: int, size: int = 4_000_000) -> socket.socket:
    """A connection on which half of an upload has been sent."""
    raw = files(b"{}", b"x" * size)
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = [f"POST {PATH} HTTP/1.1", "Host: x", f"Authorization: Bearer {ADMIN_TOKEN}"]
    head += [f"Content-Type: {CONTENT_TYPE}", f"Content-Length: {len(raw)}"]
    sock.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + raw[: len(raw) // 2])
    return sock


def staged_bytes(staging: Path) -> int:
    """Of all files under `staging`; the server renames and removes some meanwhile."""
    total = 0
    for path in staging.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def test_push_over_a_socket_and_hang_up(plane: AdminPlane, tmp_path: Path) -> None:
    plane.make_tenant()
    with serve_app(plane.app) as server:
        with begin_upload(server.port):
            eventually(lambda: len(plane.leftovers()) == 1)
        eventually(lambda: plane.leftovers() == [])
        made = httpx.post(server.url + PATH, files=adapter_files(tmp_path / "a"), headers=AUTH)
        assert made.status_code == 201, made.text


def test_more_uploads_than_slots_get_503(tmp_path: Path) -> None:
    plane = AdminPlane(tmp_path, gate=UploadGate(max_uploads=1))
    plane.make_tenant()
    with serve_app(plane.app) as server:
        with begin_upload(server.port):
            eventually(lambda: len(plane.leftovers()) == 1)
            refused = httpx.post(server.url + PATH, files=adapter_files(tmp_path / "a"), headers=AUTH)
            assert (refused.status_code, refused.json()["code"]) == (503, "server_overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            # Nothing else waits for an upload.
            assert httpx.get(f"{server.url}/admin/v1/tenants", headers=AUTH).status_code == 200
        eventually(lambda: plane.leftovers() == [])
        made = httpx.post(server.url + PATH, files=adapter_files(tmp_path / "b"), headers=AUTH)
        assert made.status_code == 201
    plane.close()


def test_uploads_that_do_not_come_keep_no_other_tenant_out(tmp_path: Path) -> None:
    plane = AdminPlane(tmp_path, gate=UploadGate(max_uploads=4))
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    with serve_app(plane.app) as server:
        with begin_upload(server.port), begin_upload(server.port):
            eventually(lambda: len(plane.leftovers()) == 2)
            refused = httpx.post(server.url + PATH, files=adapter_files(tmp_path / "a"), headers=AUTH)
            assert (refused.status_code, refused.json()["code"]) == (503, "server_overloaded")
            url = server.url + PATH.replace("acme", "rival")
            assert httpx.post(url, files=adapter_files(tmp_path / "b"), headers=AUTH).status_code == 201
        eventually(lambda: plane.leftovers() == [])
        made = httpx.post(server.url + PATH, files=adapter_files(tmp_path / "c"), headers=AUTH)
        assert made.status_code == 201
    plane.close()


async def test_a_body_that_drips_has_no_more_time() -> None:
    """A byte at a time, each well within the silence that is allowed."""
    sent = 0

    async def receive() -> dict[str, object]:
        nonlocal sent
        await asyncio.sleep(0.02)
        sent += 1
        return {"type": "http.request", "body": b" ", "more_body": True}

    for silence_s in (0.2, 0.8, 3.2, 12.8):  # a busy machine may be silent for some of it
        sent = 0
        with pytest.raises(BodyTooSlow) as caught:
            async for _ in chunks(receive, silence_s=silence_s):
                assert sent < 1000
        assert from_exception(caught.value).code == "request_timeout"
        if sent > 1:
            break
    assert sent > 1


def test_validations_are_bounded_and_block_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = AdminPlane(tmp_path, gate=UploadGate(max_uploads=10, max_validations=2))
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    go, lock, running, busiest = threading.Event(), threading.Lock(), 0, 0
    admit = Catalog.admit

    def slow_admit(*args: object, **options: object) -> object:
        nonlocal running, busiest
        with lock:
            running += 1
            busiest = max(busiest, running)
        go.wait(60)
        try:
            return admit(*args, **options)  # type: ignore[arg-type]
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(Catalog, "admit", slow_admit)
    statuses: list[int] = []
    with serve_app(plane.app) as server:

        def upload(number: int) -> None:
            parts = adapter_files(tmp_path / str(number), seed=number)
            tenant = ("acme", "rival")[number % 2]
            url = f"{server.url}/admin/v1/tenants/{tenant}/adapters/a{number}/versions"
            statuses.append(httpx.post(url, files=parts, headers=AUTH, timeout=60).status_code)

        threads = [threading.Thread(target=upload, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        eventually(lambda: running == 2 and len(plane.leftovers()) == 5)
        assert httpx.get(f"{server.url}/admin/v1/tenants", headers=AUTH).status_code == 200
        go.set()
        for thread in threads:
            thread.join()
    assert statuses == [201] * 5
    assert busiest == 2
    plane.close()


def test_validations_of_one_tenant_hold_up_no_other_tenants_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = AdminPlane(tmp_path, gate=UploadGate(max_uploads=16, max_validations=2))
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
    go, began = threading.Event(), threading.Event()
    admit = Catalog.admit

    def slow_admit(catalog: Catalog, tenant: str, *args: object, **options: object) -> object:
        if tenant == "acme":
            began.set()
            go.wait(120)
        return admit(catalog, tenant, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Catalog, "admit", slow_admit)
    statuses: list[int] = []
    parts = adapter_files(tmp_path / "made")
    size = sum(len(content) for _, content in parts.values())
    with serve_app(plane.app) as server:

        def upload(number: int) -> None:
            url = f"{server.url}/admin/v1/tenants/acme/adapters/a{number}/versions"
            statuses.append(httpx.post(url, files=parts, headers=AUTH, timeout=120).status_code)

        threads = [threading.Thread(target=upload, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        try:
            staging = tmp_path / "artifacts" / "staging"
            eventually(lambda: began.is_set() and staged_bytes(staging) == 6 * size)
            url = server.url + PATH.replace("acme", "rival")
            assert httpx.post(url, files=parts, headers=AUTH, timeout=30).status_code == 201
            assert statuses == []
        finally:
            go.set()
            for thread in threads:
                thread.join()
    assert statuses == [201] * 6
    plane.close()


@contextmanager
def server_process(root: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The process, its port, and how many staging folders it swept at its start."""
    tests = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, str(tests / "support" / "faults" / "upload_server.py"), str(root)],
        env=os.environ | {"PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        port, swept = child.stdout.readline().split()
        yield child, int(port), int(swept)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.slow
def test_kill_9_during_an_upload_leaves_staging_only_and_the_next_start_sweeps_it(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    staging = root / "artifacts" / "staging"
    with server_process(root) as (child, port, _):
        base = f"http://127.0.0.1:{port}"
        assert httpx.post(f"{base}/admin/v1/tenants", json={"id": "acme"}, headers=AUTH).status_code == 201
        kept = httpx.post(base + PATH, files=adapter_files(tmp_path / "a"), headers=AUTH)
        assert kept.status_code == 201
        with begin_upload(port):
            eventually(lambda: staged_bytes(staging) > 1_000_000)
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert len(list(staging.iterdir())) == 1
    with server_process(root) as (_, port, swept):
        assert swept == 1
        assert list(staging.iterdir()) == []
        versions = httpx.get(f"http://127.0.0.1:{port}{PATH}", headers=AUTH).json()["data"]
        assert [(row["version"], row["digest"]) for row in versions] == [("v1", kept.json()["digest"])]
        again = httpx.post(
            f"http://127.0.0.1:{port}{PATH}", files=adapter_files(tmp_path / "b"), headers=AUTH
        )
        assert (again.status_code, again.json()["version"]) == (200, "v1")
