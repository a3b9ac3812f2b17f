"""Reading from a model hub at a commit: a hub of the loopback address that may redirect, lie and break off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.hub import copy_from_hub
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.adapters.store.artifact_store import ArtifactStore
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, UPLOAD_FILE_BYTES

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {CONFIG_NAME: b"{}", TENSORS_NAME: b"tensors" * 1000}


class Hub(ThreadingHTTPServer):
    """Serves FILES of `org/name` at COMMIT. `answer` may take a request over; `asked` are the paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer: Callable[[BaseHTTPRequestHandler, str], bool] = lambda handler, name: False
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        if self.server.answer(self, name):
            return
        if self.path not in {f"/org/name/resolve/{COMMIT}/{name}" for name in FILES}:
            self.send_error(404)
            return
        self.send(FILES[name])

    def send(self, content: bytes, *, commit: str = COMMIT, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def redirect(self, to: str) -> None:
        self.send_response(302)
        self.send_header("Location", to)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def copy(hub: Hub, tmp_path: Path, url: str = f"hf://org/name@{COMMIT}") -> dict[str, bytes]:
    source = AllowedSources(["hf://org"]).allow(url, "acme")
    with ArtifactStore(tmp_path / "store").begin_staging() as staging:
        copy_from_hub(source, staging, max_bytes=1 << 20, reserve=lambda _: None, endpoint=hub.url)
        return {path.name: path.read_bytes() for path in staging.directory.iterdir()}


def refused(hub: Hub, tmp_path: Path, kind: type[LoraplexError]) -> str:
    with pytest.raises(kind) as caught:
        copy(hub, tmp_path)
    assert list((tmp_path / "store" / "staging").iterdir()) == []
    return caught.value.message


def test_both_files_of_the_commit(hub: Hub, tmp_path: Path) -> None:
    assert copy(hub, tmp_path) == FILES
    assert hub.asked == [f"/org/name/resolve/{COMMIT}/{name}" for name in (*FILES, *UPLOAD_FILE_BYTES)]


def test_what_it_has_for_its_chats_comes_too(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FILES, "chat_template.jinja", b"{{ messages }}")
    assert copy(hub, tmp_path) == FILES
    monkeypatch.setitem(FILES, "chat_template.jinja", bytes((128 << 10) + 1))
    assert "chat_template.jinja is larger than 131072 bytes" in refused(hub, tmp_path, AdapterRefused)


def under_another_name(hub: Hub, name: str) -> None:
    """The repository has the tensors under this name."""

    def answer(handler: _Handler, asked: str) -> bool:
        if asked == TENSORS_NAME:
            handler.send_error(404)
        elif asked == name:
            handler.send(FILES[TENSORS_NAME])
        return asked in (TENSORS_NAME, name)

    hub.answer = answer  # type: ignore[assignment]


def test_the_tensors_under_the_name_that_mlx_gives_them(hub: Hub, tmp_path: Path) -> None:
    under_another_name(hub, "adapters.safetensors")
    assert copy(hub, tmp_path) == FILES


def test_pickled_weights_alone_are_named_with_their_conversion(hub: Hub, tmp_path: Path) -> None:
    under_another_name(hub, "adapter_model.bin")
    assert "torch.load('adapter_model.bin'" in refused(hub, tmp_path, AdapterRefused)


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/name",
        "hf://org/name@main",
        "hf://org/name@0123456",
        "hf://org",
        f"hf://other/name@{COMMIT}",
        f"hf://org/name/deep@{COMMIT}",
        f"hf://org/..@{COMMIT}",
        f"hf://user:password@org/name@{COMMIT}",
    ],
)
def test_nothing_without_a_commit_or_of_others(hub: Hub, tmp_path: Path, url: str) -> None:
    with pytest.raises(SourceNotAllowed):
        copy(hub, tmp_path, url)
    assert hub.asked == []


def test_a_redirect_within_the_hub_is_followed(hub: Hub, tmp_path: Path) -> None:
    def move(handler: _Handler, name: str) -> bool:
        if name not in FILES:
            return False
        if "/files/" in handler.path:
            handler.send(FILES[name])
        else:
            handler.redirect(f"/files/{name}")
        return True

    hub.answer = move  # type: ignore[assignment]
    assert copy(hub, tmp_path) == FILES


@pytest.mark.parametrize(
    "to",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost:{port}/x",
        "https://127.0.0.1:{port}/x",
        "https://cdn.hf.co/x",  # of the public hub alone
        "file:///etc/passwd",
        "//127.0.0.1:1/x",
    ],
)
def test_a_redirect_elsewhere_is_refused_and_not_asked(hub: Hub, tmp_path: Path, to: str) -> None:
    def move(handler: _Handler, name: str) -> bool:
        handler.redirect(to.format(port=hub.server_port))
        return True

    hub.answer = move  # type: ignore[assignment]
    refused(hub, tmp_path, SourceNotAllowed)
    assert len(hub.asked) == 1


def test_a_circle_ends(hub: Hub, tmp_path: Path) -> None:
    def move(handler: _Handler, name: str) -> bool:
        handler.redirect(handler.path)
        return True

    hub.answer = move  # type: ignore[assignment]
    refused(hub, tmp_path, SourceUnavailable)


@pytest.mark.parametrize("wrong", ["commit", "short", "missing", "huge", "no length", "broken"])
def test_answers_that_are_wrong(hub: Hub, tmp_path: Path, wrong: str) -> None:
    def answer(handler: _Handler, name: str) -> bool:
        if name == CONFIG_NAME:
            return False
        if wrong == "commit":
            handler.send(FILES[name], commit="f" * 40)
        elif wrong == "short":
            handler.send(FILES[name][:-1], length=len(FILES[name]))
        elif wrong == "missing":
            handler.send_error(404)
        elif wrong == "huge":
            handler.send(b"", length=1 << 40)
        elif wrong == "no length":
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(FILES[name])
        else:
            handler.send_error(500)
        return True

    hub.answer = answer  # type: ignore[assignment]
    kind = {"missing": SourceNotFound, "huge": AdapterRefused}.get(wrong, SourceUnavailable)
    refused(hub, tmp_path, kind)
