"""`max_adapter_bytes` bounds what a tenant has on its way, too: over a real socket, upload beside upload."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.catalog.staged import StagedBytes, UploadRoom
from loraplex.control.errors import QuotaTaken
from support.adapters.archives import make_tar
from support.http.admin_plane import ADMIN_TOKEN, AdminPlane, adapter_files, assert_problem
from support.http.api_server import RunningServer, serve_app
from support.http.multipart import CONTENT_TYPE, body, files, in_pieces, part
from support.waiting import eventually

HEADERS = {"authorization": f"Bearer {ADMIN_TOKEN}", "content-type": CONTENT_TYPE}


class Shop:
    """A tenant whose quota has room for one adapter, and a half more."""

    def __init__(self, plane: AdminPlane, server: RunningServer, root: Path) -> None:
        self.plane = plane
        self.server = server
        made = adapter_files(root / "made")
        self.config, self.tensors = (content for _, content in made.values())
        self.size = len(self.config) + len(self.tensors)
        plane.make_tenant("acme", limits={"max_adapter_bytes": self.size * 3 // 2})
        plane.make_tenant("rival", limits={"max_adapter_bytes": self.size})

    def url(self, name: str, tenant: str = "acme") -> str:
        return f"{self.server.url}/admin/v1/tenants/{tenant}/adapters/{name}/versions"

    def push(
        self, name: str, tenant: str = "acme", content: bytes | Iterator[bytes] | None = None
    ) -> httpx.Response:
        content = files(self.config, self.tensors) if content is None else content
        return httpx.post(self.url(name, tenant), content=content, headers=HEADERS, timeout=60)

    def begin(self, name: str, declared: bool) -> socket.socket:
        """An upload that has come to all but its last boundary."""
        whole = files(self.config, self.tensors)
        sock = self.server.connect(timeout=60)
        head = [f"POST {httpx.URL(self.url(name)).path} HTTP/1.1", "Host: x"]
        head += [f"{key}: {value}" for key, value in HEADERS.items()]
        head.append(f"Content-Length: {len(whole)}" if declared else "Transfer-Encoding: chunked")
        sock.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        sent = whole[:-20]
        sock.sendall(sent if declared else b"%x\r\n%s\r\n" % (len(sent), sent))
        eventually(lambda: self.staged() >= self.size)
        return sock

    def finish(self, sock: socket.socket) -> int:
        sock.sendall(files(self.config, self.tensors)[-20:])
        return int(sock.recv(1 << 16).split()[1])

    def staged(self, tenant: str = "acme") -> int:
        return self.plane.gate.staged.num_bytes(tenant)

    def check_nothing_is_held(self) -> None:
        eventually(lambda: self.staged() == 0)
        assert self.plane.leftovers() == []
        self.plane.check_integrity()


@pytest.fixture
def shop(plane: AdminPlane, tmp_path: Path) -> Iterator[Shop]:
    with serve_app(plane.app) as server:
        made = Shop(plane, server, tmp_path)
        yield made
        made.check_nothing_is_held()


@pytest.mark.parametrize("declared", [True, False])
def test_two_uploads_at_once_do_not_stage_more_than_the_quota_leaves(shop: Shop, declared: bool) -> None:
    first = shop.begin("one", declared)
    refused = shop.push("two")
    problem = assert_problem(refused, 503, "server_overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert f"other uploads in progress take {shop.size} of them" in problem["detail"]
    assert shop.staged() == shop.size
    assert shop.push("two", "rival").status_code == 201  # another tenant's quota is its own
    first.close()
    shop.check_nothing_is_held()
    assert shop.push("two").status_code == 201  # nothing of the one that went is counted


def test_upload_admitted_meanwhile_counts(shop: Shop) -> None:
    """Nobody stages into the room that an upload has just filled for good."""
    first = shop.begin("one", declared=True)
    assert shop.finish(first) == 201
    first.close()
    assert_problem(shop.push("two"), 422, "quota_exceeded")


def test_a_body_without_a_length_is_refused_as_it_comes(shop: Shop) -> None:
    sent = 0

    def much() -> Iterator[bytes]:
        nonlocal sent
        for piece in in_pieces(files(shop.config, shop.tensors * 200), 4096):
            sent += len(piece)
            yield piece

    assert_problem(shop.push("one", content=much()), 422, "quota_exceeded")
    assert shop.plane.leftovers() == []


def test_a_declared_length_is_refused_before_a_byte_is_written(shop: Shop) -> None:
    whole = files(shop.config, shop.tensors * 200)
    with shop.server.connect(timeout=60) as sock:
        head = [f"POST {httpx.URL(shop.url('one')).path} HTTP/1.1", "Host: x", "Expect: 100-continue"]
        head += [f"{key}: {value}" for key, value in HEADERS.items()]
        sock.sendall(("\r\n".join([*head, f"Content-Length: {len(whole)}"]) + "\r\n\r\n").encode())
        answer = b""
        while piece := sock.recv(1 << 16):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert b"quota_exceeded" in answer


def test_the_same_bytes_again_need_no_room(shop: Shop) -> None:
    """Of several names at once, too: a client that pushes all of its adapters again is told that they are there."""
    shop.plane.services.tenants.update("acme", {"limits": {"max_adapter_bytes": 2 * shop.size}})
    assert [shop.push(name).status_code for name in ("one", "two")] == [201, 201]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(shop.push, ["one", "two"]))
    assert [answer.status_code for answer in answers] == [200, 200]
    first = shop.begin("one", declared=True)
    assert_problem(shop.push("one"), 503, "server_overloaded")  # twice at a time it is more than there is
    assert shop.finish(first) == 200
    first.close()
    shop.plane.services.tenants.update("acme", {"limits": {"max_adapter_bytes": 2 * shop.size - 1}})
    assert_problem(shop.push("one"), 422, "quota_exceeded")


def test_an_archive_counts_once_and_may_not_unpack_to_more(shop: Shop) -> None:
    def archive(tensors: bytes) -> bytes:
        members = {"adapter_config.json": shop.config, "adapter_model.safetensors": tensors}
        return body(part("archive", make_tar(members, "w:gz"), filename="a.tar.gz"))

    assert_problem(shop.push("one", content=archive(bytes(2 * shop.size))), 422, "quota_exceeded")
    assert shop.push("one", content=archive(shop.tensors)).status_code == 201


def test_every_end_gives_back(shop: Shop) -> None:
    assert shop.push("one", content=files(b"{", shop.tensors)).status_code == 422
    assert shop.push("one", content=b"no form").status_code == 400
    shop.begin("one", declared=True).close()
    shop.check_nothing_is_held()
    assert shop.push("one").status_code == 201


def test_earlier_upload_has_less_left_after_another_is_admitted() -> None:
    staged = StagedBytes()
    room = UploadRoom(limit=150, left=150, known=0)
    with staged.upload("acme", "late", room) as late:
        late.expect(50)
        with staged.upload("acme", "early", room) as early:
            early.expect(100)
            with pytest.raises(QuotaTaken, match="other uploads in progress take 100 of them"):
                late.expect(51)
            with pytest.raises(AdapterRefused, match="Delete versions first"):
                late.expect(151)  # without the others it would not fit either
            early.admitted(100)
        with pytest.raises(AdapterRefused, match="50 are left"):
            late.expect(51)
        late.expect(50)
        assert staged.num_bytes("acme") == 50
    assert staged.num_bytes("acme") == 0
