"""From the journal to the database: each row exactly once, whatever fails on the way, and however often."""

from __future__ import annotations

import asyncio
import random
import struct
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplex.control.db.database import Database
from loraplex.control.db.tables import UsageSource
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.usage.journal import lock_life
from loraplex.control.usage.records import INTERRUPTED, Accepted, Ended
from loraplex.control.usage.segments import segment_path
from loraplex.control.usage.writer import EVERY_S
from support.control.plane import ControlPlane
from support.control.usage import accepted, by_id, ended, rows_of
from support.control.usage_lives import SEGMENT, Flaky, Life


@pytest.fixture
def flaky(plane: ControlPlane) -> Flaky:
    return Flaky(plane.database)


def sources(database: Database) -> int:
    with database.read() as session:
        return session.query(UsageSource).count()


def test_rows_are_what_was_journalled(plane: ControlPlane, tmp_path: Path) -> None:
    life = Life(tmp_path / "usage", plane.database)
    rows = life.serve(3, adapter="support", version=3, digest="d" * 64, streamed=True, n=2)
    rows += life.serve(3)
    assert life.writer.num_waiting == 6
    life.write()
    assert rows_of(plane.database) == by_id(rows)
    assert (life.writer.num_waiting, life.writer.num_written) == (0, 6)
    life.stop()
    assert list((tmp_path / "usage").iterdir()) == []
    assert sources(plane.database) == 0


def test_segments_go_when_the_database_has_them(plane: ControlPlane, tmp_path: Path) -> None:
    life = Life(tmp_path / "usage", plane.database)
    rows = life.serve(1000)
    assert life.journal.num_bytes > 2 * SEGMENT
    life.write()
    assert life.journal.num_bytes == SEGMENT
    assert rows_of(plane.database) == by_id(rows)
    life.stop()


async def test_rows_that_come_one_by_one_share_a_commit(plane: ControlPlane, tmp_path: Path) -> None:
    # A batch ends where its segment does: here one has room for all.
    life = Life(tmp_path / "usage", plane.database, segment_bytes=1 << 20)
    batches: list[int] = []
    life.writer.on_written = batches.append
    began = time.monotonic()
    writing = asyncio.create_task(life.writer.run())
    num_rows, took = 0, 0.0
    # A machine that is held up has time for a commit, and for no row.
    while took < 2.5 * EVERY_S or num_rows <= 2 * (2 + took / EVERY_S):
        request = accepted()
        life.journal.accept(request)
        await life.journal.end(ended(request))
        num_rows += 1
        await asyncio.sleep(0.005)
        took = time.monotonic() - began
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert sum(batches) == num_rows
    assert len(batches) <= 2 + took / EVERY_S
    life.stop()


@pytest.mark.parametrize("failure", ["away", "broken", "unheard"])
def test_nothing_is_lost_or_doubled_by_a_write_that_fails(
    flaky: Flaky, plane: ControlPlane, tmp_path: Path, failure: str
) -> None:
    life = Life(tmp_path / "usage", flaky)
    rows = life.serve(40)
    flaky.failures = [failure] * 2
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            life.write()
        assert life.writer.num_waiting == 40
    rows += life.serve(5)
    life.write()
    assert rows_of(plane.database) == by_id(rows)
    life.stop()


def test_a_dead_life_is_read_to_its_end(plane: ControlPlane, flaky: Flaky, tmp_path: Path) -> None:
    first = Life(tmp_path / "usage", flaky)
    rows = first.serve(30)
    first.write()
    rows += first.serve(30)
    cut = [first.begin() for _ in range(3)]
    first.die()
    second = Life(tmp_path / "usage", flaky)
    rows += second.serve(10)
    flaky.failures = ["unheard"]
    with pytest.raises(DatabaseUnavailable):
        second.write()
    second.die()
    third = Life(tmp_path / "usage", flaky)
    third.write()
    found = rows_of(plane.database)
    lost = {request.id: found.pop(request.id) for request in cut}
    assert found == by_id(rows)
    assert {(row.status, row.completion_tokens, row.tenant_id) for row in lost.values()} == {
        (INTERRUPTED, 0, "acme")
    }
    third.stop()
    assert list((tmp_path / "usage").iterdir()) == []
    assert sources(plane.database) == 0


def test_journal_of_a_living_server_is_left_alone(plane: ControlPlane, tmp_path: Path) -> None:
    """Two lives at a time, as on a volume that servers share."""
    first, second = Life(tmp_path / "usage", plane.database), Life(tmp_path / "usage", plane.database)
    rows = first.serve(5)
    under_way = first.begin()
    second.write()
    assert rows_of(plane.database) == {}
    first.write()
    asyncio.run(first.journal.end(ended(under_way)))
    first.write()
    assert rows_of(plane.database).keys() == by_id([*rows, ended(under_way)]).keys()
    first.stop()
    second.stop()


def test_a_row_that_was_told_is_not_told_again_after_it_was_rolled_up(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """The place in the journal is kept, and not only the rows: they may be gone when a dead life is read."""
    first = Life(tmp_path / "usage", plane.database)
    first.serve(30)
    first.write()
    late = first.serve(2)
    first.die()
    with plane.database.write() as session:
        session.connection().exec_driver_sql("DELETE FROM usage")
    second = Life(tmp_path / "usage", plane.database)
    second.write()
    assert rows_of(plane.database) == by_id(late)
    second.stop()


def damage(life: Life, how: str) -> None:
    first = segment_path(life.journal.directory, 1)
    if how == "its disk fails":
        first.unlink()
        first.mkdir()  # which is no file that could be read
        return
    record = msgspec.msgpack.encode(["z", "of a version to come"])
    with open(first, "r+b") as file:
        file.write(struct.pack("<II", len(record), zlib.crc32(record)) + record)


@pytest.mark.parametrize("told", [False, True], ids=["nothing told", "begun"])
@pytest.mark.parametrize("how", ["its disk fails", "another version wrote it"])
def test_a_journal_that_cannot_be_read_keeps_no_other_waiting(
    plane: ControlPlane, tmp_path: Path, how: str, told: bool
) -> None:
    """Nor the rows of requests that are served now. It stays for a start that can read it."""
    broken = Life(tmp_path / "usage", plane.database)
    lost = broken.serve(3)
    if told:
        broken.write()
    broken.die()
    whole = Life(tmp_path / "usage", plane.database)
    rows = whole.serve(3)
    whole.die()
    damage(broken, how)
    life = Life(tmp_path / "usage", plane.database)
    rows += life.serve(2)
    life.write()
    assert rows_of(plane.database) == by_id([*rows, *lost] if told else rows)
    assert life.writer.lag_s == 0
    lock_life(broken.journal.directory).close()  # nobody holds it
    life.stop()
    assert list((tmp_path / "usage").iterdir()) == [broken.journal.directory]


def history(database: Any, directory: Path, seed: int, steps: int) -> Counter[str]:
    """Requests, failures, deaths, in any order; at the end each request has its row, once and exact. How many."""
    chance, flaky = random.Random(seed), Flaky(database)
    life = Life(directory, flaky)
    rows: list[Ended] = []
    cut: set[str] = set()
    running: list[Accepted] = []
    seen = Counter[str]()
    for _ in range(steps):
        what = chance.random()
        if what < 0.35:
            rows += life.serve(chance.choice((1, 7, 60)))
        elif what < 0.5:
            running.append(life.begin())
        elif what < 0.6 and running:
            row = ended(running.pop(chance.randrange(len(running))))
            asyncio.run(life.journal.end(row))
            rows.append(row)
        elif what < 0.9:
            seen["writes"] += 1
            flaky.failures = [
                f for f in chance.choices(("away", "broken", "unheard", None), k=chance.randint(0, 3)) if f
            ]
            life.try_to_write()
            flaky.failures = []
        else:
            seen["deaths"] += 1
            life.die()
            cut |= {request.id for request in running}
            running = []
            life = Life(directory, flaky)
    life.die()
    cut |= {request.id for request in running}
    last = Life(directory, database)
    last.write()
    found = rows_of(database)
    assert {row.id for row in found.values() if row.status == INTERRUPTED} == cut
    assert {name: row for name, row in found.items() if name not in cut} == by_id(rows)
    last.stop()
    return seen + Counter(rows=len(rows), interrupted=len(cut))


@pytest.mark.parametrize("seed", range(3))
def test_histories(plane: ControlPlane, tmp_path: Path, seed: int) -> None:
    history(plane.database, tmp_path / "usage", seed, 40)


@pytest.mark.soak
def test_many_histories(plane: ControlPlane, tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in range(100, 200):
        seen += history(plane.database, tmp_path / f"usage-{seed}", seed, 60)
        with plane.database.write() as session:
            session.connection().exec_driver_sql("DELETE FROM usage")
    print(f"\n100 histories: {dict(seen)}; 0 lost, 0 doubled")
