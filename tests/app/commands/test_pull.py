"""`loraplex adapter pull` against a real admin server."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.admission.chat_files import ChatFiles
from loraplex.adapters.archive.stored_archive import StoredArchive
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME
from loraplex.control.types import Serving
from loraplex.serving.text.own_chat import ChatFound, compare_chat
from loraplex.serving.text.processor import TextProcessor
from support.models.byte_tokenizer import EOS_ID, write_byte_tokenizer
from support.servers.shell import Shell, shell_in

TENANT = ("-t", "acme")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Of a tenant whose adapter `support` has v1, a, and v2, b; v2 takes a tenth of the traffic."""
    with shell_in(tmp_path) as shell:
        shell.plane.make_tenant()
        shell.ok("adapter", "push", "support", shell.adapter("a", seed=1), *TENANT)
        shell.ok("adapter", "push", "support", shell.adapter("b", seed=2), *TENANT)
        shell.ok("release", "set", "support", "v1=90", "v2=10", *TENANT)
        yield shell


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_pull_returns_the_pushed_files(shell: Shell) -> None:
    target = shell.root / "new" / "dir"
    said = shell.ok("adapter", "pull", "support@v2", str(target), *TENANT)
    assert said.startswith("support@v2: ")
    assert str(target) in said
    assert files(target) == files(shell.root / "b")
    mode = stat.S_IMODE((target / CONFIG_NAME).stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    assert mode == 0o666 & ~mask
    assert "already, as v2" in shell.ok("adapter", "push", "support", str(target), *TENANT)


def test_pull_without_a_version_takes_the_one_with_most_traffic(shell: Shell) -> None:
    said = shell.ok("adapter", "pull", "support", str(shell.root / "most"), *TENANT)
    assert said.startswith("support@v1 (takes 90% of the traffic): ")
    assert files(shell.root / "most") == files(shell.root / "a")
    shell.ok("release", "set", "support", "v1=1", "v2=1", *TENANT)
    told = shell.json("adapter", "pull", "support", str(shell.root / "equal"), *TENANT)
    assert (told["version"], told["fetched"]) == ("v2", True)


def test_files_that_are_there_are_left_or_kept(shell: Shell) -> None:
    target = shell.root / "there"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    shell.ok("adapter", "pull", "support@v1", str(target), *TENANT)
    before = (target / TENSORS_NAME).stat().st_ino
    said = shell.ok("adapter", "pull", "support@v1", str(target), *TENANT)
    assert "already" in said
    assert (target / TENSORS_NAME).stat().st_ino == before  # nothing was written
    refused = shell.fails("adapter", "pull", "support@v2", str(target), *TENANT)
    assert "--force" in refused
    assert files(target) == files(shell.root / "a") | {"notes.txt": b"mine"}
    shell.ok("adapter", "pull", "support@v2", str(target), "--force", *TENANT)
    assert files(target) == files(shell.root / "b") | {"notes.txt": b"mine"}
    (target / CONFIG_NAME).unlink()
    assert TENSORS_NAME in shell.fails("adapter", "pull", "support@v1", str(target), *TENANT)


def test_pull_of_an_absent_version_leaves_nothing_behind(shell: Shell) -> None:
    target = shell.root / "none"
    assert "no version 'v9'" in shell.fails("adapter", "pull", "support@v9", str(target), *TENANT)
    assert "adapter" in shell.fails("adapter", "pull", "other", str(target), *TENANT)
    shell.ok("release", "promote", "support", "v2", *TENANT)
    shell.ok("adapter", "delete", "support@v1", *TENANT)
    assert "deleted" in shell.fails("adapter", "pull", "support@v1", str(target), *TENANT)
    assert not target.exists()
    (shell.root / "file").write_text("")
    assert "file" in shell.fails("adapter", "pull", "support", str(shell.root / "file"), *TENANT)


def test_damage_on_the_server_is_told_and_replaces_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found while the answer is on its way: it breaks off. Here after the first bytes, by reading less at once."""
    monkeypatch.setattr("loraplex.adapters.archive.stored_archive.CHUNK_BYTES", 4096)
    digest = shell.json("adapter", "show", "support@v2", *TENANT)["digest"]
    tensors = shell.plane.services.artifacts.store.path(digest) / TENSORS_NAME
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    target = shell.root / "there"
    shell.ok("adapter", "pull", "support@v1", str(target), *TENANT)
    said = shell.fails("adapter", "pull", "support@v2", str(target), "--force", *TENANT)
    assert "broke" in said
    assert "The version is corrupt now." in said
    assert files(target) == files(shell.root / "a")
    again = shell.fails("adapter", "pull", "support@v2", str(target), "--force", *TENANT)
    assert "[adapter_unavailable]" in again


def test_another_adapters_files_are_not_taken_for_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server sends, the digest decides."""
    other = shell.json("adapter", "show", "support@v1", *TENANT)["digest"]
    store = shell.plane.services.artifacts.store
    real = StoredArchive.__init__

    def mixed_up(self: StoredArchive, folder: Path, digest: str, **options: Any) -> None:
        real(self, store.path(other), other, **options)

    monkeypatch.setattr(StoredArchive, "__init__", mixed_up)
    said = shell.fails("adapter", "pull", "support@v2", str(shell.root / "none"), *TENANT)
    assert "its digest is another" in said
    assert not (shell.root / "none").exists()


def test_what_a_version_brings_for_its_chats_is_pushed_and_pulled(tmp_path: Path) -> None:
    text = TextProcessor(write_byte_tokenizer(tmp_path / "base"), max_model_len=4096)

    async def examine(tenant_id: str, files: ChatFiles, serving: Serving) -> ChatFound:
        return compare_chat(files, text, {EOS_ID}, own_serves=False)

    with shell_in(tmp_path, examine_chat=examine) as shell:
        shell.plane.make_tenant()
        plain = Path(shell.adapter("plain"))
        chatty = Path(shell.adapter("chatty"))
        (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}")
        (chatty / "tokenizer_config.json").write_text('{"padding_side": "left"}')
        said = shell.ok("adapter", "push", "support", str(chatty), *TENANT)
        assert "!  chat template: warning: it differs from the base's" in said
        assert "accepted as v2" in shell.ok("adapter", "push", "support", str(plain), *TENANT)
        target = shell.root / "copy"
        shell.ok("adapter", "pull", "support@v1", str(target), *TENANT)
        wanted = files(plain) | {"chat_template.jinja": b"{{ messages[0].content }}"}
        assert files(target) == wanted
        assert "already" in shell.ok("adapter", "pull", "support@v1", str(target), *TENANT)
        assert "already, as v1" in shell.ok("adapter", "push", "support", str(target), *TENANT)
        (target / "chat_template.jinja").write_text("mine")
        assert "--force" in shell.fails("adapter", "pull", "support@v1", str(target), *TENANT)
        shell.ok("adapter", "pull", "support@v1", str(target), "--force", *TENANT)
        assert files(target) == wanted
