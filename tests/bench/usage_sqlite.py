"""The usage journal beside one that SQLite keeps; a part of `bench.usage_cost`.

Both on one disk, in turns, in one process: 1, 32 and 256 requests at a time are accepted and ended, and each waits
until its row is on the disk. Rows a second, the wait, processor time a row, and that of reading rows back and removing
them, as the writer to the database does. Then what is left of what was promised after a kill, a changed byte and a full
disk (which needs root for a tmpfs).

SQLite is used as it would replace the journal: WAL, one thread that commits whatever has come, with synchronous=FULL
where a caller waits, and NORMAL where all that came are beginnings.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import structlog

from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.segments import Position, read_records
from support.control.usage import accepted, ended
from support.faults.small_disk import small_disk

AT_A_TIME = (1, 32, 256)
PROMISED = 2000
CHANGED_BYTES = 20


class SqliteJournal:
    """`accept` and `end` of `UsageJournal`. One row a request: written when it is accepted, replaced when it ends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "journal.db"
        self._places: dict[str, int] = {}
        self._count = 0
        self._wake = threading.Condition()
        self._queue: list[tuple[str, tuple[Any, ...], Callable[[], None] | None]] = []
        self._closing = False
        self.failure: sqlite3.Error | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def accept(self, record: Accepted) -> None:
        with self._wake:
            self._count += 1
            self._places[record.id] = self._count
            payload = msgspec.msgpack.encode(record)
            self._put("INSERT INTO requests VALUES (?, 0, ?)", (self._count, payload))

    async def end(self, record: Ended) -> None:
        loop, synced = asyncio.get_running_loop(), asyncio.Event()
        payload = msgspec.msgpack.encode(record)
        with self._wake:
            place = self._places.pop(record.id)
            sql = "UPDATE requests SET ended = 1, record = ? WHERE place = ?"
            self._put(sql, (payload, place), lambda: loop.call_soon_threadsafe(synced.set))
        await synced.wait()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _put(self, sql: str, values: tuple[Any, ...], done: Callable[[], None] | None = None) -> None:
        self._queue.append((sql, values, done))
        self._wake.notify()

    def _run(self) -> None:
        database = open_database(self.path)
        database.execute(
            "CREATE TABLE IF NOT EXISTS requests (place INTEGER PRIMARY KEY, ended INTEGER, record BLOB)"
        )
        full = True
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                batch, self._queue = self._queue, []
            if not batch:
                break
            waits = any(done for _, _, done in batch)
            if waits != full:
                database.execute(f"PRAGMA synchronous={'FULL' if waits else 'NORMAL'}")
                full = waits
            try:
                database.execute("BEGIN IMMEDIATE")
                for sql, values, _ in batch:
                    database.execute(sql, values)
                database.execute("COMMIT")
            except sqlite3.Error as error:
                self.failure = error
                return
            for _, _, done in batch:
                if done is not None:
                    done()
        database.close()


def open_database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    return database


# Reading back and removing, a batch at a time.


def drain_journal(journal: UsageJournal) -> int:
    rows, position = 0, Position(0, 0)
    while True:
        records, after = read_records(journal.directory, position, journal.synced)
        if after is None:
            return rows
        rows += sum(isinstance(record, Ended) for record in records)
        position = after
        journal.release(position)


def drain_sqlite(journal: SqliteJournal) -> int:
    database, rows = open_database(journal.path), 0
    decoder = msgspec.msgpack.Decoder(Ended)
    while True:
        found = database.execute("SELECT place, record FROM requests WHERE ended = 1 LIMIT 500").fetchall()
        if not found:
            database.close()
            return rows
        rows += len([decoder.decode(record) for _, record in found])
        places = [(place,) for place, _ in found]
        database.execute("BEGIN IMMEDIATE")
        database.executemany("DELETE FROM requests WHERE place = ?", places)
        database.execute("COMMIT")


# What it costs.


async def load(journal: Any, at_a_time: int, seconds: float) -> list[float]:
    """What each end waited, in seconds."""
    waits: list[float] = []
    last = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < last:
            request = accepted()
            journal.accept(request)
            await asyncio.sleep(0)  # others begin, too: the end comes later than the beginning
            row = ended(request)
            began = time.perf_counter()
            await journal.end(row)
            waits.append(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(at_a_time)))
    return waits


def measure(kind: str, directory: Path, at_a_time: int, seconds: float) -> dict[str, float]:
    journal: Any = UsageJournal(directory) if kind == "journal" else SqliteJournal(directory)
    asyncio.run(load(journal, at_a_time, 0.2))
    before, began = time.process_time(), time.perf_counter()
    waits = sorted(asyncio.run(load(journal, at_a_time, seconds)))
    took, spent = time.perf_counter() - began, time.process_time() - before
    before = time.process_time()
    told = drain_journal(journal) if kind == "journal" else drain_sqlite(journal)
    drained = time.process_time() - before
    journal.close()
    return {
        "rows a second": len(waits) / took,
        "p50 ms": waits[len(waits) // 2] * 1e3,
        "p99 ms": waits[int(0.99 * (len(waits) - 1))] * 1e3,
        "processor µs a row": spent / len(waits) * 1e6,
        "read back, µs a row": drained / told * 1e6,
    }


# What is left.


def _serve(kind: str, directory: Path, pipe: Connection, at_once: int, then: int) -> None:
    """`then` requests end, and their ids are told; more are accepted, and end when the pipe says so."""
    journal: Any = UsageJournal(directory) if kind == "journal" else SqliteJournal(directory)

    async def end(requests: list[Accepted]) -> list[str]:
        rows = [ended(request) for request in requests]
        waiting = [asyncio.create_task(journal.end(row)) for row in rows]
        if waiting:
            await asyncio.wait(waiting, timeout=5)
        return [row.id for row, task in zip(rows, waiting, strict=True) if task.done()]

    promised: list[str] = []
    while len(promised) < then:
        batch = [accepted() for _ in range(25)]
        for request in batch:
            journal.accept(request)
        promised += asyncio.run(end(batch))
    running = [accepted() for _ in range(at_once)]
    for request in running:
        journal.accept(request)
    asyncio.run(asyncio.sleep(0.5))
    pipe.send(promised)
    pipe.recv()
    pipe.send(asyncio.run(end(running)))
    pipe.recv()


def served_and_killed(
    kind: str, directory: Path, between: Callable[[], None], *, at_once: int = 0, then: int = PROMISED
) -> tuple[set[str], set[str]]:
    """Of a process that is killed: the ids that ended before `between`, and those of requests that ran then and ended
    after it."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(kind, directory, there, at_once, then), daemon=True)
    process.start()
    promised = set(here.recv())
    between()
    here.send(None)
    late = set(here.recv())
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return promised, late


def kept(kind: str, directory: Path) -> Iterator[Ended]:
    """Raises sqlite3.DatabaseError."""
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(directory / "journal.db")) as database:
            for (record,) in database.execute("SELECT record FROM requests WHERE ended = 1"):
                yield msgspec.msgpack.decode(record, type=Ended)
        return
    (life,) = directory.iterdir()
    position: Position | None = Position(0, 0)
    while position is not None:
        records, position = read_records(life, position)
        yield from (record for record in records if isinstance(record, Ended))


def after_changed_bytes(kind: str, directory: Path) -> str:
    """One byte at a time, spread over what was written, on a copy of what a killed process left."""
    promised, _ = served_and_killed(kind, directory / "whole", lambda: None)
    files = sorted(
        path for path in (directory / "whole").rglob("*") if path.name[-4:] in ("ment", "-wal", "l.db")
    )
    whole = {path: path.read_bytes() for path in files}
    rows = {row.id: row for row in kept(kind, directory / "whole")}
    assert rows.keys() == promised
    lost, wrong, unreadable = [], 0, 0
    written = [(path, place) for path, data in whole.items() for place in range(len(data)) if data[place]]
    for path, place in written[:: len(written) // CHANGED_BYTES]:
        for file, data in whole.items():
            file.write_bytes(data)
        (directory / "whole" / "journal.db-shm").unlink(missing_ok=True)
        path.write_bytes(whole[path][:place] + bytes([whole[path][place] ^ 0x10]) + whole[path][place + 1 :])
        found = {}
        try:
            found = {row.id: row for row in kept(kind, directory / "whole")}
        except (sqlite3.DatabaseError, msgspec.MsgspecError):
            unreadable += 1
        wrong += any(rows.get(name) != row for name, row in found.items())
        lost.append(len(rows.keys() - found.keys()))
    return (
        f"of {len(rows)} rows one changed byte costs {statistics.median(lost):.0f} (median), {max(lost)} (most); "
        f"unreadable as a whole {unreadable} times of {len(lost)}, wrong rows believed {wrong} times"
    )


def after_a_full_disk(kind: str, directory: Path) -> str:
    with small_disk(directory / "disk", 24 << 20) as disk:
        where = disk.root / "usage"
        promised, late = served_and_killed(kind, where, lambda: disk.leave(0), at_once=4000, then=100)
        disk.empty()
        found = {row.id for row in kept(kind, where)}
    return (
        f"of 4000 requests that ran when the disk became full {len(late & found)} have their row; "
        f"{len((promised | late) - found)} of the promised are lost"
    )


def compare(root: Path, rounds: int, seconds: float) -> None:
    """Print both, in a folder that is empty."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"the journal, and one of SQLite {sqlite3.sqlite_version} (medians of {rounds} rounds):")
    for at_a_time in AT_A_TIME:
        measured: dict[str, list[dict[str, float]]] = {"journal": [], "sqlite": []}
        for turn in range(rounds):
            for kind in list(measured)[:: 1 if turn % 2 else -1]:
                place = root / f"{at_a_time}-{turn}-{kind}"
                measured[kind].append(measure(kind, place, at_a_time, seconds))
        for kind, found in measured.items():
            medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
            told = "; ".join(f"{name} {value:.2f}" for name, value in medians.items())
            print(f"  {at_a_time:3} at a time, {kind:8}{told}", flush=True)
    for kind in ("journal", "sqlite"):
        place = root / f"left-{kind}"
        place.mkdir()
        print(f"  {kind}, killed: {after_changed_bytes(kind, place)}", flush=True)
        print(f"  {kind}: {after_a_full_disk(kind, place)}", flush=True)
