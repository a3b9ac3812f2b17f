"""Uploads and deletions at the same time, and ends that come at the worst moment."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from loraplex.adapters.errors import AdapterRefused, StoreFull
from loraplex.control.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    DatabaseBusy,
    ModelNotFound,
    TenantNotFound,
)
from loraplex.control.types import Removal, VersionInfo
from support.control.plane import ControlPlane, at_once, caller, digests


def test_uploads_of_one_name_at_once_get_a_number_each(plane: ControlPlane) -> None:
    results = at_once(*[lambda seed=seed: plane.add("acme", "pirate", seed) for seed in range(8)])  # type: ignore[misc]
    assert sorted(info.number for info in results) == list(range(1, 9))
    assert len(plane.stored()) == 8
    release = plane.releases.get("acme", "pirate")
    assert release.revision == 1
    assert [t.version for t in release.targets] == ["v1"]
    plane.check_integrity()


def test_the_same_bytes_at_once_are_one_version(plane: ControlPlane) -> None:
    results = at_once(*[lambda: plane.upload("acme", "pirate", 1)] * 8)
    assert {info.version for info, _ in results} == {"v1"}
    assert sorted(is_new for _, is_new in results) == [False] * 7 + [True]
    plane.check_integrity()


def test_a_quota_holds_against_uploads_at_once(plane: ControlPlane) -> None:
    size = plane.add("rival", "probe", seed=99).bytes
    plane.tenants.update("acme", {"limits": {"max_adapters": 3, "max_adapter_bytes": 3 * size}})
    results = at_once(*[lambda seed=seed: plane.add("acme", f"a{seed}", seed) for seed in range(8)])  # type: ignore[misc]
    refusals = [result for result in results if isinstance(result, AdapterRefused)]
    assert len(refusals) == 5
    assert {refusal.code for refusal in refusals} == {"quota_exceeded"}
    assert len(plane.stored()) == 3 + 1
    plane.check_integrity()


def test_deleting_and_uploading_the_same_bytes_never_leaves_a_version_without_them(
    plane: ControlPlane,
) -> None:
    names = ["one", "two", "three"]

    def work(number: int) -> Callable[[], None]:
        def churn() -> None:
            for turn in range(12):
                name = names[(number + turn) % 3]
                if (number + turn) % 2:
                    plane.add("acme", name, seed=1)
                else:
                    with contextlib.suppress(AdapterNotFound):
                        plane.catalog.delete_adapter("acme", name)

        return churn

    results = at_once(*[work(number) for number in range(6)])
    assert results == [None] * 6
    plane.check_integrity()
    for digest in plane.stored():
        plane.store.verify(digest)


def test_no_upload_slips_in_between_the_last_row_and_its_bytes(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion found that no version has the bytes any more. An upload of the same bytes now waits until they
    are gone, or they would be removed under the new version."""
    digest = plane.add("acme", "pirate", seed=1).digest
    real = plane.store.delete
    uploads: list[Future[VersionInfo]] = []

    with ThreadPoolExecutor(1) as pool:

        def late(doomed: str) -> bool:
            uploads.append(pool.submit(plane.add, "rival", "pirate", 1))
            wait(uploads, timeout=0.5)  # it must not end before the deletion does, however long that takes
            return real(doomed)

        monkeypatch.setattr(plane.store, "delete", late)
        assert digests(plane.catalog.delete_adapter("acme", "pirate")) == {digest}
        assert uploads[0].result().state == "ready"
    plane.store.verify(digest)
    plane.check_integrity()


def test_a_tenant_deleted_during_an_upload_takes_it_along(plane: ControlPlane) -> None:
    results = at_once(
        *[lambda seed=seed: plane.add("acme", "pirate", seed) for seed in range(5)],  # type: ignore[misc]
        lambda: plane.tenants.delete("acme"),
    )
    assert isinstance(results[-1], Removal)
    assert all(isinstance(result, VersionInfo | TenantNotFound) for result in results[:-1])
    plane.check_integrity()
    assert plane.stored() == set()


async def test_resolving_while_versions_come_and_go_gives_a_version_or_none(plane: ControlPlane) -> None:
    stop, enough = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            for seed in itertools.takewhile(lambda n: n < 15 or not enough.is_set(), range(1000)):
                plane.add("acme", "pirate", seed)
                if seed % 3 == 2:
                    plane.catalog.delete_adapter("acme", "pirate")
                else:
                    plane.releases.promote("acme", "pirate")
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=churn)
    thread.start()
    found = missing = 0
    while not stop.is_set():
        try:
            resolved = await plane.resolver.resolve(caller("acme"), "pirate")
            assert resolved.adapter is not None
            assert resolved.adapter.tenant_id == "acme"
            found += 1
        except ModelNotFound:
            missing += 1
        if found and missing:
            enough.set()
    thread.join()
    assert not failures
    assert found
    assert missing


def test_a_row_that_cannot_be_written_takes_its_bytes_along(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = plane.add("acme", "pirate", seed=1)

    def fail(*_: Any, **__: Any) -> None:
        raise DatabaseBusy

    monkeypatch.setattr("loraplex.control.catalog.adapters.add_version", fail)
    for seed in (1, 2):
        with pytest.raises(DatabaseBusy):
            plane.upload("acme", "other", seed)
    plane.check_integrity()
    assert plane.stored() == {kept.digest}
    monkeypatch.undo()
    assert plane.add("acme", "other", seed=2).version == "v1"


def test_a_full_disk_leaves_what_was_there(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = plane.add("acme", "pirate", seed=1)
    real = os.fsync

    def full(fd: int) -> None:
        if "artifacts" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "no space left")
        real(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull):
        plane.upload("acme", "pirate", seed=2)
    monkeypatch.undo()
    plane.check_integrity()
    assert plane.stored() == {kept.digest}
    assert plane.add("acme", "pirate", seed=2).version == "v2"


async def test_lost_bytes_are_corrupt_at_the_next_start_until_they_are_uploaded_again(
    plane: ControlPlane,
) -> None:
    info = plane.add("acme", "pirate", seed=1)
    shutil.rmtree(plane.store.path(info.digest))
    again = ControlPlane(plane.root)
    again.start()
    assert again.catalog.get_version("acme", "pirate", "v1").state == "corrupt"
    with pytest.raises(AdapterUnavailable):
        await again.resolver.resolve(caller("acme"), "pirate")
    healed, is_new = again.upload("acme", "pirate", seed=1)
    assert (healed.version, healed.state, is_new) == ("v1", "ready", False)
    again.store.verify(info.digest)
    assert (await again.resolver.resolve(caller("acme"), "pirate")).adapter == info.ref()
    again.check_integrity()
    again.close()


def test_a_slow_disk_keeps_no_other_writer_waiting(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of an upload are flushed before any lock is taken."""
    flushing, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd: int) -> None:
        if "/staging/" in os.readlink(f"/proc/self/fd/{fd}") and not flushing.is_set():
            flushing.set()
            assert go_on.wait(60)
        real(fd)

    plane.add("rival", "other", seed=3)
    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(1) as pool:
        upload = pool.submit(plane.add, "acme", "pirate", 1)
        assert flushing.wait(60)
        plane.tenants.update("rival", {"weight": 2})
        plane.catalog.delete_adapter("rival", "other")
        plane.add("rival", "another", seed=4)
        assert not upload.done()
        go_on.set()
        assert upload.result().state == "ready"
    plane.check_integrity()
