"""The store: whole artifacts or none, whatever fails in between."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, StoreFailed, StoreFull
from loraplex.adapters.store.artifact_store import ArtifactStore, Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import digest_upload


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> ArtifactStore:
    return ArtifactStore(root)


def fill(staging: Staging, content: bytes = b"weights") -> str:
    staging.config_path.write_bytes(b"{}")
    staging.tensors_path.write_bytes(content)
    return digest_upload(staging.config_path, staging.tensors_path)


def put(store: ArtifactStore, content: bytes = b"weights") -> str:
    with store.begin_staging() as staging:
        digest = fill(staging, content)
        store.commit(staging, digest)
    return digest


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "staging").iterdir()]


def test_a_committed_upload_is_found_whole_and_nothing_stays_in_staging(
    root: Path, store: ArtifactStore
) -> None:
    with store.begin_staging() as staging:
        assert stat.S_IMODE(staging.directory.stat().st_mode) == 0o700
        staging.archive_path.write_bytes(b"the upload as it came")
        digest = fill(staging)
        path = store.commit(staging, digest)
    assert path == store.path(digest) == root / "sha256" / digest[:2] / digest
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": b"weights",
    }
    store.verify(digest)
    assert list(store.digests()) == [digest]
    assert leftovers(root) == []
    assert list(ArtifactStore(root).digests()) == [digest]  # another start finds it


def test_committing_the_same_bytes_again_keeps_one(root: Path, store: ArtifactStore) -> None:
    digest = put(store)
    inode = (store.path(digest) / "adapter_model.safetensors").stat().st_ino
    assert put(store) == digest
    assert (store.path(digest) / "adapter_model.safetensors").stat().st_ino == inode
    assert list(store.digests()) == [digest]
    assert leftovers(root) == []


def test_uploading_again_heals_a_damaged_artifact(root: Path, store: ArtifactStore) -> None:
    digest = put(store)
    (store.path(digest) / "adapter_model.safetensors").write_bytes(b"weightz")
    put(store)
    store.verify(digest)
    assert leftovers(root) == []


def test_many_threads_commit_the_same_bytes(root: Path, store: ArtifactStore) -> None:
    digests: list[str] = []
    threads = [threading.Thread(target=lambda: digests.append(put(store))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(digests) == 16
    assert len(set(digests)) == 1
    store.verify(digests[0])
    assert leftovers(root) == []


def test_uncommitted_upload_is_discarded(root: Path, store: ArtifactStore) -> None:
    with store.begin_staging() as staging:
        fill(staging)
    assert leftovers(root) == []
    with pytest.raises(RuntimeError), store.begin_staging() as staging:
        fill(staging)
        raise RuntimeError("refused")
    assert leftovers(root) == []
    staging = store.begin_staging()
    staging.discard()
    staging.discard()
    assert leftovers(root) == []
    assert list(store.digests()) == []


def test_a_flipped_bit_a_cut_and_a_lost_file_are_corrupt(store: ArtifactStore) -> None:
    digest = put(store, b"weights" * 1000)
    path = store.path(digest) / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    with pytest.raises(ArtifactCorrupt):
        store.verify(digest)
    path.write_bytes(whole[:-1])
    with pytest.raises(ArtifactCorrupt):
        store.verify(digest)
    path.write_bytes(whole)
    store.verify(digest)
    path.unlink()
    with pytest.raises(ArtifactCorrupt):
        store.verify(digest)


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "0" * 63,
        "0" * 65,
        "G" * 64,
        "A" * 64,
        "../" * 21 + "x",
        "/" * 64,
        "0" * 64 + "\n",
        "é" * 64,
        "0" * 64,
    ],
)
def test_absent_or_malformed_digest_is_missing(store: ArtifactStore, digest: str) -> None:
    for call in (store.path, store.verify):
        with pytest.raises(ArtifactMissing):
            call(digest)
    assert store.delete(digest) is False


def test_a_commit_refuses_what_is_no_digest(root: Path, store: ArtifactStore) -> None:
    with store.begin_staging() as staging:
        fill(staging)
        with pytest.raises(ValueError, match="not a digest"):
            store.commit(staging, "../../x")
    assert leftovers(root) == []


def test_delete(root: Path, store: ArtifactStore) -> None:
    digest, other = put(store, b"one"), put(store, b"two")
    with (store.path(digest) / "adapter_model.safetensors").open("rb") as reader:
        assert store.delete(digest) is True
        assert reader.read() == b"one"
    assert store.delete(digest) is False
    assert list(store.digests()) == [other]
    assert leftovers(root) == []


def test_sweep_removes_orphans_and_names_what_is_missing(
    root: Path, store: ArtifactStore, tmp_path: Path
) -> None:
    live, orphan = put(store, b"live"), put(store, b"orphan")
    fill(store.begin_staging(), b"half an upload")
    (root / "staging" / "stray").write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_bytes(b"")
    (root / "staging" / "link").symlink_to(outside)
    lost = "0" * 64
    report = store.sweep({live, lost})
    assert report.staging_removed == 3
    assert report.artifacts_removed == (orphan,)
    assert report.missing == (lost,)
    assert report.bytes_freed >= len(b"orphan") + len(b"half an upload")
    assert list(store.digests()) == [live]
    assert leftovers(root) == []
    assert (outside / "keep").exists()
    again = store.sweep({live})
    assert (again.staging_removed, again.artifacts_removed, again.bytes_freed) == (0, (), 0)


class Crash(BaseException):
    """The process dies: nothing after this line runs, no handler either."""


STEPS = ["_drop_leftovers", "_flush_files", "_make_shelf", "_publish", "_flush_shelf"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_leaves_a_whole_artifact_or_an_orphan(
    root: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    real: Callable[..., Any] = getattr(ArtifactStore, step)

    def crash(self: ArtifactStore, *args: Any) -> None:
        if when == "after":
            real(self, *args)
        monkeypatch.setattr(Staging, "discard", lambda self: None)  # the dead do not tidy up
        raise Crash

    monkeypatch.setattr(ArtifactStore, step, crash)
    staging = store.begin_staging()
    digest = fill(staging)
    with pytest.raises(Crash):
        store.commit(staging, digest)
    monkeypatch.undo()
    reborn = ArtifactStore(root)
    for found in reborn.digests():
        reborn.verify(found)
    published = STEPS.index(step) + (when == "after") > STEPS.index("_publish")
    assert list(reborn.digests()) == ([digest] if published else [])
    reborn.sweep(set())
    assert list(reborn.digests()) == []
    assert leftovers(root) == []
    assert put(reborn) == digest


class FaultAt:
    """Raises in place of the step with this number."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.taken: list[FaultPoint] = []
        self._number = number
        self._error = error

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if len(self.taken) == self._number:
            raise self._error
        self.taken.append(step)


@pytest.mark.parametrize("number", range(6))
def test_a_store_whose_making_broke_off_is_made_by_the_next_start(root: Path, number: int) -> None:
    whole = FaultAt(-1, Crash())
    ArtifactStore(root.with_name("another"), whole)
    assert sorted(whole.taken) == sorted([FaultPoint.MAKE_STORE, FaultPoint.FLUSH_STORE] * 3)
    with pytest.raises(Crash):
        ArtifactStore(root, FaultAt(number, Crash()))
    with pytest.raises(StoreFull):
        ArtifactStore(root, FaultAt(0, OSError(errno.ENOSPC, "No space left on device")))
    reborn = ArtifactStore(root)
    digest = put(reborn)
    assert list(reborn.digests()) == [digest]
    assert leftovers(root) == []


def test_everything_is_on_the_disk_before_it_is_published_and_the_shelf_after(
    root: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        events.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real_fsync(fd)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(self, target)

    with store.begin_staging() as staging:
        digest = fill(staging)
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", rename)
        store.commit(staging, digest)
    name = staging.directory.name
    assert events == [
        "adapter_config.json",
        "adapter_model.safetensors",
        name,
        "sha256",
        "rename",
        digest[:2],
    ]


@pytest.fixture
def small_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_disk")
def test_a_file_that_does_not_fit_is_store_full(root: Path, store: ArtifactStore) -> None:
    with pytest.raises(StoreFull), store.begin_staging() as staging:
        fill(staging, bytes(20_000))
    assert leftovers(root) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_no_room_while_committing_leaves_nothing(
    root: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(StoreFull), store.begin_staging() as staging:
        digest = fill(staging)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            store.commit(staging, digest)
    assert leftovers(root) == []
    assert list(store.digests()) == []
    assert put(store) == digest


def test_a_failed_commit_removes_its_staging_by_itself(
    root: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = store.begin_staging()
    digest = fill(staging)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "broken disk")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreFailed, match="Input/output error"):
            store.commit(staging, digest)
    assert leftovers(root) == []
    assert list(store.digests()) == []


def test_no_room_to_begin(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(StoreFull):
        store.begin_staging()


def test_another_error_stays_what_it_is(root: Path, store: ArtifactStore) -> None:
    with store.begin_staging() as staging:
        digest = fill(staging)
        shutil.rmtree(staging.directory)
        with pytest.raises(FileNotFoundError):
            store.commit(staging, digest)
    assert list(store.digests()) == []
