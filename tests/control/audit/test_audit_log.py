"""Reading the audit log, and its rows of what was refused."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from loraplex.control.audit.log import MAX_REFUSALS, AuditFilter, AuditLog
from loraplex.control.audit.recorder import Actor
from loraplex.control.db import postgres
from loraplex.control.db.database import Database
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.rules import InvalidCursor
from support.control.audit import ACTOR, entries
from support.control.plane import ControlPlane, FakeClock


def refuse(log: AuditLog, by: Actor = ACTOR) -> None:
    log.note_refusal(by, "version.upload", "x", tenant_id=None, outcome="refused", code="too_large")


def test_rows_are_found_by_what_one_asks_for(plane: ControlPlane) -> None:
    began = datetime.now(UTC) - timedelta(seconds=1)
    plane.keys.create("acme", by=ACTOR)
    plane.keys.create("rival", by=Actor("admin"))
    AuditLog(plane.database).note_refusal(
        ACTOR,
        "key.create",
        "tenants/rival/keys",
        tenant_id="rival",
        outcome="refused",
        code="tenant_not_found",
    )
    plane.tenants.update("rival", {"weight": 2})
    assert [entry.seq for entry in entries(plane, tenant="acme")] == [
        1,
        3,
    ]  # also what its key tried elsewhere
    assert [entry.seq for entry in entries(plane, tenant="rival")] == [2, 3, 4]
    assert [entry.seq for entry in entries(plane, actor="admin")] == [2]
    assert [entry.seq for entry in entries(plane, actor="local")] == [4]
    assert [entry.seq for entry in entries(plane, actor=ACTOR.key_id)] == [1, 3]
    assert [entry.seq for entry in entries(plane, action="key.create")] == [1, 2, 3]
    assert [entry.seq for entry in entries(plane, action="key.create", outcome="done")] == [1, 2]
    middle = entries(plane)[1].time
    assert [entry.seq for entry in entries(plane, start=middle)] == [
        entry.seq for entry in entries(plane) if entry.time >= middle
    ]
    assert [entry.seq for entry in entries(plane, end=middle)] == [
        entry.seq for entry in entries(plane) if entry.time < middle
    ]
    assert entries(plane, end=began) == []


def test_pages_have_every_row_once_the_latest_first(plane: ControlPlane) -> None:
    for number in range(7):
        plane.tenants.create(f"t{number}")
    log, found, cursor = AuditLog(plane.database), [], None
    while True:
        page = log.list(AuditFilter(), limit=3, cursor=cursor)
        found += [entry.seq for entry in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [7, 6, 5, 4, 3, 2, 1]
    with pytest.raises(InvalidCursor):
        log.list(AuditFilter(), cursor="YQ==")


def test_a_log_that_takes_long_to_read_is_no_outage(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter that few rows pass reads through all of a long log, which takes longer than a reader may."""
    if not plane.database.on_postgres:
        pytest.skip("SQLite's readers wait for nothing")
    plane.tenants.create("new")
    patient = dict(postgres.READS)
    patience = next(name for name, value in patient.items() if value == postgres.READ_TIMEOUT_S)
    monkeypatch.setattr(postgres, "READS", patient | {patience: 0.2})
    database = Database(plane.url)
    locked, seen = threading.Event(), threading.Event()

    def hold() -> None:
        with plane.database.write() as session:
            session.execute(text("LOCK TABLE audit_log IN ACCESS EXCLUSIVE MODE"))
            locked.set()
            seen.wait(0.6)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert locked.wait(60)
        assert [entry.action for entry in AuditLog(database).list(AuditFilter()).items] == ["tenant.create"]
        database.outage.check()
    finally:
        seen.set()
        holder.join()
        database.close()


def test_repeated_refusals_do_not_fill_the_log(plane: ControlPlane) -> None:
    clock = FakeClock()
    log = AuditLog(plane.database, clock=clock)
    for _ in range(MAX_REFUSALS + 40):
        refuse(log)
    refuse(log, Actor("admin"))
    assert len(entries(plane)) == MAX_REFUSALS + 1
    clock.advance(60)
    refuse(log)
    refuse(log)
    assert [entry.after for entry in entries(plane)[-2:]] == [{"not_recorded": 40}, None]


def test_a_refusal_whose_row_could_not_be_written_is_counted(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(plane.database)

    def away(**_: Any) -> Any:
        raise DatabaseUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(plane.database, "write", away)
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                refuse(log)
    refuse(log)
    refuse(log)
    assert [entry.after for entry in entries(plane)] == [{"not_recorded": 3}, None]
