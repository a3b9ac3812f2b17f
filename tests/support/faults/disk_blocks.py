"""Blocks for stores on the disk, and damage to their files."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loraplex.engine.kv.disk_store import DiskStore
from loraplex.engine.types import BlockKey

BLOCK = 3000
ON_DISK = 4096
"""Bytes that a file of such a block takes."""
Open = Callable[..., DiskStore]


def key(tenant: str, digest: str | None, number: int) -> BlockKey:
    return (tenant, digest), hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(one: BlockKey, num_bytes: int = BLOCK) -> bytes:
    return hashlib.shake_256(repr(one).encode()).digest(num_bytes)


def write(store: DiskStore, one: BlockKey) -> bool:
    return store.write(one, memoryview(content(one)))


def files(directory: Path) -> set[Path]:
    """Those of blocks."""
    return {path for path in directory.glob("*/*/*/*") if path.name != "owner"}


@contextmanager
def stores(default: Path) -> Iterator[Open]:
    """Opens the store of a directory, once more if it was open: a restart."""
    by_directory: dict[Path, DiskStore] = {}

    def reopen(
        directory: Path = default,
        *,
        blocks: float = 1000,
        block_bytes: int = BLOCK,
        build: bytes = b"a build",
        secret: bytes | None = None,
    ) -> DiskStore:
        if directory in by_directory:
            by_directory.pop(directory).close()
        by_directory[directory] = DiskStore(
            directory, max_bytes=int(blocks * ON_DISK), block_bytes=block_bytes, build=build, secret=secret
        )
        return by_directory[directory]

    yield reopen
    for store in by_directory.values():
        store.close()


def flip_a_bit(path: Path, place: int | None = None) -> None:
    raw = bytearray(path.read_bytes())
    place = random.Random(len(raw)).randrange(len(raw)) if place is None else place
    raw[place] ^= 1 << place % 8
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
