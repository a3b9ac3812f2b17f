"""Blocks of cached prefixes in files, found again after a restart: the index, its bounds and erasures.

A block's file is named by its key and by the build that computed it: another base model, other kernels or another
layout find nothing. Files of other builds count as bytes until room is needed; they are erased with their owner too.
What is damaged, missing or another's is not found, and no fault of the disk raises an error after the start.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loraplex.adapters.store.files import has_no_room
from loraplex.engine.kv.disk_files import DiskFiles, DiskStoreError, DiskStoreUnusable, Folder, OwnerFiles
from loraplex.engine.types import BlockKey, Namespace

_log = logging.getLogger(__name__)

Refusal = Literal["full", "erased", "error"]
"""Why a block was not written: the disk is full, its owner was erased meanwhile, or another error."""

_MOST_OF_DISK = 2
"""A tenant takes at most one part in this number of the bytes."""
_UNIT = 4096
"""A file takes a multiple of this number of bytes on the disk."""
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF})
"""Errors of a read that say nothing about the file."""


@dataclass(slots=True)
class DiskCounts:
    """The content of the disk now, and blocks since the store was opened."""

    capacity: int = 0
    """Bytes that files may take. Not counted: an owner's folder and the file with its ids."""
    num_bytes: int = 0
    """Bytes of all files, with those of other builds and those that `sweep` is to delete."""
    blocks: int = 0
    """Blocks that can be found."""
    written: int = 0
    read: int = 0
    evicted: int = 0
    """Blocks that made room for others."""
    damaged: int = 0
    """Blocks that were cut short, changed, missing, or another's under this name."""
    refused: Counter[Refusal] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Owner:
    namespace: Namespace
    folder: Folder
    blocks: dict[bytes, int] = field(default_factory=dict)
    """The number of the write by name, 0 for those of before the start."""


@dataclass(slots=True)
class _Build:
    """Files of another build."""

    used_ns: int = 0
    owners: dict[Namespace, tuple[Folder, int]] = field(default_factory=dict)
    """Folder, and the bytes of its files."""


class DiskStore:
    """Blocks of `block_bytes` bytes below `directory`, in at most `max_bytes` bytes.

    The block that was used least recently makes room for another, also across restarts; a tenant that has half of the
    bytes loses its own. `build` names all that the bytes of a block depend on beside its key. With `secret` files are
    encrypted. The directory is read whole, and what is over `max_bytes` deleted, before this returns: 100,000 blocks of
    500 owners took 2.0 s of processor time (bench.disk_store).

    One thread calls `write` and `sweep`, one `read`, and any the rest: that is of the index and touches no file.
    Raises DiskStoreError where its secret is another, it is no directory, or `max_bytes` hold no block;
    DiskStoreUnusable where the disk fails or another engine has it."""

    def __init__(
        self, directory: Path, *, max_bytes: int, block_bytes: int, build: bytes, secret: bytes | None
    ) -> None:
        self.counts = DiskCounts(max_bytes)
        self._block_bytes = block_bytes
        self._files = DiskFiles(directory, secret)
        self._build = self._files.build_name(build)
        self._file_bytes = _taken(block_bytes + self._files.overhead)
        self._most = max(1, max_bytes // self._file_bytes // _MOST_OF_DISK)
        self._lock = threading.Lock()  # of all below
        self._recent: OrderedDict[bytes, _Owner] = OrderedDict()  # the least recently used first
        self._of_tenant: dict[str, OrderedDict[bytes, None]] = {}
        self._owners: dict[Namespace, _Owner] = {}
        self._without_blocks: list[_Owner] = []
        self._writing: _Owner | None = None
        self._builds: dict[str, _Build] = {}
        self._doomed: deque[tuple[tuple[str, ...], int]] = deque()  # paths to delete, with their bytes
        self._doomed_bytes = 0
        self._used_ns = 0
        self._last_error: int | None = None
        try:
            if self._file_bytes > max_bytes:
                raise DiskStoreError(
                    f"--kv-disk: {max_bytes} bytes hold no block, which takes {self._file_bytes}; raise bytes="
                )
            self._scan()
        except OSError as error:
            self._files.close()
            raise DiskStoreUnusable(
                f"--kv-disk: {directory} cannot be read ({error.strerror}); give another directory, or empty this one"
            ) from error
        except DiskStoreError:
            self._files.close()
            raise
        self.sweep()

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            return self._has(key)

    def find(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """The longest run of `keys`, from the first, that is here."""
        with self._lock:
            return keys[: next((n for n, key in enumerate(keys) if not self._has(key)), len(keys))]

    def owners(self) -> set[Namespace]:
        """Tenants and digests (None: the base) of all blocks, also those of other builds."""
        with self._lock:
            elsewhere = {owner for build in self._builds.values() for owner in build.owners}
            return elsewhere | {name for name, owner in self._owners.items() if owner.blocks}

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        """Whether the block is on the disk now. It is not where its owner is erased meanwhile. Raises ValueError for a
        payload of another length."""
        if payload.nbytes != self._block_bytes:
            raise ValueError(f"a block has {self._block_bytes} bytes, not {payload.nbytes}")
        name = self._files.block_name(self._build, key)
        with self._lock:
            if name in self._recent:
                return True
            owner = self._writing = self._owner(key[0])
        fault: OSError | None = None
        try:
            self._delete()
            self._make_room(key[0][0])
            self._files.write(owner.folder, key[0], name, payload.cast("B"), self._now())
        except OSError as error:
            fault = error
        with self._lock:
            self._writing = None
            if fault is not None:
                self._without_blocks.append(owner)
                self.counts.refused["full" if has_no_room(fault) else "error"] += 1
                self._tell(fault)
            elif self._owners.get(key[0]) is not owner:  # erased meanwhile, perhaps before the file was there
                self._doom(owner.folder, 0)
                self.counts.refused["erased"] += 1
            else:
                self.counts.written += 1
                self.counts.num_bytes += self._file_bytes
                self._add(owner, name)
                return True
        return False

    def read(self, key: BlockKey) -> bytes | None:
        """The bytes of a block, None where it is not here. One whose file fails the check is not here any more."""
        name = self._files.block_name(self._build, key)
        with self._lock:
            owner = self._recent.get(name)
            if owner is None:
                return None
            number = owner.blocks[name]
            self._recent.move_to_end(name)
            self._of_tenant[key[0][0]].move_to_end(name)
        content = None
        try:
            content = self._files.read(owner.folder, name, self._block_bytes, self._now())
        except OSError as error:
            if error.errno in _LACKS:
                return None
        with self._lock:
            if (
                self._recent.get(name) is not owner or owner.blocks[name] != number
            ):  # evicted or erased meanwhile
                return None
            if content is None:
                self._drop(name)
                self.counts.damaged += 1
            else:
                self.counts.read += 1
            return content

    def erase_version(self, tenant_id: str | None, digest: str) -> None:
        """Nothing of an adapter version is found any more, of one tenant or (None) of all."""
        self._erase(tenant_id, digest)

    def erase_tenant(self, tenant_id: str) -> None:
        """Nothing of a tenant is found any more, on the base or an adapter."""
        self._erase(tenant_id, None)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """None of these blocks is found any more: they are no good."""
        with self._lock:
            for key in keys:
                name = self._files.block_name(self._build, key)
                if name in self._recent:
                    self._drop(name)

    def sweep(self) -> None:
        """Delete the files of what was erased or damaged, and folders without blocks. What cannot be deleted is tried
        again at the next call or write, and nothing is written before."""
        try:
            self._delete()
        except OSError as error:
            with self._lock:
                self._tell(error)

    def close(self) -> None:
        """Give the directory to others, when no call is under way. Later calls find and write nothing."""
        self._files.close()

    def _scan(self) -> None:
        found: list[tuple[int, bytes, _Owner]] = []
        for build in self._files.builds():
            for files in self._files.owners(build):
                size = sum(_taken(num_bytes) for *_, num_bytes in files.blocks)
                self.counts.num_bytes += size
                if files.owner is None:
                    self.counts.damaged += len(files.blocks) if files.has_ids else 0
                    self._doom(files.folder, size)
                elif build == self._build:
                    found += self._whole(files.owner, files)
                else:
                    other = self._builds.setdefault(build, _Build())
                    other.owners[files.owner] = files.folder, size
                    other.used_ns = max([other.used_ns, *(used_ns for used_ns, *_ in files.blocks)])
        for _, name, owner in sorted(found, key=lambda one: one[:2]):
            self._add(owner, name)
        while self._lose_one(None):
            pass

    def _whole(self, namespace: Namespace, files: OwnerFiles) -> list[tuple[int, bytes, _Owner]]:
        """The blocks of an owner that have the right length; others are to be deleted."""
        owner, found = self._owner(namespace), list[tuple[int, bytes, _Owner]]()
        self._without_blocks.append(owner)
        for used_ns, name, num_bytes in files.blocks:
            if num_bytes == self._block_bytes + self._files.overhead:
                found.append((used_ns, name, owner))
            else:
                self.counts.damaged += 1
                self._doom((*owner.folder, name.hex()), _taken(num_bytes))
        return found

    def _has(self, key: BlockKey) -> bool:
        owner = self._owners.get(key[0])
        return owner is not None and self._files.block_name(self._build, key) in owner.blocks

    def _owner(self, namespace: Namespace) -> _Owner:
        if namespace not in self._owners:
            self._owners[namespace] = _Owner(namespace, self._files.folder(self._build, namespace))
        return self._owners[namespace]

    def _add(self, owner: _Owner, name: bytes) -> None:
        self._recent[name] = owner
        self._of_tenant.setdefault(owner.namespace[0], OrderedDict())[name] = None
        owner.blocks[name] = self.counts.written
        self.counts.blocks += 1

    def _forget(self, name: bytes) -> _Owner:
        """A block is not found any more; its file is still there."""
        owner = self._recent.pop(name)
        tenant = owner.namespace[0]
        del self._of_tenant[tenant][name]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        del owner.blocks[name]
        self.counts.blocks -= 1
        return owner

    def _drop(self, name: bytes) -> None:
        owner = self._forget(name)
        self._doom((*owner.folder, name.hex()), self._file_bytes)
        if not owner.blocks:
            self._without_blocks.append(owner)

    def _doom(self, path: tuple[str, ...], num_bytes: int) -> None:
        self._doomed.append((path, num_bytes))
        self._doomed_bytes += num_bytes

    def _make_room(self, tenant: str) -> None:
        """Delete until a block more of this tenant fits."""
        while True:
            with self._lock:
                if not self._lose_one(tenant):
                    return
            self._delete()

    def _lose_one(self, tenant: str | None) -> bool:
        """Whether something more is to be deleted before a tenant, or none, gets a block more: its own block, another
        build or any block."""
        own = () if tenant is None else self._of_tenant.get(tenant, ())
        more = 0 if tenant is None else self._file_bytes
        if len(own) >= self._most:
            victim = next(iter(own))
        elif self.counts.num_bytes - self._doomed_bytes + more <= self.counts.capacity:
            return False
        elif self._builds:
            oldest = min(self._builds, key=lambda build: self._builds[build].used_ns)
            for folder, num_bytes in self._builds.pop(oldest).owners.values():
                self._doom(folder, num_bytes)
            return True
        else:
            victim = next(iter(self._recent))
        self._drop(victim)
        self.counts.evicted += 1
        return True

    def _delete(self) -> None:
        """Delete what is to be deleted. Raises OSError; the rest is tried again."""
        while True:
            with self._lock:
                if not self._doomed:
                    break
                path, num_bytes = self._doomed[0]
            self._files.remove(path)
            with self._lock:
                self._doomed.popleft()
                self._doomed_bytes -= num_bytes
                self.counts.num_bytes -= num_bytes
        with self._lock:
            empty = {
                owner.folder: owner.namespace
                for owner in self._without_blocks
                if not owner.blocks
                and owner is not self._writing
                and self._owners.get(owner.namespace) is owner
            }
            self._without_blocks.clear()
            for namespace in empty.values():
                del self._owners[namespace]
        for folder in empty:
            self._files.remove(folder)

    def _erase(self, tenant_id: str | None, digest: str | None) -> None:
        with self._lock:
            for owner in [each for each in self._owners if _owns(each, tenant_id, digest)]:
                own = self._owners.pop(owner)
                self._doom(own.folder, len(own.blocks) * self._file_bytes)
                for name in [*own.blocks]:
                    self._forget(name)
            for build in self._builds.values():
                for owner in [each for each in build.owners if _owns(each, tenant_id, digest)]:
                    self._doom(*build.owners.pop(owner))

    def _tell(self, error: OSError) -> None:
        """Log an error that is not the one before."""
        if error.errno != self._last_error:
            self._last_error = error.errno
            _log.warning("--kv-disk: prefixes are not written to the disk: %s", error)

    def _now(self) -> int:
        """The time in ns, later than any before."""
        with self._lock:
            self._used_ns = max(self._used_ns + 1, time.time_ns())
            return self._used_ns


def _owns(owner: Namespace, tenant_id: str | None, digest: str | None) -> bool:
    """Whether an owner is that of an erasure: of a tenant, of a version, or of a tenant's version."""
    return tenant_id in (None, owner[0]) and digest in (None, owner[1])


def _taken(num_bytes: int) -> int:
    """Bytes that a file takes on the disk."""
    return -(-num_bytes // _UNIT) * _UNIT
