"""The store of adapters in a bucket, behind a bounded cache on a local disk.

    PREFIX/sha256/<2 hex>/<digest>/adapter_model.safetensors
    PREFIX/sha256/<2 hex>/<digest>/adapter_config.json         written last, removed first

With its config an artifact is there. All that is read is read from the cache, whose folder has an `ArtifactStore`'s
layout; what it lacks is fetched and hashed first. The two processes of a server, which admits and which loads, share a
cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from loraplex.adapters.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ArtifactUnreadable,
    LoraplexError,
    StoreFailed,
)
from loraplex.adapters.store.artifact_store import (
    ArtifactStore,
    Examined,
    Staging,
    SweepReport,
    check_digest,
)
from loraplex.adapters.store.bucket_client import BucketAway, BucketClient, BucketObject
from loraplex.adapters.store.fault_points import Fault, FaultPoint, no_fault
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    DIGEST_SALT,
    TENSORS_NAME,
    create_file,
    digest_upload,
    disk_failures_named,
    length_bytes,
)

ORPHAN_AGE = timedelta(days=1)
"""Objects of no version that are younger may belong to an upload to another server."""
IN_USE_S = 120.0
"""Seconds for which a cached artifact stays after it was asked for: a loader may be reading it."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_AWAY = "the bucket of the artifacts does not answer; try again later"
T = TypeVar("T")
AWAY_S = 5.0
"""Seconds after a failure for which the bucket is not asked again for what is read."""


class BucketStore:
    """A `loraplex.adapters.store.interface.Store` in a bucket. The cache holds `cache_bytes` and what was used within
    IN_USE_S. While the bucket is away, what is cached is read as ever; the rest fails at once for AWAY_S after each
    failure."""

    def __init__(
        self,
        client: BucketClient,
        cache_dir: Path,
        *,
        cache_bytes: int,
        orphan_age: timedelta = ORPHAN_AGE,
        fault: Fault = no_fault,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._cache = ArtifactStore(cache_dir, fault)
        self._folders = cache_dir / "sha256"
        self._cache_bytes = cache_bytes
        self._orphan_age = orphan_age
        self._clock = clock
        self._away_until = float("-inf")

    @property
    def fault(self) -> Fault:
        return self._cache.fault

    def begin_staging(self) -> Staging:
        return self._cache.begin_staging()

    # What is read.

    def path(self, digest: str) -> Path:
        """The folder of an artifact in the cache, where it stays for IN_USE_S at least. Raises ArtifactMissing,
        ArtifactCorrupt (the bucket's bytes are others), ArtifactUnreadable."""
        with contextlib.suppress(ArtifactMissing, OSError):
            folder = self._cache.path(digest)
            os.utime(folder)
            return folder
        return self._fetch(digest)

    def holds(self, digest: str) -> bool:
        """Whether the bucket has it. Raises StoreFailed."""
        return (
            _is_digest(digest)
            and self._changing(lambda: self._client.find(_key(digest, CONFIG_NAME))) is not None
        )

    def verify(self, digest: str) -> None:
        """Hash the bytes that `path` leads to, which fetches them if need be."""
        self.path(digest)
        self._cache.verify(digest)

    def drop_damaged_copy(self, digest: str) -> bool:
        """Drop the cached copy of an artifact if its bytes are not those of the digest; whether it was so."""
        try:
            self._cache.verify(digest)
        except ArtifactMissing:
            return False
        except LoraplexError:
            return self._cache.delete(digest)
        return False

    def examine(self, digest: str) -> Examined:
        """Examine the bucket's bytes as `ArtifactStore.examine` does; a damaged copy of them is dropped on the way."""
        while True:
            place = self._place(digest)
            damage: ArtifactMissing | ArtifactCorrupt | ArtifactUnreadable | None = None
            try:
                self.drop_damaged_copy(digest)
                self._verify_bucket(digest)
            except (ArtifactMissing, ArtifactCorrupt, ArtifactUnreadable) as error:
                damage = error
            if self._place(digest) == place:
                return Examined(digest, place, damage)

    def is_current(self, examined: Examined) -> bool:
        return self._place(examined.digest) == examined.place

    def digests(self) -> Iterator[str]:
        """Every digest of the bucket, in order. Raises StoreFailed."""
        yield from sorted(digest for digest, _ in self._listed())

    # What changes.

    def commit(
        self,
        staging: Staging,
        digest: str,
        examined: Examined | None = None,
        *,
        flush: bool = True,
        replace: bool = False,
    ) -> Path:
        """Commit as `ArtifactStore.commit` does: into the bucket first, then into the cache, durable in any case. The
        bytes of an object are replaced only where they are damaged."""
        try:
            if not _is_digest(digest):
                raise ValueError(f"not a digest: '{digest}'")
            found = examined or self.examine(digest)
            if found.damage is not None:
                self._changing(lambda: self._upload(staging, digest))
            return self._keep(staging, digest)
        except BaseException:
            staging.discard()
            raise

    def flush(self, digest: str, *, rewrite: bool = False) -> Examined:
        """Nothing waits for a flush: what the bucket has is durable. Raises StoreFailed."""
        return Examined(digest, self._place(digest), None)

    def delete(self, digest: str) -> bool:
        """Delete as `ArtifactStore.delete` does. Raises StoreFailed, after which the artifact is whole or not there."""
        was_there = self.holds(digest)
        for name in (CONFIG_NAME, TENSORS_NAME):
            self.fault(FaultPoint.BUCKET_DELETE, Path(_key(digest, name)))
            self._changing(partial(self._client.delete, _key(digest, name)))
        with contextlib.suppress(OSError):
            self._cache.delete(digest)
        return was_there

    def sweep(self, live: set[str]) -> SweepReport:
        """Sweep as `ArtifactStore.sweep` does. Orphans of the bucket stay for ORPHAN_AGE."""
        cached = self._cache.sweep(live)
        oldest = datetime.now(UTC) - self._orphan_age
        stored, removed, freed = set(), [], cached.bytes_freed
        for digest, objects in self._by_digest().items():
            is_whole = any(found.key.endswith(CONFIG_NAME) for found in objects)
            if is_whole and digest in live:
                stored.add(digest)
            elif digest not in live and all(found.modified < oldest for found in objects):
                self.delete(digest)
                removed.append(digest)
                freed += sum(found.size for found in objects)
        self._trim()
        return SweepReport(
            cached.staging_removed, tuple(sorted(removed)), freed, tuple(sorted(live - stored))
        )

    def _verify_bucket(self, digest: str) -> None:
        """Hash the bucket's bytes, without keeping them."""
        config, tensors = self._reading(lambda: self._objects(digest))
        sha = hashlib.sha256(DIGEST_SALT)
        for found in (config, tensors):
            sha.update(length_bytes(found.size))
            self._reading(partial(self._hash, found, sha))
        check_digest(digest, sha.hexdigest())

    def _hash(self, found: BucketObject, sha: hashlib._Hash) -> None:
        for chunk in self._client.chunks(found.key, found.size):
            sha.update(chunk)

    def _upload(self, staging: Staging, digest: str) -> None:
        config, tensors = _key(digest, CONFIG_NAME), _key(digest, TENSORS_NAME)
        # A damaged artifact is not there while it is replaced.
        if self._client.find(config) is not None:
            self._client.delete(config)
        self.fault(FaultPoint.BUCKET_PUT, Path(tensors))
        self._client.put_file(tensors, staging.tensors_path)
        self.fault(FaultPoint.BUCKET_PUT, Path(config))
        self._client.put_if_absent(config, staging.config_path.read_bytes())
        self.fault(FaultPoint.BUCKET_STORED, Path(config))

    def _fetch(self, digest: str) -> Path:
        config, tensors = self._reading(lambda: self._objects(digest))
        with self._cache.begin_staging() as staging:
            paths = (staging.config_path, staging.tensors_path)
            for found, path in zip((config, tensors), paths, strict=True):
                with disk_failures_named():
                    self.fault(FaultPoint.RECEIVE_CREATE, path)
                    create_file(path).close()
                is_whole = self._reading(partial(self._client.get_file, found.key, found.size, path))
                if not is_whole:
                    raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'")
            check_digest(digest, digest_upload(*paths))
            return self._keep(staging, digest)

    def _keep(self, staging: Staging, digest: str) -> Path:
        """Checked files into the cache."""
        folder = self._cache.commit(staging, digest)
        os.utime(folder)
        self._trim()
        return folder

    def _trim(self) -> None:
        """Remove what was not used for longest, until the cache is within its bound."""
        entries = []
        for digest in self._cache.digests():
            folder = self._folders / digest[:2] / digest
            with contextlib.suppress(OSError):  # the other process removed it
                size = sum(entry.stat().st_size for entry in folder.iterdir())
                entries.append((folder.stat().st_mtime, size, digest))
        total = sum(size for _, size, _ in entries)
        newest = time.time() - IN_USE_S
        for used, size, digest in sorted(entries):
            if total <= self._cache_bytes or used > newest:
                return
            with contextlib.suppress(OSError):
                self._cache.delete(digest)
            total -= size

    def _objects(self, digest: str) -> tuple[BucketObject, BucketObject]:
        """Config and tensors. Raises ArtifactMissing, ArtifactCorrupt."""
        config = self._client.find(_key(digest, CONFIG_NAME)) if _is_digest(digest) else None
        if config is None:
            raise ArtifactMissing(f"the store holds no artifact '{digest[:12]}'")
        tensors = self._client.find(_key(digest, TENSORS_NAME))
        if tensors is None:
            raise ArtifactCorrupt(f"artifact {digest[:12]} is damaged: the bucket lacks {TENSORS_NAME}")
        # Keys of a client with a prefix are told with or without it; ours are known.
        return (
            replace(config, key=_key(digest, CONFIG_NAME)),
            replace(tensors, key=_key(digest, TENSORS_NAME)),
        )

    def _place(self, digest: str) -> tuple[int, int, int] | None:
        """Values that change with the bucket's bytes. Raises StoreFailed."""
        if not _is_digest(digest):
            return None
        try:
            objects = [self._client.find(_key(digest, name)) for name in (CONFIG_NAME, TENSORS_NAME)]
        except BucketAway as error:
            raise StoreFailed(error.message) from error
        if objects[0] is None:
            return None
        marks = [0 if found is None else _number(found.e_tag) for found in objects]
        return marks[0], marks[1], int(objects[0].modified.timestamp())

    def _listed(self) -> Iterator[tuple[str, list[BucketObject]]]:
        for digest, objects in self._by_digest().items():
            if any(found.key.endswith(CONFIG_NAME) for found in objects):
                yield digest, objects

    def _by_digest(self) -> dict[str, list[BucketObject]]:
        found: dict[str, list[BucketObject]] = {}
        for one in self._changing(lambda: list(self._client.list("sha256/"))):
            parts = one.key.split("/")
            if len(parts) >= 2 and _is_digest(parts[-2]) and parts[-1] in (CONFIG_NAME, TENSORS_NAME):
                found.setdefault(parts[-2], []).append(one)
        return found

    def _reading(self, read: Callable[[], T]) -> T:
        """Raises ArtifactUnreadable while the bucket is away."""
        if self._clock() < self._away_until:
            raise ArtifactUnreadable(_AWAY)
        try:
            return read()
        except BucketAway as error:
            self._away_until = self._clock() + AWAY_S
            raise ArtifactUnreadable(_AWAY) from error

    def _changing(self, change: Callable[[], T]) -> T:
        """Raises StoreFailed while the bucket is away. It is asked each time: a caller waits for the outcome."""
        try:
            return change()
        except BucketAway as error:
            raise StoreFailed(f"{error.message}; nothing of the upload was kept") from error


def _key(digest: str, name: str) -> str:
    return f"sha256/{digest[:2]}/{digest}/{name}"


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def _number(e_tag: str) -> int:
    return int.from_bytes(hashlib.sha256(e_tag.encode()).digest()[:8], "big")
