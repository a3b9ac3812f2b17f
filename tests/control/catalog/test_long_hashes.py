"""Stored bytes are hashed while others work: no call waits for a large artifact that is uploaded again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loraplex.adapters.store.artifact_store import ArtifactStore
from support.control.plane import ControlPlane

PATIENCE_S = 20.0


class Gate:
    """The first hashing of one artifact stops in the middle until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: ArtifactStore, digest: str) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        real = store.verify

        def verify(asked: str) -> None:
            if asked == digest and not self.reached.is_set():
                self.reached.set()
                assert self._open.wait(PATIENCE_S)
            real(asked)

        monkeypatch.setattr(store, "verify", verify)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def reupload(plane: ControlPlane) -> Any:
    return plane.upload("acme", "large", seed=1)


def report_damage(plane: ControlPlane) -> Any:
    return plane.catalog.mark_damaged(plane.catalog.get_version("acme", "large", "v1").digest)


@pytest.mark.parametrize("hash_again", [reupload, report_damage])
def test_others_work_while_stored_bytes_are_hashed(
    plane: ControlPlane,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    hash_again: Callable[[ControlPlane], Any],
) -> None:
    large = plane.add("acme", "large", seed=1)
    gate = Gate(monkeypatch, plane.store, large.digest)
    hashing = pool.submit(hash_again, plane)
    assert gate.reached.wait(PATIENCE_S)
    try:
        other = pool.submit(lambda: (plane.add("rival", "a", seed=2), plane.add("rival", "a", seed=3)))
        first, second = other.result(PATIENCE_S)
        deleted = pool.submit(plane.catalog.delete_version, "rival", "a", second.version)
        assert deleted.result(PATIENCE_S).digests == (second.digest,)
        assert pool.submit(plane.catalog.delete_adapter, "rival", "a").result(PATIENCE_S).digests == (
            first.digest,
        )
        assert not hashing.done()
    finally:
        gate.open()
    assert hashing.result(PATIENCE_S) in (False, (large, False))
    plane.check_integrity()


def test_bytes_that_went_while_they_were_hashed_are_published_again(
    plane: ControlPlane, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = plane.add("rival", "large", seed=1).digest
    gate = Gate(monkeypatch, plane.store, digest)
    uploading = pool.submit(reupload, plane)
    assert gate.reached.wait(PATIENCE_S)
    try:
        assert plane.catalog.delete_adapter("rival", "large").digests == (digest,)
    finally:
        gate.open()
    assert uploading.result(PATIENCE_S)[0].digest == digest
    assert plane.stored() == {digest}
    plane.check_integrity()


def test_bytes_that_were_healed_while_they_were_found_damaged_are_not_marked(
    plane: ControlPlane, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = plane.add("acme", "large", seed=1).digest
    (plane.store.path(digest) / "adapter_model.safetensors").write_bytes(b"damaged")
    gate = Gate(monkeypatch, plane.store, digest)
    marking = pool.submit(plane.catalog.mark_damaged, digest)
    assert gate.reached.wait(PATIENCE_S)
    try:
        plane.upload("rival", "parrot", seed=1)  # finds the damage by itself, and heals it
    finally:
        gate.open()
    assert marking.result(PATIENCE_S) is False
    assert plane.catalog.get_version("acme", "large", "v1").state == "ready"
    plane.check_integrity()
