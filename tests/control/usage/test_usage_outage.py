"""A real PostgreSQL server is killed, hangs and comes back while requests end: none waits for it, and no row is lost or
doubled."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from loraplex.control.db.database import Database
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.records import Ended
from loraplex.control.usage.writer import UsageWriter
from loraplex.migrations.run import upgrade
from support.control.usage import accepted, by_id, ended, rows_of
from support.faults.tcp_proxy import TcpProxy
from support.servers.postgres import PostgresServer, need_programs

BATCH = 25
ADDED_S = 0.06
NO_HANG_S = 1.0


class Traffic:
    """Requests that end in batches, and how long each waited for its end to be recorded, by whether the database was
    away."""

    def __init__(self, journal: UsageJournal) -> None:
        self.rows: list[Ended] = []
        self.away = False
        self.waits: dict[bool, list[float]] = {False: [], True: []}
        self._journal = journal

    async def one(self) -> None:
        request = accepted()
        self._journal.accept(request)
        row = ended(request)
        began = time.monotonic()
        await self._journal.end(row)
        self.waits[self.away].append(time.monotonic() - began)
        self.rows.append(row)

    async def run(self, count: int) -> None:
        for _ in range(0, count, BATCH):
            await asyncio.gather(*(self.one() for _ in range(BATCH)))

    def percentile(self, away: bool, part: float) -> float:
        ordered = sorted(self.waits[away])
        return ordered[int(part * (len(ordered) - 1))]


async def drill(
    server: PostgresServer, proxy: TcpProxy, directory: Path, *, outages: int, rows: int
) -> Traffic:
    """A number of outages of either kind, with a number of rows in each and between."""
    direct = server.create_database()
    upgrade(direct)
    database = Database(server.url(direct.rpartition("/")[2], port=proxy.port))
    journal = UsageJournal(directory)
    writer = UsageWriter(database, directory, journal)
    writing = asyncio.create_task(writer.run())
    traffic, chance = Traffic(journal), random.Random(outages)
    most = 0
    for number in range(outages):
        await traffic.run(rows)
        await asyncio.sleep(chance.random() * 0.3)  # anywhere in what the writer does
        (server.kill if number % 2 == 0 else proxy.hang)()
        traffic.away = True
        await traffic.run(rows)
        traffic.away = False
        most = max(most, writer.num_waiting)
        if number % 2 == 0:
            await asyncio.to_thread(server.start)
        else:
            proxy.carry()
    await traffic.run(rows)
    end = time.monotonic() + 60
    while writer.num_waiting:
        assert time.monotonic() < end, "the database was never told"
        await asyncio.sleep(0.05)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    journal.close()
    writer.close()
    found = rows_of(database)
    database.close()
    assert found == by_id(traffic.rows)
    assert list(directory.iterdir()) == []
    print(f"\n{outages} outages, {len(traffic.rows)} rows, up to {most} waiting: 0 lost, 0 doubled")
    for away, when in ((True, "while the database was away"), (False, "while it was there")):
        median, p99, longest = (traffic.percentile(away, part) * 1e3 for part in (0.5, 0.99, 1))
        print(
            f"an end waited {when}: {median:.1f} ms (median), {p99:.1f} ms (99%), {longest:.1f} ms (longest)"
        )
    return traffic


@pytest.mark.slow
async def test_outages_of_postgresql(tmp_path: Path) -> None:
    need_programs()
    server = PostgresServer()
    try:
        with TcpProxy(server.port) as proxy:
            await drill(server, proxy, tmp_path / "usage", outages=2, rows=500)
    finally:
        server.close()


@pytest.mark.soak
async def test_many_outages_of_postgresql(tmp_path: Path) -> None:
    need_programs()
    server = PostgresServer()
    try:
        with TcpProxy(server.port) as proxy:
            traffic = await drill(server, proxy, tmp_path / "usage", outages=20, rows=2000)
        assert traffic.percentile(True, 1) < NO_HANG_S
        assert traffic.percentile(True, 0.99) - traffic.percentile(False, 0.99) <= ADDED_S
    finally:
        server.close()


@pytest.mark.soak
async def test_an_hour_without_a_database(tmp_path: Path) -> None:
    """An hour's requests at 100 a second, as fast as they go, within the default size of the journal."""
    database = Database(f"sqlite:///{tmp_path / 'control.db'}")
    journal = UsageJournal(tmp_path / "usage")
    traffic = Traffic(journal)
    began = time.monotonic()
    for _ in range(0, 360_000, 250):
        await asyncio.gather(*(traffic.one() for _ in range(250)))
    taken = time.monotonic() - began
    num_bytes = journal.num_bytes
    upgrade(f"sqlite:///{tmp_path / 'control.db'}")  # here it comes
    writer = UsageWriter(database, tmp_path / "usage", journal)
    began = time.monotonic()
    while await database.run(writer.write_some):
        pass
    told = time.monotonic() - began
    journal.close()
    writer.close()
    assert rows_of(database) == by_id(traffic.rows)
    database.close()
    print(
        f"\n360000 rows in {num_bytes >> 20} MiB, taken in {taken:.0f} s, told in {told:.0f} s: 0 lost, 0 doubled"
    )
