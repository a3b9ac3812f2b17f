"""What was answered for outlives a power cut: the order of flushes, held against a file system that forgets."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from loraplex.adapters.store.fault_points import FaultPoint
from support.faults.crash import VERSIONS, Point, Recorder, adapter_bytes, archive_of, send
from support.faults.power_cut import losses
from support.faults.witness import KINDS
from support.http.admin_plane import AdminPlane


def history(root: Path) -> list[Point]:
    """The steps of a new store's first days: uploads, second versions, the same again, bytes that are shared,
    deletions, and what was deleted uploaded again."""
    recorder = Recorder()
    plane = AdminPlane(root, fault=recorder)
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)

    def push(path: str, seed: int, archive: bool = False) -> None:
        files = adapter_bytes(root, seed)
        form = (
            {"archive": ("a.tar.gz", archive_of(files))}
            if archive
            else {name: (name, content) for name, content in files.items()}
        )
        assert send(plane, "POST", path, files=form) in (200, 201)

    push(VERSIONS, 1)
    push(VERSIONS, 2, archive=True)
    push(VERSIONS, 1)
    push("tenants/rival/adapters/parrot/versions", 1)
    assert send(plane, "DELETE", f"{VERSIONS}/v2") == 204
    push(VERSIONS, 2)
    assert send(plane, "DELETE", "tenants/acme/adapters/pirate") == 204
    plane.close()
    return recorder.points


@pytest.fixture(scope="module")
def points() -> tuple[str, list[Point]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        return str(root / "artifacts"), history(root)


def test_no_power_cut_at_any_step_loses_what_was_answered_for(points: tuple[str, list[Point]]) -> None:
    root, steps = points
    assert {step for step in KINDS["fsync"] if step not in {p.step for p in steps}} == set()
    assert list(losses(steps, root)) == []


@pytest.mark.parametrize(
    "without",
    [
        {FaultPoint.FLUSH_STORE},
        {FaultPoint.FLUSH_STAGED, FaultPoint.FLUSH_FILE},
        {FaultPoint.FLUSH_FOLDER},
        {FaultPoint.FLUSH_SHELVES},
        {FaultPoint.FLUSH_SHELF, FaultPoint.FLUSH_RETIRED},
    ],
    ids=lambda steps: ", ".join(sorted(steps)),
)
def test_skipping_any_flush_loses_data(points: tuple[str, list[Point]], without: set[FaultPoint]) -> None:
    """The model above is not blind, and no flush is idle: the files' two stand for each other, as does any later one
    of the same shelf."""
    root, steps = points
    assert next(losses(steps, root, deaf_to=frozenset(without)), None) is not None


def test_a_row_before_its_bytes_would_be_lost(points: tuple[str, list[Point]]) -> None:
    root, steps = points
    early = next(index for index, point in enumerate(steps) if point.step is FaultPoint.FLUSH_SHELF)
    row = next(point for point in steps if point.step is FaultPoint.VERSION_COMMITTED)
    hasty = [*steps[:early], row, *steps[early:]]
    assert next(losses(hasty, root), None) is not None
