"""What holds of every store: the one on a disk, and the one in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import obstore
import pytest

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing
from loraplex.adapters.store.artifact_store import ArtifactStore, Staging
from loraplex.adapters.store.bucket_client import BucketClient
from loraplex.adapters.store.bucket_store import BucketStore
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.adapters.store.interface import Store
from loraplex.adapters.store.probe import read_probe, write_probe
from support.servers.s3_server import BUCKET, S3Server

TENSORS = bytes(range(256)) * 64


class Stored:
    """A store, and a way to flip a bit of what it stores."""

    def __init__(self, store: Store, damage: Callable[[str], None]) -> None:
        self.store, self.damage = store, damage

    def stage(self, content: bytes = TENSORS) -> tuple[Staging, str]:
        staging = self.store.begin_staging()
        staging.config_path.write_bytes(b"{}")
        staging.tensors_path.write_bytes(content)
        return staging, digest_upload(staging.config_path, staging.tensors_path)

    def add(self, content: bytes = TENSORS) -> str:
        staging, digest = self.stage(content)
        self.store.commit(staging, digest)
        return digest

    def read(self, digest: str) -> bytes:
        return (self.store.path(digest) / TENSORS_NAME).read_bytes()


@pytest.fixture(params=["disk", "bucket"])
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Stored:
    if request.param == "disk":
        disk = ArtifactStore(tmp_path)

        def damage_file(digest: str) -> None:
            path = disk.path(digest) / TENSORS_NAME
            path.write_bytes(flipped(path.read_bytes()))

        return Stored(disk, damage_file)
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    prefix = tmp_path.name
    bucket = BucketStore(
        BucketClient(BUCKET, prefix), tmp_path, cache_bytes=1 << 30, orphan_age=timedelta(seconds=-5)
    )

    def damage_object(digest: str) -> None:
        key = f"sha256/{digest[:2]}/{digest}/{TENSORS_NAME}"
        content = bytes(obstore.get(s3.store(prefix), key).bytes())
        obstore.put(s3.store(prefix), key, flipped(content))

    return Stored(bucket, damage_object)


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_what_is_committed_is_there(stored: Stored) -> None:
    store = stored.store
    digest = stored.add()
    assert stored.read(digest) == TENSORS
    assert (store.path(digest) / CONFIG_NAME).read_bytes() == b"{}"
    assert list(store.digests()) == [digest]
    assert store.holds(digest)
    store.verify(digest)
    assert store.examine(digest).damage is None


@pytest.mark.parametrize("digest", ["0" * 64, "", "../../etc", "0" * 63, "A" * 64])
def test_what_is_not_there(stored: Stored, digest: str) -> None:
    store = stored.store
    for ask in (store.path, store.verify):
        with pytest.raises(ArtifactMissing):
            ask(digest)
    assert isinstance(store.examine(digest).damage, ArtifactMissing)
    assert not store.holds(digest)
    assert store.drop_damaged_copy(digest) is False


def test_the_same_bytes_again_change_nothing(stored: Stored) -> None:
    digest = stored.add()
    before = stored.store.examine(digest)
    assert stored.add() == digest
    assert stored.store.is_current(before)
    assert list(stored.store.digests()) == [digest]


def test_what_was_examined_is_not_current_after_a_change(stored: Stored) -> None:
    _, digest = stored.stage()
    before = stored.store.examine(digest)
    stored.add()
    assert not stored.store.is_current(before)


def test_a_deleted_artifact_is_gone(stored: Stored) -> None:
    digest, other = stored.add(), stored.add(b"others")
    assert stored.store.delete(digest) is True
    assert stored.store.delete(digest) is False
    with pytest.raises(ArtifactMissing):
        stored.store.path(digest)
    assert list(stored.store.digests()) == [other]
    assert stored.read(other) == b"others"


def test_damaged_bytes_are_found_and_healed_by_an_upload(stored: Stored) -> None:
    digest = stored.add()
    stored.damage(digest)
    found = stored.store.examine(digest)
    assert isinstance(found.damage, ArtifactCorrupt)
    staging, _ = stored.stage()
    stored.store.commit(staging, digest, found)
    assert stored.store.examine(digest).damage is None
    assert stored.read(digest) == TENSORS


def test_a_sweep_removes_what_nobody_has(stored: Stored) -> None:
    live, orphan = stored.add(), stored.add(b"orphan")
    stored.stage(b"half an upload")
    swept = stored.store.sweep({live, "f" * 64})
    assert swept.artifacts_removed == (orphan,)
    assert swept.staging_removed == 1
    assert swept.missing == ("f" * 64,)
    assert list(stored.store.digests()) == [live]
    assert stored.read(live) == TENSORS


def test_what_is_no_digest_is_refused_and_discarded(stored: Stored) -> None:
    staging, _ = stored.stage()
    with pytest.raises(ValueError):
        stored.store.commit(staging, "../x")
    assert not staging.directory.exists()


def test_a_probe_is_read_by_its_name_until_it_is_deleted(stored: Stored) -> None:
    probe = write_probe(stored.store)
    assert read_probe(stored.store, probe.digest) == probe.content
    stored.store.verify(probe.digest)
    assert stored.store.delete(probe.digest)
    with pytest.raises(ArtifactMissing):
        read_probe(stored.store, probe.digest)
