"""The database: one schema in two places, migrations that are all or none, writers that queue, secrets in files."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, select

from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.tables import Adapter, Base, Tenant
from loraplex.control.errors import Conflict
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.secrets import load_or_create, load_pepper, new_admin_token
from loraplex.migrations.errors import DatabaseTooNew
from loraplex.migrations.run import downgrade, upgrade
from support.control.migrating import migrate
from support.control.plane import PEPPER, ControlPlane
from support.servers.postgres import postgres_server


@pytest.fixture
def url(backend: str, tmp_path: Path) -> str:
    """A database without any table."""
    if backend == "postgresql":
        return postgres_server().create_database()
    return f"sqlite:///{tmp_path / 'a %20 name.db'}"


def tables(url: str) -> set[str]:
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_the_migrations_make_what_the_tables_say(url: str) -> None:
    upgrade(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_down_and_up_again_and_up_twice(url: str) -> None:
    upgrade(url)
    upgrade(url)
    assert set(Base.metadata.tables) < tables(url)
    downgrade(url, "base")
    assert tables(url) == {"alembic_version"}
    upgrade(url)
    assert set(Base.metadata.tables) < tables(url)


@pytest.mark.parametrize("before", [None, 0o644])
def test_a_sqlite_file_and_those_beside_it_are_the_owners_alone(
    tmp_path: Path, usual_umask: None, before: int | None
) -> None:
    """Also one that an older version has made readable for all."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    url = f"sqlite:///{folder / 'loraplex.db'}"
    if before is not None:
        (folder / "loraplex.db").touch()
        (folder / "loraplex.db").chmod(before)
    upgrade(url)
    database = Database(url)
    with database.write() as session:
        session.add(Tenant(id="acme", display_name="", weight=1.0, limits={}, created_at=utc_now()))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    database.close()
    assert modes == dict.fromkeys(("loraplex.db", "loraplex.db-wal", "loraplex.db-shm"), 0o600)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_data_survives_a_start(url: str) -> None:
    upgrade(url)
    database = Database(url)
    with database.write() as session:
        session.add(Tenant(id="acme", weight=1.0, limits={}, created_at=utc_now()))
    database.close()
    upgrade(url)
    database = Database(url)
    with database.read() as session:
        assert session.get(Tenant, "acme") is not None
    database.close()


def test_a_migration_that_breaks_off_has_changed_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = op.create_table, 0

    def third_fails(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("power cut")
        return real(*args, **options)

    monkeypatch.setattr(op, "create_table", third_fails)
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(url)
    assert tables(url) == set()
    monkeypatch.undo()
    upgrade(url)
    assert set(Base.metadata.tables) < tables(url)


def test_one_of_several_concurrent_starts_migrates(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    together, applied = context.Barrier(4), context.Queue()
    starts = [context.Process(target=migrate, args=(url, together, applied)) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(60)
    assert [start.exitcode for start in starts] == [0, 0, 0, 0]
    done = sorted(applied.get(timeout=60) for _ in starts)
    assert done[:3] == [[], [], []]
    assert done[3][0] == "0001"
    assert set(Base.metadata.tables) < tables(url)


def test_a_schema_of_a_newer_version_is_left_alone(url: str) -> None:
    upgrade(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'x9'")
    engine.dispose()
    calls: list[Callable[[], Any]] = [lambda: upgrade(url), lambda: downgrade(url, "base")]
    for call in calls:
        with pytest.raises(DatabaseTooNew, match=r"the schema 'x9'.* a newer version has used it"):
            call()
    assert set(Base.metadata.tables) < tables(url)


def test_down_one_step_keeps_the_data(url: str) -> None:
    upgrade(url)
    database = Database(url)
    with database.write() as session:
        session.add(Tenant(id="acme", weight=1.0, limits={}, created_at=utc_now()))
    _, secret = Keys(database, PEPPER).create("acme", name="kept")
    downgrade(url, "0001")
    assert upgrade(url)[0] == "0002"
    assert [info.name for info in Keys(database, PEPPER).list("acme").items] == ["kept"]
    cache = KeyCache(database, PEPPER, "admin")
    assert asyncio.run(cache.authenticate(secret)).tenant_id == "acme"
    database.close()


def test_writers_that_read_first_queue_up(plane: ControlPlane) -> None:
    plane.tenants.create("counter", weight=1.0)
    together = threading.Barrier(8)

    def count() -> None:
        together.wait()
        for _ in range(10):
            with plane.database.write() as session:
                row = session.get(Tenant, "counter")
                assert row is not None
                row.weight += 1

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(count) for _ in range(8)]:
            done.result()
    assert plane.tenants.get("counter").weight == 81


def test_readers_see_what_is_committed_and_wait_for_nobody(plane: ControlPlane) -> None:
    with plane.database.write() as session:
        row = session.get(Tenant, "acme")
        assert row is not None
        row.weight = 5.0
        session.flush()
        assert plane.tenants.get("acme").weight == 1.0
    assert plane.tenants.get("acme").weight == 5.0


def test_a_reader_sees_one_state_however_many_statements_it_has(plane: ControlPlane) -> None:
    with plane.database.read() as session:
        weights = select(Tenant.weight).where(Tenant.id == "acme")
        assert session.scalars(weights).one() == 1.0
        plane.tenants.update("acme", {"weight": 5})
        assert session.scalars(weights).one() == 1.0
    assert plane.tenants.get("acme").weight == 5.0


def test_a_failed_write_changes_nothing_and_ages_no_cache(plane: ControlPlane) -> None:
    before = plane.database.revision
    with pytest.raises(ZeroDivisionError), plane.database.write() as session:
        session.add(Tenant(id="half", weight=1.0, limits={}, created_at=utc_now()))
        session.flush()
        raise ZeroDivisionError
    assert plane.database.revision == before
    with plane.database.read() as session:
        assert session.get(Tenant, "half") is None


def test_references_are_kept(plane: ControlPlane) -> None:
    with pytest.raises(Conflict), plane.database.write() as session:
        session.add(Adapter(tenant_id="nobody", name="x", last_number=0, created_at=utc_now()))


def test_times_are_utc_whatever_zone_they_came_in(plane: ControlPlane) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    with plane.database.write() as session:
        session.add(Tenant(id="zoned", weight=1.0, limits={}, created_at=noon))
    with plane.database.read() as session:
        kept = session.scalars(select(Tenant.created_at).where(Tenant.id == "zoned")).one()
    assert kept == noon
    assert kept.tzinfo is UTC


def test_a_secret_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "admin-token"
    together = threading.Barrier(6)

    def start() -> tuple[str, bool]:
        together.wait()
        return load_or_create(path, new_admin_token())

    with ThreadPoolExecutor(6) as pool:
        results = [made.result() for made in [pool.submit(start) for _ in range(6)]]
    assert len({token for token, _ in results}) == 1
    assert [created for _, created in results].count(True) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["admin-token"]
    assert load_or_create(path, "other") == (results[0][0], False)


def test_the_pepper_stays_the_same(tmp_path: Path) -> None:
    pepper = load_pepper(tmp_path)
    assert len(pepper) == 32
    assert load_pepper(tmp_path) == pepper
    assert load_pepper(tmp_path / "elsewhere") != pepper
