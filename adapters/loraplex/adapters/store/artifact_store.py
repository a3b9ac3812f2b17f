"""The content-addressed store of adapters on a local disk.

    staging/<uuid>/                  uploads on their way, readable by the server alone
    sha256/<2 hex>/<digest>/         adapter_config.json and adapter_model.safetensors, as they were uploaded

A digest's folder appears by one rename, after its bytes are on the disk: it is there whole or not at all, unless it was
committed without a flush; then a crash of the machine, and no other, may leave a part until `flush` has returned. A
caller that records an artifact elsewhere does so after `commit` returned, so that a crash leaves at most an orphan,
which `sweep` removes at the next start. Each change is announced as a `FaultPoint` first (see `steps`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, ArtifactUnreadable
from loraplex.adapters.store.fault_points import Fault, FaultPoint, no_fault
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    TENSORS_NAME,
    digest_upload,
    disk_failures_named,
    is_disk_failure,
    names_damage,
)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILES = (CONFIG_NAME, TENSORS_NAME)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The result of a sweep: folders removed from staging, digests removed, bytes freed by both, and live digests
    that the store lacks."""

    staging_removed: int
    artifacts_removed: tuple[str, ...]
    bytes_freed: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of verifying the stored bytes of a digest. `place` is the folder that they lay in, None where there
    was none: it is another one whenever other bytes were put there. `damage` is what was wrong, None if nothing was."""

    digest: str
    place: tuple[int, int, int] | None
    damage: ArtifactMissing | ArtifactCorrupt | ArtifactUnreadable | None


class Staging:
    """A fresh folder (mode 0700) that one upload is written into, until `ArtifactStore.commit` or `discard`.

    As a context manager it discards what was not committed, and turns the disk's errors of the body into
    StoreFull or StoreFailed. Code that writes into it announces each step to `fault`.
    """

    def __init__(self, directory: Path, fault: Fault = no_fault) -> None:
        self.directory = directory
        self.fault = fault

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG_NAME

    @property
    def tensors_path(self) -> Path:
        return self.directory / TENSORS_NAME

    @property
    def archive_path(self) -> Path:
        """Where an uploaded archive is put before `extract_upload` unpacks it into `directory`."""
        return self.directory / "upload"

    def discard(self) -> None:
        """Remove the folder and all in it; nothing to do after a commit. What cannot be removed is swept at the
        next start."""
        _remove(self.directory, FaultPoint.DISCARD, self.fault)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
        if error is not None and is_disk_failure(error):
            with disk_failures_named():
                raise error


class ArtifactStore:
    """Artifacts by digest under `root`. Any number of threads and processes may read and commit at a time;
    `sweep` is for the start, before uploads. `fault` hears of each step before it is taken."""

    def __init__(self, root: Path, fault: Fault = no_fault) -> None:
        self.fault = fault
        self._staging = root / "staging"
        self._artifacts = root / "sha256"
        with disk_failures_named():
            for folder in (root, self._staging, self._artifacts):
                if not folder.is_dir():
                    fault(FaultPoint.MAKE_STORE, folder)
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Also where it is there: a process that made it may have died before this.
                fault(FaultPoint.FLUSH_STORE, folder.parent)
                _flush(folder.parent)

    def begin_staging(self) -> Staging:
        """A fresh staging folder. Raises StoreFull, StoreFailed, OSError."""
        directory = self._staging / uuid.uuid4().hex
        with disk_failures_named():
            self.fault(FaultPoint.STAGE, directory)
            directory.mkdir(mode=0o700)
        return Staging(directory, self.fault)

    def examine(self, digest: str) -> Examined:
        """`verify`, as a finding that `commit` takes: it reads all of the bytes, and needs no lock."""
        while True:
            place = self._place(digest)
            damage: ArtifactMissing | ArtifactCorrupt | ArtifactUnreadable | None = None
            try:
                self.verify(digest)
            except (ArtifactMissing, ArtifactCorrupt, ArtifactUnreadable) as error:
                damage = error
            if self._place(digest) == place:
                return Examined(digest, place, damage)

    def is_current(self, examined: Examined) -> bool:
        """Whether the finding is of what lies there now."""
        return self._place(examined.digest) == examined.place

    def commit(
        self,
        staging: Staging,
        digest: str,
        examined: Examined | None = None,
        *,
        flush: bool = True,
        replace: bool = False,
    ) -> Path:
        """Make a staged upload permanent under `digest` (of digest_upload) and return its folder. Without `flush` it
        may be read, and is not on the disk yet.

        Where the digest is stored already, the staged copy is dropped, unless the stored one is damaged: then
        it takes its place. With `replace` and `flush` it always does, file by file: for stored files that may not be
        on the disk, which no second flush puts there (see `flush`). `examined` says whether it is damaged, from a
        caller that has looked that it `is_current` and keeps other commits of the digest from running; without it the
        stored bytes are read here. On an error the staging folder is removed. The caller keeps `delete` of the same
        digest from running meanwhile. Raises StoreFull, StoreFailed, ValueError, OSError.
        """
        try:
            with disk_failures_named():
                target = self._folder(digest)
                if target is None:
                    raise ValueError(f"not a digest: '{digest}'")
                self._drop_leftovers(staging)
                if flush:
                    self._flush_files(staging.directory)
                self._make_shelf(target.parent, flush)
                is_published = self._publish(staging, target, digest, examined)
                if flush:
                    if not is_published:
                        if replace:
                            self._replace_files(target, staging)
                        self._flush_files(target)
                    self._flush_shelf(target.parent)
                staging.discard()
                return target
        except BaseException:
            staging.discard()
            raise

    def flush(self, digest: str, *, rewrite: bool = False) -> Examined:
        """Wait until a committed artifact is on the disk. The finding has the place of the bytes that are.

        With `rewrite` its files are first replaced by copies, whose bytes are hashed: once a flush has failed, the
        system may count what it could not write as written, so that the next flush of the same file succeeds. Without
        it nothing is read. Raises ArtifactMissing, ArtifactCorrupt, StoreFull, StoreFailed, OSError.
        """
        folder = self.path(digest)
        try:
            if rewrite:
                self._rewrite(folder)
            place = self._place(digest)
            self._flush_files(folder)
            self._flush_shelves(folder.parent)
            self._flush_shelf(folder.parent)
        except FileNotFoundError as error:
            raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'") from error
        return Examined(digest, place, None)

    def path(self, digest: str) -> Path:
        """The folder of a stored artifact. Raises ArtifactMissing, also for what is no digest."""
        folder = self._folder(digest)
        if folder is None or not folder.is_dir():
            raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'")
        return folder

    def verify(self, digest: str) -> None:
        """Hash the stored bytes again. Raises ArtifactMissing, ArtifactCorrupt, ArtifactUnreadable."""
        folder = self.path(digest)
        try:
            found = digest_upload(folder / CONFIG_NAME, folder / TENSORS_NAME)
        except OSError as error:
            if not folder.is_dir():  # deleted meanwhile
                raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'") from error
            if names_damage(error):
                raise ArtifactCorrupt(f"artifact {digest[:12]} is damaged: {error.strerror}") from error
            raise ArtifactUnreadable(f"artifact {digest[:12]} cannot be read: {error.strerror}") from error
        check_digest(digest, found)

    def holds(self, digest: str) -> bool:
        """Whether an artifact is there, whole or damaged."""
        folder = self._folder(digest)
        return folder is not None and folder.is_dir()

    def drop_damaged_copy(self, digest: str) -> bool:
        """Whether what `path` leads to was a damaged copy of what is stored, and was removed. Here it is no copy."""
        return False

    def delete(self, digest: str) -> bool:
        """Remove an artifact; False if there was none. Readers that have its files open keep reading."""
        folder = self._folder(digest)
        if folder is None or not os.path.lexists(folder):
            return False
        doomed = self._staging / uuid.uuid4().hex
        self.fault(FaultPoint.RETIRE, folder, doomed)
        try:
            folder.rename(doomed)  # at once and whole; a crash from here on leaves an orphan in staging
        except FileNotFoundError:
            return False
        try:
            self.fault(FaultPoint.FLUSH_RETIRED, folder.parent)
            _flush(folder.parent)
        finally:
            _remove(doomed, FaultPoint.PURGE, self.fault)
        return True

    def digests(self) -> Iterator[str]:
        """Every stored digest, in order."""
        for shelf in sorted(self._artifacts.iterdir()):
            for folder in sorted(shelf.iterdir()) if shelf.is_dir() else ():
                if self._folder(folder.name) == folder:
                    yield folder.name

    def sweep(self, live: set[str]) -> SweepReport:
        """Remove what a crash may have left: everything in staging, and artifacts not in `live`."""
        freed = removed = 0
        for leftover in self._staging.iterdir():
            freed += _size(leftover)
            removed += 1
            self.fault(FaultPoint.SWEEP, leftover)
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        stored = set(self.digests())
        orphans = tuple(sorted(stored - live))
        for digest in orphans:
            freed += _size(self._artifacts / digest[:2] / digest)
            self.delete(digest)
        return SweepReport(removed, orphans, freed, tuple(sorted(live - stored)))

    def _folder(self, digest: str) -> Path | None:
        return self._artifacts / digest[:2] / digest if _DIGEST.fullmatch(digest) else None

    def _place(self, digest: str) -> tuple[int, int, int] | None:
        folder = self._folder(digest)
        if folder is None:
            return None
        try:
            found = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino, found.st_ctime_ns

    def _rewrite(self, folder: Path) -> None:
        """Replace both files of an artifact by flushed copies, each by one rename."""
        with self.begin_staging() as staging:
            for name in _FILES:
                self.fault(FaultPoint.RECEIVE_CREATE, staging.directory / name)
                shutil.copyfile(folder / name, staging.directory / name)
                (staging.directory / name).chmod(0o600)
            check_digest(folder.name, digest_upload(staging.config_path, staging.tensors_path))
            self._flush_files(staging.directory)
            self._replace_files(folder, staging)

    def _replace_files(self, folder: Path, staging: Staging) -> None:
        for name in _FILES:
            self.fault(FaultPoint.PUBLISH, staging.directory / name, folder / name)
            (staging.directory / name).replace(folder / name)

    # The steps of a commit, in order.

    def _drop_leftovers(self, staging: Staging) -> None:
        for entry in staging.directory.iterdir():
            if entry.name not in _FILES:
                self.fault(FaultPoint.DROP_LEFTOVER, entry)
                _drop(entry)

    def _flush_files(self, folder: Path) -> None:
        for name in _FILES:
            self.fault(FaultPoint.FLUSH_FILE, folder / name)
            _flush(folder / name)
        self.fault(FaultPoint.FLUSH_FOLDER, folder)
        _flush(folder)

    def _make_shelf(self, shelf: Path, flush: bool) -> None:
        if not shelf.is_dir():
            self.fault(FaultPoint.MAKE_SHELF, shelf)
            shelf.mkdir(mode=0o700, exist_ok=True)
        if flush:
            self._flush_shelves(shelf)

    def _flush_shelves(self, shelf: Path) -> None:
        # Also where it existed: the process that made it may not have flushed it yet, or ever.
        self.fault(FaultPoint.FLUSH_SHELVES, shelf.parent)
        _flush(shelf.parent)

    def _publish(self, staging: Staging, target: Path, digest: str, examined: Examined | None) -> bool:
        """Whether the staged copy is what is stored now."""
        while True:
            self.fault(FaultPoint.PUBLISH, staging.directory, target)
            try:
                staging.directory.rename(target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return True
            found = examined or self.examine(digest)
            if found.damage is None:
                return False
            if not isinstance(found.damage, ArtifactMissing):
                self.delete(digest)

    def _flush_shelf(self, shelf: Path) -> None:
        self.fault(FaultPoint.FLUSH_SHELF, shelf)
        _flush(shelf)


def check_digest(digest: str, found: str) -> None:
    """Raises ArtifactCorrupt where an artifact's bytes hash to something else than its name."""
    if found != digest:
        raise ArtifactCorrupt(f"artifact {digest[:12]} is damaged: its bytes hash to {found[:12]}")


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop(entry: Path) -> None:
    """Remove a file, or a folder with what lies in it (OSError)."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _remove(folder: Path, step: FaultPoint, fault: Fault) -> None:
    """A folder of plain files and what lies in it, as far as that is possible."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            fault(step, entry)
            _drop(entry)
    with contextlib.suppress(OSError):
        fault(step, folder)
        folder.rmdir()


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(_size(entry) for entry in path.iterdir())
