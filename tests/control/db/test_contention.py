"""Many at once: opening a new database, and requests beside writers that wait for each other."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.control.db import postgres_engine, sqlite
from loraplex.control.db.database import MAX_THREADS, Database, utc_now
from loraplex.control.db.tables import Tenant
from loraplex.control.errors import DatabaseBusy
from loraplex.control.types import Principal
from loraplex.migrations.run import upgrade
from support.control.plane import ControlPlane, caller


@contextlib.contextmanager
def write_lock(plane: ControlPlane) -> Iterator[None]:
    """Another server that writes."""
    other = Database(plane.url)
    with other.write():
        yield
    other.close()


async def test_requests_are_known_and_resolved_while_every_writer_waits(plane: ControlPlane) -> None:
    info = plane.add("acme", "pirate")
    _, secret = plane.keys.create("acme")
    cache = plane.key_cache()

    async def request() -> Principal:
        await plane.resolver.resolve(caller("acme"), "pirate")
        return await cache.authenticate(secret)

    with write_lock(plane):
        writers = [
            asyncio.create_task(plane.database.run(plane.tenants.create, f"t{number}"))
            for number in range(2 * MAX_THREADS)
        ]
        for _ in range(3):
            plane.clock.advance(60)  # nothing is remembered
            principal = await asyncio.wait_for(request(), 60)
            assert principal.tenant_id == info.tenant_id
        assert not any(writer.done() for writer in writers)
    await asyncio.gather(*writers)
    assert len(plane.tenants.list().items) == 2 + 2 * MAX_THREADS


def test_a_write_that_waits_too_long_is_told_to_come_again(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(postgres_engine, "LOCK_TIMEOUT_S", 0.1)
    hurried = ControlPlane(plane.root)
    with write_lock(plane):
        for _ in range(2):
            with pytest.raises(DatabaseBusy) as caught:
                hurried.tenants.create("late")
            assert (caught.value.code, caught.value.retry_after_s) == ("server_overloaded", 2.0)
        assert hurried.database.outage.seconds is None
        assert hurried.tenants.get("acme").id == "acme"
    hurried.tenants.create("late")
    hurried.close()


def test_a_new_file_can_be_opened_while_another_writes(tmp_path: Path) -> None:
    """SQLite has no patience with the change to WAL."""
    path = tmp_path / "new.db"
    upgrade(f"sqlite:///{path}")
    writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN IMMEDIATE")
    done = threading.Timer(0.3, writer.commit)
    done.start()
    database = Database(f"sqlite:///{path}")
    with database.write() as session:
        session.add(Tenant(id="acme", weight=1.0, limits={}, created_at=utc_now()))
    done.join()
    writer.close()
    database.close()


def test_a_new_file_can_be_opened_by_many_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    upgrade(url)
    together = threading.Barrier(8)

    def start(number: int) -> None:
        database = Database(url)
        together.wait()
        with database.write() as session:
            session.add(Tenant(id=f"t{number}", weight=1.0, limits={}, created_at=utc_now()))
        database.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    database = Database(url)
    with database.read() as session:
        assert session.query(Tenant).count() == 8
        assert session.connection().exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    database.close()
