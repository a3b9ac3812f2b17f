"""Versions that serve before their bytes are on the disk: what makes them durable, and what a crash leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.adapters.errors import StoreFailed
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.retention import Retention
from loraplex.control.catalog.series import AllSeries, SeriesRules
from loraplex.control.errors import ModelNotFound, VersionNotFound
from loraplex.control.flushes import Flushes
from loraplex.control.types import VersionInfo
from loraplex.migrations.run import downgrade, upgrade
from support.adapters.drafts import make_adapter
from support.control.plane import ARCH, ControlPlane, caller

TRAINER = Actor("key", "acme", "0123456789abcdef", scopes=frozenset({"adapters:train", "adapters:write"}))


@pytest.fixture
def series(plane: ControlPlane) -> AllSeries:
    """With `acme/run` as one where each push takes all the traffic."""
    made = AllSeries(plane.database, plane.catalog.check_name)
    made.put("acme", "run", SeriesRules(keep_last=8, check_every=1000))
    return made


@pytest.fixture
def flushes(plane: ControlPlane) -> Flushes:
    return Flushes(plane.database, plane.store)


def push(plane: ControlPlane, seed: int, *, durable: bool = False, name: str = "run") -> VersionInfo:
    with plane.store.begin_staging() as staging:
        make_adapter(staging.directory, ARCH, seed=seed)
        return plane.catalog.admit("acme", name, staging, durable=durable, by=TRAINER)[0]


def states(plane: ControlPlane) -> dict[str, tuple[str, bool]]:
    listed = plane.catalog.list_versions("acme", "run").items
    return {info.version: (info.state, info.durable) for info in listed}


def released(plane: ControlPlane) -> list[str]:
    return [target.version for target in plane.releases.get("acme", "run").targets]


def tear(folder: Path) -> None:
    """The file of the tensors as a power cut may leave it."""
    os.truncate(folder / "adapter_model.safetensors", 100)


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.iterdir()}


def fail() -> None:
    raise OSError(5, os.strerror(5))


class ForgetfulDisk:
    """A disk that cannot write the first file that is flushed. As of Linux, later flushes of that file succeed, and
    its bytes are not on the disk. `safe` has the inodes of files that are."""

    def __init__(self) -> None:
        self._bad: set[int] = set()
        self.safe: set[int] = set()

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        if step is FaultPoint.FLUSH_FILE:
            assert path is not None
            inode = path.stat().st_ino
            if not self._bad:
                self._bad.add(inode)
                fail()
            self.safe |= {inode} - self._bad


class Steps:
    """Takes note of a store's steps; `at` is called once, before the first step of its kind."""

    def __init__(self, at: FaultPoint | None = None, act: Callable[[], object] | None = None) -> None:
        self.seen: list[FaultPoint] = []
        self._at, self._act = at, act

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        self.seen.append(step)
        if step is self._at and self._act is not None:
            act, self._act = self._act, None
            act()


def test_a_push_waits_for_no_flush_and_is_durable_after_its_own(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    plane.store.fault = steps = Steps()
    info = push(plane, 1)
    assert (info.state, info.durable) == ("ready", False)
    assert not [step for step in steps.seen if "flush" in step]
    assert flushes.waiting() == [info.digest]
    settled = flushes.settle([info.digest, "0" * 64])
    assert (settled.durable, settled.failed) == ((info.digest,), {})
    assert steps.seen[-6:] == [
        FaultPoint.FLUSH_FILE, FaultPoint.FLUSH_FILE, FaultPoint.FLUSH_FOLDER, FaultPoint.FLUSH_SHELVES,
        FaultPoint.FLUSH_SHELF, FaultPoint.COMMIT_DURABLE,
    ]  # fmt: skip
    assert states(plane) == {"v1": ("ready", True)}
    assert flushes.waiting() == []
    plane.check_integrity()


def test_a_version_that_retired_before_its_turn_is_not_flushed(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=1, check_every=1000))
    first, second = push(plane, 1), push(plane, 2)
    Retention(plane.database, plane.artifacts, 0).apply("acme", "run")
    plane.store.fault = steps = Steps()
    assert flushes.settle([first.digest, second.digest]).durable == (second.digest,)
    assert steps.seen.count(FaultPoint.FLUSH_FOLDER) == 1
    assert states(plane) == {"v1": ("retired", False), "v2": ("ready", True)}


def test_the_same_bytes_elsewhere_are_flushed_for_all_who_have_them(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    """An upload is told that it is on the disk: so are the bytes that were there, and not flushed."""
    push(plane, 1)
    plane.store.fault = steps = Steps()
    assert push(plane, 1, durable=True, name="other").durable
    assert steps.seen.count(FaultPoint.FLUSH_FOLDER) == 2  # of the upload, and of what is stored
    assert states(plane) == {"v1": ("ready", True)}
    # Nor is a push of bytes that are there, and durable, any less so.
    assert push(plane, 1, name="third").durable
    plane.check_integrity()


@pytest.mark.parametrize("durable", [False, True])
def test_the_same_bytes_again_are_not_durable_by_a_flush_of_files_that_one_has_failed_for(
    plane: ControlPlane, series: AllSeries, flushes: Flushes, durable: bool
) -> None:
    info = push(plane, 1)
    plane.store.fault = disk = ForgetfulDisk()
    assert list(flushes.settle([info.digest]).failed) == [info.digest]
    assert push(plane, 1, durable=durable, name="other").durable
    assert states(plane) == {"v1": ("ready", True)}
    assert inodes(plane.store.path(info.digest)) <= disk.safe
    assert not plane.staged()
    plane.check_integrity()


def test_an_upload_that_is_refused_behind_its_commit_leaves_the_bytes_to_another_flush(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    info = push(plane, 1)

    def upload_in_vain() -> None:
        plane.store.fault = Steps(FaultPoint.COMMIT_VERSION, fail)
        with pytest.raises(StoreFailed):
            push(plane, 1, durable=True, name="other")

    plane.store.fault = Steps(FaultPoint.FLUSH_SHELF, upload_in_vain)
    settled = flushes.settle([info.digest])
    assert (settled.durable, settled.failed, settled.replaced) == ((), {}, (info.digest,))
    assert states(plane) == {"v1": ("ready", False)}
    assert flushes.settle([info.digest]).durable == (info.digest,)
    plane.check_integrity()


def test_a_flush_of_bytes_that_were_pushed_again_meanwhile_counts_for_none(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    push(plane, 2)
    first = push(plane, 1)

    def delete_and_push_again() -> None:
        plane.releases.promote("acme", "run", "v1")
        plane.catalog.delete_version("acme", "run", first.version)
        push(plane, 1)

    plane.store.fault = Steps(FaultPoint.FLUSH_SHELF, delete_and_push_again)
    flushes.settle([first.digest])
    assert states(plane) == {"v1": ("ready", False), "v2": ("deleted", False), "v3": ("ready", False)}
    assert first.digest in flushes.waiting()


@pytest.mark.parametrize("code", [5, 28])
def test_a_disk_that_fails_leaves_it_serving_and_to_be_tried_again(
    plane: ControlPlane, series: AllSeries, flushes: Flushes, code: int
) -> None:
    def fail_so() -> None:
        raise OSError(code, os.strerror(code))

    info = push(plane, 1)
    plane.store.fault = Steps(FaultPoint.FLUSH_FILE, fail_so)
    settled = flushes.settle([info.digest])
    assert (settled.durable, list(settled.failed)) == ((), [info.digest])
    assert states(plane) == {"v1": ("ready", False)}
    # The system may count what it could not write as written: the files are written once more.
    before = inodes(plane.store.path(info.digest))
    assert flushes.settle([info.digest], suspect=[info.digest]).durable == (info.digest,)
    assert not before & inodes(plane.store.path(info.digest))
    plane.check_integrity()


def test_bytes_that_the_disk_kept_wrong_are_not_made_durable_by_a_second_flush(
    plane: ControlPlane, series: AllSeries, flushes: Flushes
) -> None:
    info = push(plane, 1)
    tear(plane.store.path(info.digest))
    settled = flushes.settle([info.digest], suspect=[info.digest])
    assert (settled.durable, list(settled.failed)) == ((), [info.digest])
    assert plane.catalog.reconcile() == 1
    assert states(plane) == {"v1": ("lost", False)}
    plane.check_integrity()


async def test_a_start_makes_whole_versions_durable_and_says_which_are_lost(
    plane: ControlPlane, series: AllSeries, tmp_path: Path
) -> None:
    for seed in range(1, 6):
        push(plane, seed, durable=seed == 1)
    whole, torn, missing = (plane.catalog.get_version("acme", "run", v) for v in ("v3", "v4", "v5"))
    tear(plane.store.path(torn.digest))
    shutil.rmtree(plane.store.path(missing.digest))
    tear(plane.store.path(plane.catalog.get_version("acme", "run", "v1").digest))
    assert released(plane) == ["v5"]
    plane.close()

    restarted = ControlPlane(tmp_path)
    restarted.artifacts.sweep()
    assert restarted.catalog.reconcile() == 2
    # Damage that nobody has read yet is none of a start's; the first was told that it is durable.
    assert states(restarted) == {
        "v1": ("ready", True), "v2": ("ready", True), "v3": ("ready", True), "v4": ("lost", False),
        "v5": ("lost", False),
    }  # fmt: skip
    assert torn.digest not in restarted.stored()
    # What the release named is lost: the series' latest is the newest that is left.
    assert released(restarted) == ["v3"]
    for version in ("v4", "v5"):
        with pytest.raises(ModelNotFound, match="is lost: the machine stopped before its bytes were durable"):
            await restarted.resolver.resolve(caller("acme"), f"run@{version}")
        with pytest.raises(VersionNotFound, match="lost"):
            restarted.catalog.get_living("acme", "run", version)
    with pytest.raises(ModelNotFound, match="does not exist"):
        await restarted.resolver.resolve(caller("rival"), "run@v4")
    resolved = await restarted.resolver.resolve(caller("acme"), "run")
    assert resolved.adapter is not None
    assert resolved.adapter.digest == whole.digest
    # The same bytes again are a new version.
    assert push(restarted, 5).version == "v6"
    restarted.close()


async def test_a_name_whose_release_is_lost_says_so_where_no_other_takes_its_place(
    plane: ControlPlane, series: AllSeries
) -> None:
    series.put("acme", "run", SeriesRules(keep_last=8, check_every=1000, latest=False))
    push(plane, 1, durable=True)
    plane.releases.promote("acme", "run", push(plane, 2).version)
    tear(plane.store.path(plane.catalog.get_version("acme", "run", "v2").digest))
    assert plane.catalog.reconcile() == 1
    assert released(plane) == ["v2"]
    with pytest.raises(ModelNotFound, match="run@v2 is lost"):
        await plane.resolver.resolve(caller("acme"), "run")
    plane.releases.promote("acme", "run", "v1")
    assert (await plane.resolver.resolve(caller("acme"), "run")).adapter is not None


async def test_the_only_version_of_a_name_may_be_lost(plane: ControlPlane, series: AllSeries) -> None:
    info = push(plane, 1)
    plane.catalog.set_tags("acme", "run", ["eu"])
    tear(plane.store.path(info.digest))
    assert plane.catalog.reconcile() == 1
    assert not plane.catalog.list_adapters("acme").items
    with pytest.raises(ModelNotFound, match="run@v1 is lost"):
        await plane.resolver.resolve(caller("acme"), "run@v1")
    plane.check_integrity()
    assert push(plane, 2).version == "v2"
    assert released(plane) == ["v2"]
    assert plane.catalog.get_adapter("acme", "run").tags == ()
    plane.check_integrity()


def test_a_store_that_is_not_there_at_a_start_loses_nothing(plane: ControlPlane, series: AllSeries) -> None:
    push(plane, 1, durable=True)
    push(plane, 2)
    store, away = plane.root / "artifacts" / "sha256", plane.root / "away"
    store.rename(away)
    store.mkdir()
    plane.catalog.reconcile()
    assert states(plane) == {"v1": ("corrupt", True), "v2": ("corrupt", False)}
    store.rmdir()
    away.rename(store)
    plane.catalog.reconcile()
    assert states(plane) == {"v1": ("ready", True), "v2": ("ready", True)}


def test_bytes_that_cannot_be_flushed_at_a_start_are_not_lost(plane: ControlPlane, series: AllSeries) -> None:
    push(plane, 1)
    plane.store.fault = Steps(FaultPoint.FLUSH_FOLDER, fail)
    assert plane.catalog.reconcile() == 0
    assert states(plane) == {"v1": ("ready", False)}
    assert plane.catalog.reconcile() == 0
    assert states(plane) == {"v1": ("ready", True)}


def test_the_schema_before_knows_lost_versions_as_deleted(
    plane: ControlPlane, series: AllSeries, tmp_path: Path
) -> None:
    push(plane, 1, durable=True)
    tear(plane.store.path(push(plane, 2).digest))
    plane.catalog.reconcile()
    plane.close()
    downgrade(plane.url, "0014")
    upgrade(plane.url)
    restarted = ControlPlane(tmp_path)
    assert states(restarted) == {"v1": ("ready", True), "v2": ("deleted", True)}
    restarted.check_integrity()
    restarted.close()
