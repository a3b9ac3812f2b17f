"""Artifacts of a store that is in use, beside a copied database that names them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from loraplex.adapters.store.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    TENSORS_NAME,
    create_file,
    digest_upload,
    names_damage,
    open_regular,
    write_all,
)

_FILES = (CONFIG_NAME, TENSORS_NAME)
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


class ArtifactCopies:
    """`copies` gets the layout of `store` (both hold `<2 hex>/<digest>/`). On one file system an artifact is hard links
    to the stored files, which are never written again; elsewhere, and of files that others may read, it is a copy.
    Either is hashed."""

    def __init__(self, store: Path, copies: Path) -> None:
        self._store = store
        self._copies = copies
        self.num_bytes: dict[str, int] = {}
        """The artifacts that are whole, and their sizes."""

    def copy_artifacts(self, digests: Iterable[str]) -> set[str]:
        """Those of `digests` that are not there whole: deleted, or damaged. Raises OSError."""
        return {
            digest for digest in sorted(digests) if digest not in self.num_bytes and not self._add(digest)
        }

    def keep_only(self, digests: set[str]) -> None:
        """Raises OSError."""
        for digest in set(self.num_bytes) - digests:
            shutil.rmtree(self._folder(self._copies, digest))
            del self.num_bytes[digest]

    def _add(self, digest: str) -> bool:
        source, target = self._folder(self._store, digest), self._folder(self._copies, digest)
        for folder in (self._copies.parent, self._copies, target.parent, target):
            folder.mkdir(mode=0o700, exist_ok=True)
        paths = [target / name for name in _FILES]
        try:
            for path in paths:
                _link_or_copy(source / path.name, path)
            if digest_upload(*paths) == digest:
                self.num_bytes[digest] = sum(path.stat().st_size for path in paths)
                return True
        except OSError as error:
            if not names_damage(error):
                raise
        shutil.rmtree(target)
        return False

    @staticmethod
    def _folder(root: Path, digest: str) -> Path:
        return root / digest[:2] / digest


def _link_or_copy(source: Path, target: Path) -> None:
    with open_regular(source) as original:
        if not os.fstat(original.fileno()).st_mode & 0o077:
            try:
                os.link(source, target, follow_symlinks=False)
                return
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
        with create_file(target) as copy:
            while data := original.read(CHUNK_BYTES):
                write_all(copy, data)
