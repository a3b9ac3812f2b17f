"""The files of prefixes on the disk: names, content and its check. The index is in `disk_store`.

    DIR/lock                                  held by the engine that uses DIR
    DIR/mark                                  the salt of all keys, and a check of the operator's secret
    DIR/unfinished                            the file that is being written
    DIR/<build>/<tenant>/<version>/owner      the ids of tenant and version
    DIR/<build>/<tenant>/<version>/<block>    a block; of the base model, <version> is "base"

Every name is an HMAC-SHA256: no id and no digest becomes a path, and without the secret no name can be computed from a
prompt. A file is a head (magic, version, its full name, length, check) and the content. With a secret the content is
encrypted by AES-256-GCM under a random nonce of 96 bits, and the head is authenticated with it; one key may encrypt
2**32 files (NIST SP 800-38D, 8.3). Without a secret the check is a SHA-256 over head and content: that finds damage,
but not what was forged by a user who may write to DIR.

A file is written under another name, and renamed when it is whole: a process that is killed leaves all of it or
nothing. Only the mark is synchronised (fsync): what a power loss leaves of another file fails its check.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import write_all
from loraplex.engine.types import BlockKey, Namespace

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Folder = tuple[str, str, str]
"""The folder of an owner's blocks below DIR: build, tenant, version."""

_FORMAT = 1
_MARK = struct.Struct("<8sI?32s")
"""Magic, format, whether there is a secret, salt. A check follows."""
_START = struct.Struct("<8sI32sQ")
"""Magic, format, name, bytes of the content. A check follows."""
_MARK_MAGIC, _FILE_MAGIC = b"LPXKVDIR", b"LPXKVBLK"
_CHECK_BYTES = 32
_HEAD_BYTES = _START.size + _CHECK_BYTES
_NONCE_BYTES, _TAG_BYTES = 12, 16
_MAX_OWNER_BYTES = 1 << 16
_MARK_NAME, _OWNER, _UNFINISHED, _BASE = "mark", "owner", "unfinished", "base"
_NAME = re.compile("[0-9a-f]{64}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of a path that is not below DIR any more."""


class DiskStoreError(LoraplexError):
    """A directory that cannot be used for prefixes on the disk."""

    code = "kv_disk_refused"


class DiskStoreUnusable(DiskStoreError):
    """The disk fails, a crash has left damage, or others have the directory: an engine serves without it."""


class DiskStoreHeld(DiskStoreUnusable):
    """Another engine has the directory."""


@dataclass(slots=True)
class OwnerFiles:
    """The content of an owner's folder."""

    folder: Folder
    owner: Namespace | None = None
    """None where the ids cannot be read."""
    has_ids: bool = False
    """Not so where a deletion was cut off."""
    blocks: list[tuple[int, bytes, int]] = field(default_factory=list)
    """Time of the last use in ns, name, bytes (-1: no regular file)."""


class DiskFiles:
    """The files below `directory`, which is made if need be. One process at a time may have it, and one thread of it
    at a time writes and removes. Raises DiskStoreError; every method raises OSError.

    No link is followed below `directory`. Folders have the mode 0700 and files 0600."""

    def __init__(self, directory: Path, secret: bytes | None) -> None:
        self._descriptors: list[int] = []
        self._cipher: AESGCM | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = self._keep(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._hold(directory)
            self._remove_unfinished()
            derived = _derive(secret, self._salt(directory, secret))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                is_none = isinstance(error, FileExistsError | NotADirectoryError)
                reason = "it is no directory" if is_none else error.strerror
                kind = DiskStoreError if is_none else DiskStoreUnusable
                raise kind(
                    f"--kv-disk: {directory} cannot be used ({reason}); give a directory that the server may write to"
                ) from error
            raise
        self._name_key = derived(b"names")
        if secret is not None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._cipher = AESGCM(derived(b"content"))

    def close(self) -> None:
        """Give the directory to others, when no call is under way."""
        self._root = -1
        while self._descriptors:
            os.close(self._descriptors.pop())

    @property
    def overhead(self) -> int:
        """Bytes of a file beside its content."""
        return _HEAD_BYTES + (0 if self._cipher is None else _TAG_BYTES)

    def build_name(self, build: bytes) -> str:
        return self._name(b"build", build).hex()

    def folder(self, build_name: str, owner: Namespace) -> Folder:
        """An owner's folder. Its last two names are the same in all builds."""
        tenant_id, digest = owner
        version = _BASE if digest is None else self._name(b"version", _raw(digest)).hex()
        return build_name, self._name(b"tenant", _raw(tenant_id)).hex(), version

    def block_name(self, build_name: str, key: BlockKey) -> bytes:
        (tenant_id, digest), link = key
        version = b"-" if digest is None else b"+" + _raw(digest)
        return self._name(b"block", build_name.encode(), _raw(tenant_id), version, link)

    def write(self, folder: Folder, owner: Namespace, name: bytes, content: memoryview, time_ns: int) -> None:
        """Write a block, whole or not at all."""
        sealed = self._seal(name, content)
        try:
            with self._opened(folder) as place:
                os.stat(_OWNER, dir_fd=place, follow_symlinks=False)
                self._write(place, name.hex(), sealed, time_ns)
        except FileNotFoundError:  # the owner has no folder yet, or no ids there
            try:
                with self._opened(folder, make=True) as place:
                    ids = self._seal(self._owner_name(folder), json.dumps(owner).encode())
                    self._write(place, _OWNER, ids, time_ns)
                    self._write(place, name.hex(), sealed, time_ns)
            except OSError:
                with suppress(OSError):  # blocks beside no ids would be lost at the next start
                    self.remove(folder)
                raise

    def read(self, folder: Folder, name: bytes, num_bytes: int, time_ns: int) -> bytes | None:
        """The content of a block of `num_bytes`, which is used now; None where its check fails."""
        with self._opened(folder) as place:
            return self._read(place, name.hex(), name, num_bytes, time_ns)

    def remove(self, path: Sequence[str]) -> None:
        """Remove a block or an owner's folder, if it is there; with that those above it that are empty then."""
        *parents, name = path
        try:
            with self._opened(parents) as place:
                try:
                    os.unlink(name, dir_fd=place)
                except IsADirectoryError:
                    with suppress(
                        FileNotFoundError
                    ):  # first: blocks without ids are not found, whatever comes next
                        os.unlink(f"{name}/{_OWNER}", dir_fd=place)
                    shutil.rmtree(name, dir_fd=place)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        if len(parents) == 2:
            for *above, folder in (parents, parents[:1]):
                with suppress(OSError), self._opened(above) as place:
                    os.rmdir(folder, dir_fd=place)

    def builds(self) -> list[str]:
        return self._folders(())

    def owners(self, build_name: str) -> Iterator[OwnerFiles]:
        """The content of every owner's folder of a build."""
        for tenant in self._folders((build_name,)):
            for version in self._folders((build_name, tenant)):
                found = OwnerFiles((build_name, tenant, version))
                with suppress(OSError):
                    self._read_owner(found)
                yield found

    def _read_owner(self, found: OwnerFiles) -> None:
        with self._opened(found.folder) as place:
            with os.scandir(place) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name):
                        status = entry.stat(follow_symlinks=False)
                        size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                        found.blocks.append((status.st_mtime_ns, bytes.fromhex(entry.name), size))
            size = os.stat(_OWNER, dir_fd=place, follow_symlinks=False).st_size - self.overhead
            found.has_ids = True
            if 0 <= size <= _MAX_OWNER_BYTES:
                ids = self._read(place, _OWNER, self._owner_name(found.folder), size)
                found.owner = None if ids is None else tuple(json.loads(ids))

    def _folders(self, path: Sequence[str]) -> list[str]:
        """Our folders in one below the directory."""
        with self._opened(path) as place, os.scandir(place) as entries:
            return [
                entry.name
                for entry in entries
                if (_NAME.fullmatch(entry.name) or (entry.name == _BASE and len(path) == 2))
                and entry.is_dir(follow_symlinks=False)
            ]

    @contextmanager
    def _opened(self, path: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below the directory; no part of its path may be a link."""
        place = os.dup(self._root)
        try:
            for part in path:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=place)
                inner = os.open(part, _DIRECTORY, dir_fd=place)
                os.close(place)
                place = inner
            yield place
        finally:
            os.close(place)

    def _write(
        self,
        place: int,
        file_name: str,
        parts: Sequence[bytes | memoryview],
        time_ns: int | None = None,
        *,
        sync: bool = False,
    ) -> None:
        """Write a file in the folder `place`, under another name until it is whole. With `sync` it outlives a power
        loss."""
        self._remove_unfinished()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(_UNFINISHED, flags, 0o600, dir_fd=self._root), "wb", buffering=0) as file:
                for part in parts:
                    write_all(file, part)
                if time_ns is not None:
                    os.utime(file.fileno(), ns=(time_ns, time_ns))
                if sync:
                    os.fsync(file.fileno())
            os.rename(_UNFINISHED, file_name, src_dir_fd=self._root, dst_dir_fd=place)
            if sync:
                os.fsync(place)
        except OSError:
            self._remove_unfinished()
            raise

    def _remove_unfinished(self) -> None:
        with suppress(OSError):
            os.unlink(_UNFINISHED, dir_fd=self._root)

    def _read(
        self, place: int, file_name: str, name: bytes, num_bytes: int, time_ns: int | None = None
    ) -> bytes | None:
        file = os.open(file_name, _FILE, dir_fd=place)
        try:
            head = os.read(file, _HEAD_BYTES)
            # A longer file is not what was written: one byte more than that is asked for.
            body = os.read(file, num_bytes + self.overhead - _HEAD_BYTES + 1)
            if time_ns is not None:
                with suppress(OSError):  # the disk has become read-only
                    os.utime(file, ns=(time_ns, time_ns))
        finally:
            os.close(file)
        return self._unseal(name, num_bytes, head, body)

    def _seal(self, name: bytes, content: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
        """Head and body of a file."""
        start = _START.pack(_FILE_MAGIC, _FORMAT, name, len(content))
        if self._cipher is None:
            return start + _sum(start, content), content
        nonce = os.urandom(_NONCE_BYTES)
        head = start + nonce.ljust(_CHECK_BYTES, b"\0")
        return head, self._cipher.encrypt(nonce, content, head)

    def _unseal(self, name: bytes, num_bytes: int, head: bytes, body: bytes) -> bytes | None:
        """The content of a file; None where one bit is not as it was written, or under another name."""
        start, check = head[: _START.size], head[_START.size :]
        if start != _START.pack(_FILE_MAGIC, _FORMAT, name, num_bytes):
            return None
        if self._cipher is None:
            return body if len(body) == num_bytes and check == _sum(start, body) else None
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(check[:_NONCE_BYTES], body, head)
        except (InvalidTag, ValueError):  # ValueError: cut short, within nonce or tag
            return None

    def _name(self, kind: bytes, *parts: bytes) -> bytes:
        spelled = b"".join([len(part).to_bytes(8, "little") + part for part in (kind, *parts)])
        return hmac.digest(self._name_key, spelled, "sha256")

    def _owner_name(self, folder: Folder) -> bytes:
        return self._name(_OWNER.encode(), *(part.encode() for part in folder))

    def _hold(self, directory: Path) -> None:
        """Lock the directory. Raises DiskStoreHeld where another has it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = self._keep(os.open("lock", flags, 0o600, dir_fd=self._root))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DiskStoreHeld(
                f"--kv-disk: another engine uses {directory}; stop it, or give another directory"
            ) from error

    def _salt(self, directory: Path, secret: bytes | None) -> bytes:
        """The salt of the directory, which its first user makes. Raises DiskStoreError if that had another secret, and
        DiskStoreUnusable for a damaged mark."""
        try:
            file = os.open(_MARK_NAME, _FILE, dir_fd=self._root)
        except FileNotFoundError:
            salt = os.urandom(32)
            mark = _MARK.pack(_MARK_MAGIC, _FORMAT, secret is not None, salt)
            self._write(self._root, _MARK_NAME, (mark, _derive(secret, salt)(mark)), sync=True)
            return salt
        try:
            mark, check = os.read(file, _MARK.size), os.read(file, _CHECK_BYTES + 1)
        finally:
            os.close(file)
        fault = ""
        if len(mark) == _MARK.size and len(check) == _CHECK_BYTES and mark.startswith(_MARK_MAGIC):
            _, number, had_secret, salt = _MARK.unpack(mark)
            if hmac.compare_digest(check, _derive(secret, salt)(mark)):
                if number == _FORMAT:
                    return bytes(salt)
            elif had_secret != (secret is not None):
                fault = "its files are encrypted" if had_secret else "its files are not encrypted"
            elif had_secret:
                fault = "its files are encrypted with another key"
        if not fault:
            raise DiskStoreUnusable(
                f"--kv-disk: {directory} cannot be used: its file {_MARK_NAME} is damaged, as by a power loss, or of "
                "another version of the server; give another directory, or empty this one: it holds nothing but copies"
            )
        raise DiskStoreError(
            f"--kv-disk: {directory} cannot be used with this key-file, or without one: {fault}; give the key-file of "
            "before, or another directory, or empty this one: it holds nothing but copies"
        )

    def _keep(self, descriptor: int) -> int:
        self._descriptors.append(descriptor)
        return descriptor


def _derive(secret: bytes | None, salt: bytes) -> Callable[[bytes], bytes]:
    """HKDF-SHA256 (RFC 5869) to keys of 32 bytes, each for its own purpose."""
    extracted = hmac.digest(salt, secret or b"", "sha256")
    return lambda purpose: hmac.digest(extracted, purpose + b"\x01", "sha256")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _sum(start: bytes, content: bytes | memoryview) -> bytes:
    sha = hashlib.sha256(start)
    sha.update(content)
    return sha.digest()
