"""A start on a full disk after a crash: what the dead server left makes room, and is told to the last row."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.app.installation import prepare
from loraplex.app.settings import Settings
from loraplex.control.usage.dead_lives import trim_leftovers
from loraplex.control.usage.journal import UsageJournal, leftovers
from loraplex.control.usage.opening import open_journal
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.segments import SEGMENT_BYTES, Segment
from loraplex.control.usage.writer import UsageWriter
from support.control.plane import ControlPlane
from support.control.usage import accepted, by_id, ended, rows_of
from support.faults.small_disk import SmallDisk, small_disk
from support.servers.live_server import write_tiny_model
from support.waiting import eventually

CAPACITY = 256 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 24 << 20) as made:
        yield made


@pytest.fixture
def plane(disk: SmallDisk) -> Iterator[ControlPlane]:
    """Its database is on the disk, too."""
    made = ControlPlane(disk.root)
    yield made
    made.close()


def live_and_die(directory: Path, rows: int = 40) -> tuple[dict[str, Ended], Accepted]:
    """What a server had recorded when it was killed, with a request under way."""
    journal = UsageJournal(directory, capacity=CAPACITY)
    requests = [accepted() for _ in range(rows)]
    ends = [ended(request) for request in requests]

    async def serve() -> None:
        for request in requests:
            journal.accept(request)
        await asyncio.gather(*map(journal.end, ends))

    asyncio.run(serve())
    under_way = accepted()
    journal.accept(under_way)
    journal.close()
    return by_id(ends), under_way


def start(plane: ControlPlane, directory: Path) -> tuple[UsageJournal, UsageWriter]:
    trim_leftovers(directory)
    journal = open_journal(plane.database, directory, capacity=CAPACITY)
    return journal, UsageWriter(plane.database, directory, journal)


def test_a_start_after_a_crash_on_a_full_disk(plane: ControlPlane, disk: SmallDisk) -> None:
    directory = disk.root / "usage"
    rows, under_way = live_and_die(directory)
    disk.leave(0)
    journal, writer = start(plane, directory)
    while writer.write_some():
        pass
    found = rows_of(plane.database)
    assert {name: row for name, row in found.items() if name in rows} == rows
    assert found[under_way.id].status == "interrupted"
    assert leftovers(directory, journal.life) == []
    journal.close()
    writer.close()


def test_one_without_room_for_its_journal_tells_the_old_ones_first(tmp_path: Path, disk: SmallDisk) -> None:
    """Several servers died on it: what they wrote is all that there is to give back. The database is elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    plane = ControlPlane(tmp_path / "elsewhere")
    directory = disk.root / "usage"
    rows: dict[str, Ended] = {}
    for _ in range(2):
        rows |= live_and_die(directory, rows=3000)[0]
    trim_leftovers(directory)
    disk.leave(SEGMENT_BYTES - (64 << 10))
    with pytest.raises(OSError, match="No space left") as full:
        UsageJournal(directory, capacity=CAPACITY)
    assert full.value.errno == errno.ENOSPC
    journal, writer = start(plane, directory)
    found = rows_of(plane.database)
    assert {name: row for name, row in found.items() if name in rows} == rows
    assert leftovers(directory, journal.life) == []
    journal.close()
    writer.close()
    plane.close()


def test_trimming_takes_no_record_and_nothing_of_a_journal_that_lives(tmp_path: Path) -> None:
    rows, under_way = live_and_die(tmp_path)
    living = UsageJournal(tmp_path, capacity=CAPACITY)
    eventually(lambda: living._spare is not None)  # its thread is making it
    sizes = {path: path.stat().st_size for path in living.directory.glob("*.segment")}
    trim_leftovers(tmp_path)
    trim_leftovers(tmp_path)
    assert {path: path.stat().st_size for path in sizes} == sizes
    (dead,) = leftovers(tmp_path, living.life)
    assert sum(path.stat().st_size for path in dead.glob("*.segment")) < 64 << 10
    living.close()
    (tmp_path / living.life).rename(tmp_path.parent / "elsewhere")
    made = tmp_path.parent / "plane"
    made.mkdir()
    plane = ControlPlane(made)
    journal, writer = start(plane, tmp_path)
    while writer.write_some():
        pass
    assert set(rows_of(plane.database)) == {*rows, under_way.id}
    journal.close()
    writer.close()
    plane.close()


def test_a_disk_that_is_full_of_other_things_is_told(plane: ControlPlane, disk: SmallDisk) -> None:
    directory = disk.root / "usage"
    directory.mkdir()
    disk.leave(1 << 20)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        start(plane, directory)
    assert list(directory.iterdir()) == []


def test_a_segment_without_room_leaves_the_rest_of_the_disk_to_others(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again; the database may write on the same disk meanwhile."""
    disk.leave(SEGMENT_BYTES - (64 << 10))

    def write(*_: object) -> int:
        raise AssertionError("a part of the segment was written")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left") as full:
        Segment(disk.root, 1, SEGMENT_BYTES)
    assert full.value.errno == errno.ENOSPC
    assert not list(disk.root.glob("*.segment"))


def test_a_whole_start_on_a_disk_without_a_byte_left(disk: SmallDisk, tmp_path: Path) -> None:
    """The database needs some room to begin with, and so do the files of a start."""
    model = write_tiny_model(tmp_path / "model")
    settings = Settings(model=str(model), data_dir=disk.root / "data", admin_token="x" * 32)
    prepare(settings, lambda line: None).close()
    rows, _ = live_and_die(settings.data_dir / "usage")
    disk.leave(0)
    installation = prepare(settings, lambda line: None)
    while installation.usage_writer.write_some():
        pass
    assert set(rows) < set(rows_of(installation.database))
    installation.close()
