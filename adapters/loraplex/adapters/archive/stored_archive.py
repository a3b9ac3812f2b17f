"""A stored artifact as a tar of the two files that were uploaded, and of a version's others: the same bytes each time.

    StoredArchive(store.path(digest), digest, version_files)

The two are in the order of the digest and come first. Members are with mode 0644, no owner and no time (GNU tar
manual, "Basic Tar Format"). The bytes are hashed as they are read, and the last ones are returned only if the hash is
the artifact's digest. So a damaged archive is always too short.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, ArtifactUnreadable
from loraplex.adapters.store.artifact_store import check_digest
from loraplex.adapters.store.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    DIGEST_SALT,
    TENSORS_NAME,
    length_bytes,
    names_damage,
    open_regular,
)

MEDIA_TYPE = "application/x-tar"
_BLOCK = 512
_END = bytes(2 * _BLOCK)


class StoredArchive:
    """An open artifact: it can be read to its end though it is deleted meanwhile. Use from one thread at a time.
    `num_bytes` is the archive's size."""

    def __init__(self, folder: Path, digest: str, others: Mapping[str, bytes] | None = None) -> None:
        """`others` are a version's further files by name. Raises ArtifactMissing, ArtifactCorrupt,
        ArtifactUnreadable."""
        self._digest = digest
        self._others = others or {}
        self._files: list[tuple[str, BinaryIO, int]] = []
        with self._failures_named(folder):
            try:
                for name in (CONFIG_NAME, TENSORS_NAME):
                    file = open_regular(folder / name)
                    self._files.append((name, file, os.fstat(file.fileno()).st_size))
            except BaseException:
                self.close()
                raise
        self._folder = folder
        self._rest = self._pieces()
        sizes = [*(size for _, _, size in self._files), *map(len, self._others.values())]
        self.num_bytes = len(_END) + sum(_BLOCK + size + _padding(size) for size in sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for _, file, _ in self._files:
            file.close()

    def read(self) -> bytes:
        """The next bytes, a megabyte or more; none at the end. Raises ArtifactCorrupt where they would complete an
        archive whose bytes are not those of the digest, ArtifactUnreadable."""
        data = bytearray()
        with self._failures_named(self._folder):
            for piece in self._rest:
                data += piece
                if len(data) >= CHUNK_BYTES:
                    break
        return bytes(data)

    def _pieces(self) -> Iterator[bytes]:
        sha = hashlib.sha256(DIGEST_SALT)
        for name, file, size in self._files:
            yield _head(name, size)
            sha.update(length_bytes(size))
            left, data = size, b""
            while left:
                yield data
                data = file.read(min(CHUNK_BYTES, left))
                if not data:
                    raise ArtifactCorrupt(f"artifact {self._digest[:12]} is damaged: {name} is cut")
                sha.update(data)
                left -= len(data)
            if name == TENSORS_NAME:
                check_digest(self._digest, sha.hexdigest())
            yield data + bytes(_padding(size))
        for name, content in self._others.items():
            yield _head(name, len(content)) + content + bytes(_padding(len(content)))
        yield _END

    @contextlib.contextmanager
    def _failures_named(self, folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            named = f"artifact {self._digest[:12]}"
            if not folder.is_dir():
                raise ArtifactMissing(f"the store holds no {named}") from error
            if names_damage(error):
                raise ArtifactCorrupt(f"{named} is damaged: {error.strerror}") from error
            raise ArtifactUnreadable(f"{named} cannot be read: {error.strerror}") from error


def _head(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % _BLOCK
