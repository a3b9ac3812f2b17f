"""The database goes away and comes back: refused, hanging, in the middle of a transaction. No caller hangs, no known
key stops working, no unknown key is called wrong, and nothing that was committed is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import structlog.testing
from sqlalchemy import create_engine, text

from loraplex.control.db.database import Database
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.errors import (
    Conflict,
    ControlError,
    DatabaseBusy,
    DatabaseDenied,
    DatabaseUnavailable,
    InvalidKey,
    TenantNotFound,
)
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.types import Principal
from loraplex.migrations.run import upgrade
from support.control.plane import ADMIN_TOKEN, ControlPlane, caller, use_database
from support.faults.tcp_proxy import TcpProxy
from support.servers.postgres import PostgresServer, need_programs
from support.waiting import eventually

NO_CALL_TAKES_LONGER_S = 15


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that these tests may kill."""
    need_programs()
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def proxy(own_server: PostgresServer) -> Iterator[TcpProxy]:
    with TcpProxy(own_server.port) as proxy:
        yield proxy


@pytest.fixture
def plane(own_server: PostgresServer, proxy: TcpProxy, tmp_path: Path) -> Iterator[ControlPlane]:
    """Its database is behind the proxy."""
    direct = own_server.create_database()
    upgrade(direct)
    use_database(tmp_path, own_server.url(direct.rpartition("/")[2], port=proxy.port))
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme")
    yield plane
    plane.close()


Break = Callable[[], None]


@pytest.fixture(params=["killed", pytest.param("hanging", marks=pytest.mark.slow)])
def outage(
    request: pytest.FixtureRequest, own_server: PostgresServer, proxy: TcpProxy
) -> Iterator[tuple[Break, Break]]:
    """How the database goes, and how it comes back."""
    kill, start = own_server.kill, own_server.start
    yield (kill, start) if request.param == "killed" else (proxy.hang, proxy.carry)
    if not own_server.running:
        own_server.start()


def who(cache: KeyCache, secret: str) -> Principal:
    return asyncio.run(cache.authenticate(secret))


def until_back(plane: ControlPlane) -> None:
    eventually(lambda: plane.database.outage.seconds is None, timeout=60)


def test_known_keys_and_adapters_serve_and_others_are_told_to_wait(
    plane: ControlPlane, outage: tuple[Break, Break]
) -> None:
    lose, restore = outage
    version = plane.add("acme", "pirate")
    info, secret = plane.keys.create("acme")
    _, unused = plane.keys.create("acme")
    cache = plane.key_cache(staleness_s=300)
    known = who(cache, secret)
    asyncio.run(plane.resolver.resolve(caller("acme"), "pirate"))
    asyncio.run(plane.resolver.list_models(caller("acme")))

    lose()
    plane.clock.advance(60)  # what is remembered is older than it may be while the database answers
    began = time.monotonic()
    assert who(cache, secret) == known
    assert time.monotonic() - began < NO_CALL_TAKES_LONGER_S
    assert plane.database.outage.seconds is not None
    resolved = asyncio.run(plane.resolver.resolve(caller("acme"), "pirate"))
    assert resolved.adapter == version.ref()
    assert [card.id for card in asyncio.run(plane.resolver.list_models(caller("acme")))][1:] == ["pirate"]
    refused: list[Callable[[], object]] = [
        lambda: who(cache, unused),
        lambda: who(cache, "lpx_00_guess"),
        lambda: asyncio.run(plane.resolver.resolve(caller("rival"), "pirate")),
        lambda: asyncio.run(plane.resolver.resolve(caller("acme"), "unused")),
        lambda: asyncio.run(plane.resolver.list_models(caller("rival"))),
        lambda: plane.tenants.create("other"),
        lambda: plane.tenants.get("acme"),
        lambda: plane.keys.revoke("acme", info.id),
        lambda: plane.add("acme", "late", seed=5),
    ]
    for call in refused:
        with pytest.raises(DatabaseUnavailable) as caught:
            call()
        assert caught.value.retry_after_s > 0
    with pytest.raises(InvalidKey):
        who(cache, "no key at all")
    assert who(cache, ADMIN_TOKEN).is_admin
    plane.clock.advance(241)
    assert who(cache, secret) == known
    plane.clock.advance(2)
    with pytest.raises(DatabaseUnavailable):  # beyond 302 s, and still not "invalid"
        who(cache, secret)

    restore()
    until_back(plane)
    assert who(cache, secret) == known
    assert who(cache, unused).key_id is not None
    with pytest.raises(InvalidKey):
        who(cache, "lpx_00_guess")
    plane.tenants.create("other")
    assert plane.keys.get("acme", info.id).revoked_at is None
    assert plane.catalog.get_version("acme", "pirate", "v1") == version
    plane.start()
    plane.check_integrity()


def test_a_key_that_was_revoked_here_does_not_come_back_with_an_outage(
    plane: ControlPlane, own_server: PostgresServer
) -> None:
    """Nor one that was rotated, nor those of a tenant that was deleted: this process knows better than its memory."""
    plane.tenants.create("gone")
    revoked, first = plane.keys.create("acme")
    rotated, second = plane.keys.create("acme")
    _, third = plane.keys.create("gone")
    _, kept = plane.keys.create("acme")
    cache = plane.key_cache()
    for secret in (first, second, third, kept):
        who(cache, secret)
    plane.keys.revoke("acme", revoked.id)
    plane.keys.rotate("acme", rotated.id)
    plane.tenants.delete("gone")
    own_server.kill()
    try:
        for secret in (first, second, third):
            with pytest.raises(DatabaseUnavailable):
                who(cache, secret)
        assert who(cache, kept).tenant_id == "acme"
    finally:
        own_server.start()
    until_back(plane)
    for secret in (first, second, third):
        with pytest.raises(InvalidKey):
            who(cache, secret)


def test_expiry_goes_on_while_the_database_is_gone(plane: ControlPlane, own_server: PostgresServer) -> None:
    info, first = plane.keys.create("acme")
    cache = plane.key_cache()
    plane.keys.rotate("acme", info.id, grace_seconds=100)
    who(cache, first)
    own_server.kill()
    try:
        plane.clock.advance(90)
        who(cache, first)
        plane.clock.advance(15)
        with pytest.raises(InvalidKey):
            who(cache, first)
    finally:
        own_server.start()


@pytest.mark.slow
def test_after_the_first_nobody_waits_for_a_time_out(plane: ControlPlane, proxy: TcpProxy) -> None:
    plane.tenants.list()
    proxy.hang()
    with pytest.raises(DatabaseUnavailable):
        plane.tenants.list()
    began = time.monotonic()
    for _ in range(200):
        with pytest.raises(DatabaseUnavailable):
            plane.tenants.list()
    assert time.monotonic() - began < 30  # each by itself would be 2 s and more
    proxy.carry()
    until_back(plane)
    assert [tenant.id for tenant in plane.tenants.list().items] == ["acme"]


def test_a_transaction_whose_server_dies_has_changed_nothing(
    plane: ControlPlane, own_server: PostgresServer
) -> None:
    revision = plane.database.revision
    with pytest.raises(DatabaseUnavailable), plane.database.write() as session:
        session.execute(text("UPDATE tenants SET weight = 7"))
        own_server.kill()
        session.execute(text("SELECT 1"))
    assert plane.database.revision == revision
    own_server.start()
    until_back(plane)
    assert plane.tenants.get("acme").weight == 1.0
    with pytest.raises(DatabaseUnavailable), plane.database.write() as session:
        session.execute(text("UPDATE tenants SET weight = 7"))
        own_server.kill()  # it is the commit that finds nobody
    own_server.start()
    until_back(plane)
    assert plane.tenants.get("acme").weight == 1.0


def test_uses_are_kept_until_they_can_be_written(plane: ControlPlane, own_server: PostgresServer) -> None:
    info, secret = plane.keys.create("acme")
    use = KeyUse(plane.database, clock=plane.clock)
    cache = plane.key_cache(on_use=use.note)
    who(cache, secret)
    own_server.kill()
    try:
        with pytest.raises(DatabaseUnavailable):
            use.flush()
        assert use.num_pending == 1
        plane.clock.advance(40)
    finally:
        own_server.start()
    until_back(plane)
    assert use.flush() == 1
    shown = plane.keys.get("acme", info.id)
    assert shown.last_used_at is not None
    assert 10 <= (shown.created_at - shown.last_used_at).total_seconds() <= 40
    assert use.num_pending == 0


def test_a_lock_that_is_never_given_back_is_a_503(plane: ControlPlane) -> None:
    """A second server hangs while it writes. PostgreSQL's lock_timeout is shortened for the test."""
    impatient = Database(plane.url + "?options=-clock_timeout%3D200")
    with plane.database.write():
        with pytest.raises(DatabaseBusy), impatient.write():
            pass
        with impatient.read() as session:
            assert session.execute(text("SELECT count(*) FROM tenants")).scalar() == 1
    assert impatient.outage.seconds is None
    impatient.close()


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("40001", DatabaseBusy),
        ("40P01", DatabaseBusy),
        ("57014", DatabaseBusy),
        ("55P03", DatabaseBusy),
        ("53300", DatabaseUnavailable),
        ("57P03", DatabaseUnavailable),
        ("23505", Conflict),
        ("23503", Conflict),
    ],
)
def test_database_errors_become_answers(plane: ControlPlane, state: str, meaning: type[ControlError]) -> None:
    with pytest.raises(meaning), plane.database.write() as session:
        session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'as if' USING ERRCODE = '{state}'; END $$"))
    until_back(plane)


def test_a_missing_grant_is_told_to_the_operator(plane: ControlPlane) -> None:
    """Once a minute, however many ask; it is no outage."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(DatabaseDenied) as refused, plane.database.write() as session:
                session.execute(text("CREATE ROLE stranger"))
                session.execute(text("SET LOCAL ROLE stranger"))
                session.execute(text("DELETE FROM tenants"))
    assert (refused.value.code, refused.value.retry_after_s) == ("database_unavailable", 30)
    (told,) = logs
    assert (told["event"], told["statement"]) == ("database_denied", "DELETE")
    assert told["reason"] == "permission denied for table tenants"
    assert plane.database.outage.seconds is None


def test_deadlocked_transactions_end_and_one_of_them_succeeds(plane: ControlPlane) -> None:
    """Ours cannot, as writers queue up. An operator's own script may do it to us."""
    plane.tenants.create("rival")
    script = create_engine(plane.url)
    held = threading.Event()
    results: list[object] = []

    def operator() -> None:
        with script.connect() as connection:
            connection.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
            connection.execute(text("UPDATE tenants SET weight = 2 WHERE id = 'rival'"))
            held.set()
            try:
                connection.execute(text("UPDATE tenants SET weight = 2 WHERE id = 'acme'"))
                connection.commit()
                results.append("script")
            except Exception as error:
                results.append(error)

    thread = threading.Thread(target=operator)
    try:
        with plane.database.write() as session:
            session.execute(text("SET LOCAL deadlock_timeout = '50ms'"))
            session.execute(text("UPDATE tenants SET weight = 3 WHERE id = 'acme'"))
            thread.start()
            held.wait(60)
            session.execute(text("UPDATE tenants SET weight = 3 WHERE id = 'rival'"))
        results.append("server")
    except DatabaseBusy as error:
        results.append(error)
    thread.join(60)
    assert sum(isinstance(result, str) for result in results) == 1
    script.dispose()
    with pytest.raises(TenantNotFound):
        plane.tenants.get("nobody")


def test_probes_report_the_outage(plane: ControlPlane, own_server: PostgresServer) -> None:
    health = DatabaseHealth(plane.database.outage, 0.5)
    assert (health.warning(), health.failure(), health.outage_s) == (None, None, 0.0)
    own_server.kill()
    try:
        with structlog.testing.capture_logs() as logs, pytest.raises(DatabaseUnavailable):
            plane.database.check()
        assert [line["event"] for line in logs] == ["database_lost"]
        assert health.warning() is not None
        eventually(lambda: health.failure() is not None, timeout=60)
    finally:
        own_server.start()
    until_back(plane)
    assert (health.warning(), health.failure()) == (None, None)
