"""Files and folders dropped on the upload page: the browser's own drag events, with files of the disk."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from loraplex.adapters.contents.kinds import identify
from loraplex.adapters.contents.places import foreign_weights, weights_kind
from support.adapters.drafts import make_adapter
from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN, ARCH
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

LARGE_BYTES = 3 << 20
SENT_A_SECOND = 2 << 20
NOTE_PROGRESS = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const bar = document.querySelector("progress");
    if (bar && bar.value > 0 && bar.max > 1) window.seen.push(bar.value / bar.max);
  }).observe(document.querySelector("main"), { subtree: true, childList: true, attributes: true });
}"""


NOTE_DEFAULTS = """() => {
  window.kept = [];
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => window.kept.push(event.defaultPrevented));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        yield running


@pytest.fixture
def upload(server: WholeServer, screen: Screen) -> Screen:
    secret = server.plane.make_key("acme", "adapters:read", "adapters:write")
    return screen.sign_in(server.admin_url, secret, "upload")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that PEFT's save_pretrained leaves: an adapter beside others."""

    found = tmp_path / "my-adapter"
    make_adapter(found, ARCH, seed=5)
    (found / "README.md").write_text("# my adapter")
    (found / "checkpoint-10").mkdir()
    shutil.copy(found / "adapter_config.json", found / "checkpoint-10")
    return found


def drop(screen: Screen, *paths: Path, on: str = "drop-zone") -> None:
    """Drag the files from outside of the browser onto the middle of an element."""
    box = screen[on].bounding_box()
    assert box is not None
    session = screen.page.context.new_cdp_session(screen.page)
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **at})
    session.detach()


def test_a_dropped_folder_is_uploaded_without_what_is_no_part(
    server: WholeServer, upload: Screen, folder: Path
) -> None:
    drop(upload, folder)
    expect(upload["chosen"]).to_contain_text("Not sent: README.md")
    upload["adapter-name"].fill("dropped")
    upload["upload-send"].click()
    expect(upload["uploaded"]).to_contain_text("dropped@v1 is ready")
    assert server.plane.services.catalog.get_living("acme", "dropped", "v1").state == "ready"


def test_what_is_wrong_with_dropped_files_is_said(upload: Screen, folder: Path, tmp_path: Path) -> None:
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    other, empty, archive = tmp_path / "notes.txt", tmp_path / "empty", tmp_path / "two.zip"
    other.write_text("no adapter")
    archive.write_bytes(b"PK")
    empty.mkdir()
    upload["adapter-name"].fill("wrong")
    cases = (
        ((other,), ("notes.txt is no part of an adapter.", "adapter_config.json is missing.")),
        ((config,), ("adapter_model.safetensors is missing.",)),
        ((config, tensors, other), ("notes.txt is no part of an adapter.",)),
        ((empty,), ("adapter_config.json is missing.", "adapter_model.safetensors is missing.")),
        ((folder, folder / "checkpoint-10"), ("There is more than one adapter_config.json",)),
        ((archive, config), ("An archive comes without other files.",)),
    )
    for paths, faults in cases:
        drop(upload, *paths)
        for fault in faults:
            expect(upload["chosen"]).to_contain_text(fault)
        expect(upload["upload-send"]).to_be_disabled()
    drop(upload, config, tensors)
    expect(upload["upload-send"]).to_be_enabled()
    upload.page.evaluate(NOTE_DEFAULTS)
    drop(upload, other, on="who")
    expect(upload["upload-send"]).to_be_enabled()
    assert set(upload.page.evaluate("kept")) == {True}, (
        "a drop beside the zone would open the file in place of the page"
    )


HOLD_FIRST = """() => {
  const read = Blob.prototype.text;
  Blob.prototype.text = function () {
    Blob.prototype.text = read;
    return new Promise((done) => { window.letGo = () => done(read.call(this)); });
  };
}"""


def test_files_that_are_read_slowly_do_not_replace_those_chosen_since(upload: Screen, folder: Path) -> None:
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    upload["adapter-name"].fill("later")
    upload.page.evaluate(HOLD_FIRST)
    drop(upload, config)
    upload.page.wait_for_function("() => Boolean(window.letGo)")
    drop(upload, config, tensors)
    expect(upload["upload-send"]).to_be_enabled()
    upload.page.evaluate("() => { letGo(); return new Promise((done) => setTimeout(done, 50)); }")
    expect(upload["upload-send"]).to_be_enabled()
    expect(upload["chosen"]).not_to_contain_text("is missing")


def test_chosen_files_stay_for_another_tenant(server: WholeServer, screen: Screen, folder: Path) -> None:
    server.plane.make_tenant("other")
    screen.sign_in(server.admin_url, ADMIN_TOKEN, "tenants/acme/upload")
    screen["adapter-name"].fill("chosen")
    drop(screen, folder)
    expect(screen["upload-send"]).to_be_enabled()
    screen["tenant"].fill("other")
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Upload an adapter for other")
    screen["upload-send"].click()
    expect(screen["uploaded"]).to_contain_text("Of the tenant other.")
    assert server.plane.services.catalog.get_living("other", "chosen", "v1").state == "ready"
    screen["tenant"].fill("acme")
    expect(screen["uploaded"]).to_have_count(0)


NAMES = (
    "adapter_model.bin",
    "last.PT",
    "model.ckpt",
    "adapters.npz",
    "adapter.gguf",
    "adapter_model.safetensors.index.json",
)
TORCH_ZIP = b"PK\x03\x04" + bytes(22) + struct.pack("<HH", 16, 0) + b"archive/data.pkl"
"""How torch.save's files begin."""


def test_foreign_weights_are_refused_in_the_words_of_the_command_line(
    upload: Screen, folder: Path, tmp_path: Path
) -> None:
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for name in NAMES:
        found = tmp_path / name
        found.write_bytes(b"x")
        (folder / "training_args.bin").write_bytes(b"x")
        kind = weights_kind(name)
        assert kind is not None
        for dropped in ((config, folder / "training_args.bin", found), (found,)):
            drop(upload, *dropped)
            expect(upload["chosen"]).to_contain_text(foreign_weights(name, kind).message)
            expect(upload["upload-send"]).to_be_disabled()
    drop(upload, config, tensors, tmp_path / "adapter_model.bin")
    expect(upload["chosen"]).to_contain_text("Not sent: adapter_model.bin")
    for start in (
        b"\x80\x02}q\x00.",
        TORCH_ZIP,
        TORCH_ZIP.replace(b"e/data.pkl", b"weight.npy"),
        b"GGUF" + bytes(20),
    ):
        tensors.write_bytes(start)
        drop(upload, config, tensors)
        expect(upload["chosen"]).to_contain_text(
            f"adapter_model.safetensors is {identify(start, len(start))}"
        )


def test_the_progress_of_a_long_upload(upload: Screen, folder: Path) -> None:
    head = b'{"__metadata__":{}}'
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(struct.pack("<Q", len(head)) + head + bytes(LARGE_BYTES))
    upload["adapter-name"].fill("long")
    drop(upload, folder)
    upload.page.evaluate(NOTE_PROGRESS)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": SENT_A_SECOND}
    session = upload.page.context.new_cdp_session(upload.page)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", slow)
    upload["upload-send"].click()
    expect(upload["error"]).to_be_visible()
    seen = upload.page.evaluate("seen")
    assert seen == sorted(seen)
    assert any(0 < part < 1 for part in seen), seen
