"""Objects of a bucket by S3's protocol: parts in parallel, repeated until a deadline. It knows nothing of adapters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.s3 import s3_store

T = TypeVar("T")
PART_BYTES = 8 << 20
PARTS_AT_A_TIME = 4
REQUEST_S = 8.0
"""Seconds after which one request is given up and repeated."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0


class BucketAway(LoraplexError):
    """The bucket did not answer well within the deadline."""

    code = "storage_unavailable"
    retry_after_s = 5.0


@dataclass(frozen=True, slots=True)
class BucketObject:
    """`e_tag` changes with the object's content."""

    key: str
    size: int
    e_tag: str
    modified: datetime


class BucketClient:
    """Each call raises BucketAway once `deadline_s` seconds have passed, and until then repeats what fails. Endpoint,
    region and credentials are those of the `AWS_*` variables."""

    def __init__(
        self, bucket: str, prefix: str, *, deadline_s: float = 10.0, request_s: float = REQUEST_S
    ) -> None:
        self._deadline_s = deadline_s
        # Repeated here, where the deadline of the whole call is known.
        self._store = s3_store(bucket, prefix, request_s=request_s, retries=0, retry_s=request_s)

    def probe(self, key: str) -> None:
        """Write an object, read it and remove it."""
        content = os.urandom(16)
        self._repeat(lambda: obstore.put(self._store, key, content))
        found = self._repeat(lambda: self._part(key, 0, len(content)))
        self.delete(key)
        if found != content:
            raise BucketAway("the bucket gives back other bytes than it was given")

    def find(self, key: str) -> BucketObject | None:
        """None where there is no such object."""
        return self._repeat(lambda: self._find(key))

    def get_file(self, key: str, size: int, path: Path) -> bool:
        """Write an object of `size` bytes into the existing empty file `path`, in parts; False where it is gone.
        What was written must be checked: an object may be exchanged meanwhile."""
        until = time.monotonic() + self._deadline_s + size / (1 << 20)
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.truncate(file, size)

            def get(start: int) -> bool:
                end = min(size, start + PART_BYTES)
                part = self._repeat(lambda: self._part(key, start, end), until)
                if part is not None:
                    _write_at(file, part, start)
                return part is not None

            with ThreadPoolExecutor(PARTS_AT_A_TIME) as threads:
                return all(threads.map(get, range(0, size, PART_BYTES)))
        finally:
            os.close(file)

    def chunks(self, key: str, size: int) -> Iterator[bytes]:
        """An object's content, one part at a time; it ends early where the object is gone."""
        for start in range(0, size, PART_BYTES):
            end = min(size, start + PART_BYTES)
            part = self._repeat(partial(self._part, key, start, end))
            if part is None:
                return
            yield part

    def put_file(self, key: str, path: Path) -> None:
        """Several parts where the file is large; the object appears whole or not at all."""
        until = time.monotonic() + self._deadline_s + path.stat().st_size / (1 << 20)
        self._repeat(
            lambda: obstore.put(
                self._store, key, path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_A_TIME
            ),
            until,
        )

    def put_if_absent(self, key: str, content: bytes) -> None:
        """Nothing where the object is there already."""

        def put() -> None:
            try:
                obstore.put(self._store, key, content, mode="create")
            except AlreadyExistsError:
                return

        self._repeat(put)

    def delete(self, key: str) -> None:
        """Also where there is none."""
        self._repeat(lambda: self._delete(key))

    def list(self, prefix: str) -> Iterator[BucketObject]:
        """All objects below `prefix`."""

        def read() -> list[BucketObject]:
            pages = obstore.list(self._store, prefix=prefix)
            return [_object(meta) for page in pages for meta in page]

        yield from self._repeat(read)

    def _find(self, key: str) -> BucketObject | None:
        try:
            return _object(obstore.head(self._store, key))
        except (NotFoundError, FileNotFoundError):
            return None

    def _part(self, key: str, start: int, end: int) -> bytes | None:
        try:
            part = bytes(obstore.get_range(self._store, key, start=start, end=end))
        except (NotFoundError, FileNotFoundError):
            return None
        if len(part) != end - start:
            raise OSError("a part is too short")
        return part

    def _delete(self, key: str) -> None:
        try:
            obstore.delete(self._store, key)
        except (NotFoundError, FileNotFoundError):
            return

    def _repeat(self, ask: Callable[[], T], until: float | None = None) -> T:
        until = time.monotonic() + self._deadline_s if until is None else until
        pause = FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except (BaseError, OSError) as error:
                if time.monotonic() + pause > until:
                    # The library's message repeats addresses and answers, which clients must not read.
                    raise BucketAway(
                        "the bucket of the artifacts does not answer; try again later"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)


def _object(meta: obstore.ObjectMeta) -> BucketObject:
    return BucketObject(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"])


def _write_at(file: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, start)
        view, start = view[written:], start + written
