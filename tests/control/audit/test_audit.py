"""The audit log: a row for each change, in its transaction; no secrets; nothing is changed afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.audit.log import ERASED, AuditEntry, AuditLog
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.audit.verification import Anchor, verify
from loraplex.control.db.tables import AuditHead, AuditRow, AuditText, Base
from loraplex.control.errors import Conflict, ControlError, DatabaseUnavailable
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.tenancy.pepper import check_pepper
from support.control.audit import ACTOR, entries
from support.control.plane import ADMIN_TOKEN, PEPPER, ControlPlane, use_database
from support.servers.postgres import need_programs, postgres_server


def last(plane: ControlPlane) -> AuditEntry:
    return entries(plane)[-1]


def everything(plane: ControlPlane) -> str:
    """All that the log's tables hold."""
    with plane.database.read() as session:
        tables = [AuditRow.__table__, AuditText.__table__, AuditHead.__table__]
        return "\n".join(str(tuple(row)) for table in tables for row in session.execute(select(table)))


# What is recorded.


def test_a_tenants_life(plane: ControlPlane) -> None:
    plane.tenants.create("new", display_name="New ✓", weight=2, limits={"max_adapters": 3}, by=ACTOR)
    made = last(plane)
    assert made.by == ACTOR
    assert (made.action, made.tenant_id, made.target) == ("tenant.create", "new", "tenants/new")
    assert (made.outcome, made.code, made.before) == ("done", None, None)
    assert made.after is not None
    assert (made.after["display_name"], made.after["weight"]) == ("New ✓", 2.0)
    assert made.after["limits"]["max_adapters"] == 3
    assert abs(datetime.now(UTC) - made.time) < timedelta(minutes=1)
    plane.tenants.update("new", {"weight": 3, "display_name": None}, by=ACTOR)
    changed = last(plane)
    assert changed.action == "tenant.update"
    assert changed.before is not None
    assert changed.after is not None
    assert (changed.before["weight"], changed.after["weight"]) == (2.0, 3.0)
    assert (changed.before["display_name"], changed.after["display_name"]) == ("New ✓", None)
    plane.tenants.delete("new")
    gone = last(plane)
    assert (gone.action, gone.by, gone.tenant_id) == ("tenant.delete", LOCAL, "new")


def test_a_keys_life(plane: ControlPlane) -> None:
    info, _ = plane.keys.create("acme", name="ci", scopes=["adapters:read"], by=ACTOR)
    made = last(plane)
    assert (made.action, made.target) == ("key.create", f"tenants/acme/keys/{info.id}")
    assert made.after is not None
    assert (made.after["name"], made.after["scopes"]) == ("ci", ["adapters:read"])
    plane.keys.update("acme", info.id, {"name": None, "limits": {"max_concurrency": 2}}, by=ACTOR)
    changed = last(plane)
    assert (changed.action, changed.target, changed.by) == ("key.update", made.target, ACTOR)
    assert changed.before == made.after
    assert changed.after == {
        **made.after,
        "name": None,
        "limits": {**made.after["limits"], "max_concurrency": 2},
    }
    rotated, _ = plane.keys.rotate("acme", info.id, grace_seconds=60, by=ACTOR)
    assert rotated.previous_valid_until is not None
    assert last(plane).after == {"previous_valid_until": rotated.previous_valid_until.isoformat()}
    revoked = plane.keys.revoke("acme", info.id, by=ACTOR)
    assert revoked.revoked_at is not None
    assert (last(plane).action, last(plane).before) == ("key.revoke", {"revoked_at": None})
    assert last(plane).after == {"revoked_at": revoked.revoked_at.isoformat()}


def test_an_adapters_life(plane: ControlPlane) -> None:
    first, second = plane.add("acme", "pirate", 1), plane.add("acme", "pirate", 2)
    uploaded = last(plane)
    assert (uploaded.action, uploaded.target) == ("version.upload", "tenants/acme/adapters/pirate/versions")
    assert uploaded.after is not None
    assert (uploaded.after["version"], uploaded.after["digest"]) == ("v2", second.digest)
    assert uploaded.after["release"]["targets"] == [{"version": "v1", "weight": 100}]
    plane.add("acme", "pirate", 2)
    again = last(plane).after
    assert again is not None
    assert (again["version"], again["is_new"]) == ("v2", False)
    plane.releases.put("acme", "pirate", [ReleaseTarget("v1", 9), ReleaseTarget("v2", 1)], sticky="user")
    assert last(plane).target == "tenants/acme/adapters/pirate/release"
    plane.releases.promote("acme", "pirate", "v2")
    plane.releases.rollback("acme", "pirate")
    steps = [(entry.action, entry.before, entry.after) for entry in entries(plane)[-3:]]
    assert [action for action, _, _ in steps] == ["release.set", "release.promote", "release.rollback"]
    assert steps[0][2] == steps[1][1]
    assert steps[1][2] == steps[2][1]
    assert steps[2][2] is not None
    assert steps[2][2]["targets"] == [{"version": "v1", "weight": 9}, {"version": "v2", "weight": 1}]
    plane.catalog.set_pin("acme", "pirate", "v1", True)
    plane.catalog.set_pin("acme", "pirate", "v1", False)
    pins = [(entry.action, entry.before, entry.after) for entry in entries(plane)[-2:]]
    assert pins == [
        ("version.pin", {"pinned": False}, {"pinned": True}),
        ("version.unpin", {"pinned": True}, {"pinned": False}),
    ]
    plane.releases.promote("acme", "pirate", "v1")
    plane.catalog.delete_version("acme", "pirate", "v2")
    deleted = last(plane)
    assert (deleted.action, deleted.target) == (
        "version.delete",
        "tenants/acme/adapters/pirate/versions/v2",
    )
    assert deleted.before is not None
    assert (deleted.before["digest"], deleted.before["released"]) == (second.digest, False)
    plane.catalog.delete_adapter("acme", "pirate")
    assert last(plane).action == "adapter.delete"
    assert last(plane).before == {
        "versions": {"v1": first.digest},
        "release": {
            "revision": 5,
            "targets": [{"version": "v1", "weight": 100}],
            "sticky": "user",
        },
    }
    plane.check_integrity()


def test_taking_a_new_pepper(plane: ControlPlane) -> None:
    check_pepper(plane.database, PEPPER)
    assert entries(plane) == []
    check_pepper(plane.database, b"x" * 32, accept=True)
    assert last(plane).action == "pepper.accept"


def test_refusal_by_a_rule_changes_neither_rows_nor_log(plane: ControlPlane) -> None:
    plane.add("acme", "pirate")
    before = everything(plane)
    calls: list[Callable[[], Any]] = [
        lambda: plane.tenants.create("acme"),
        lambda: plane.tenants.update("acme", {"weight": -1}),
        lambda: plane.keys.revoke("acme", "nokey"),
        lambda: plane.releases.promote("acme", "pirate", "v9"),
        lambda: plane.catalog.set_pin("acme", "pirate", "v9", True),
    ]
    for call in calls:
        with pytest.raises(ControlError):
            call()
    assert everything(plane) == before


@pytest.mark.parametrize("step", [FaultPoint.COMMIT_VERSION, FaultPoint.COMMIT_REMOVAL])
def test_no_row_without_its_change(
    plane: ControlPlane, step: FaultPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction breaks off after the row was written and before it is committed."""
    plane.add("acme", "pirate", 1)
    before = everything(plane)

    def fault(now: FaultPoint, *_: object) -> None:
        if now is step:
            raise DatabaseUnavailable

    monkeypatch.setattr(plane.store, "fault", fault)
    with pytest.raises(DatabaseUnavailable):
        if step is FaultPoint.COMMIT_VERSION:
            plane.add("acme", "pirate", 2)
        else:
            plane.tenants.delete("acme")
    monkeypatch.undo()
    assert everything(plane) == before
    plane.check_integrity()


def test_no_secret_gets_into_the_log(plane: ControlPlane) -> None:
    info, first = plane.keys.create("acme", name="ci")
    _, second = plane.keys.rotate("acme", info.id, grace_seconds=60)
    # A caller that confuses the fields sends a secret where a name belongs.
    plane.keys.create("acme", name=f"was {first}", models=[second], by=Actor("admin", request_id=first))
    plane.tenants.update("acme", {"display_name": f"token {ADMIN_TOKEN}"})
    AuditLog(plane.database).note_refusal(
        Actor("admin"),
        "key.revoke",
        f"tenants/acme/keys/{second}",
        tenant_id="acme",
        outcome="refused",
        code="x",
    )
    kept = everything(plane)
    with plane.database.read() as session:
        hashes = [
            value
            for row in session.execute(text("SELECT secret_hash, previous_hash FROM api_keys"))
            for value in row
        ]
    for secret in (first, second, ADMIN_TOKEN, PEPPER.hex(), *filter(None, hashes)):
        assert secret not in kept
    assert f"tenants/acme/keys/lpx_{info.id}_***" in kept
    assert "token lpx-admin-***" in kept


# Append-only.


def test_the_database_refuses_what_is_no_next_row(plane: ControlPlane) -> None:
    for name in ("one", "two"):
        plane.tenants.create(name, display_name="Name")
    before = everything(plane)
    columns = ", ".join(column.name for column in AuditRow.__table__.columns)
    copied = columns.replace("seq", "seq + {0}", 1)
    statements = [
        "UPDATE audit_log SET target = 'x'",
        "UPDATE audit_log SET hash = hash WHERE seq = 2",
        "DELETE FROM audit_log WHERE seq = 2",
        f"INSERT INTO audit_log ({columns}) SELECT {copied.format(2)} FROM audit_log WHERE seq = 2",
        f"INSERT INTO audit_log ({columns}) SELECT {copied.format(-2)} FROM audit_log WHERE seq = 1",
        "UPDATE audit_head SET seq = 1",
        "UPDATE audit_head SET hash = 'x'",
        "UPDATE audit_head SET id = 2, seq = 3",
        "DELETE FROM audit_head",
        "INSERT INTO audit_head (id, seq, hash) VALUES (2, 0, 'x')",
        "UPDATE audit_texts SET text = 'x'",
    ]
    if plane.database.on_postgres:
        statements += ["TRUNCATE audit_log", "TRUNCATE audit_head"]
    else:
        statements += [f"REPLACE INTO audit_log ({columns}) SELECT {columns} FROM audit_log WHERE seq = 1"]
    for statement in statements:
        with pytest.raises((DBAPIError, Conflict)), plane.database.write() as session:
            session.execute(text(statement))
    assert everything(plane) == before
    assert verify(plane.database).whole


def test_no_statement_of_ours_changes_the_log() -> None:
    """Only appending, and erasing texts with their tenant."""
    roots = [Path(__file__).parents[3] / root / "loraplex" for root in ("admin", "server")]
    for path in (path for root in roots for path in root.rglob("*.py")):
        code = path.read_text()
        assert "delete(AuditRow" not in code
        assert "update(AuditRow" not in code
        assert "update(AuditText" not in code
        if "delete(AuditText" in code:
            assert path.name == "tenants.py"
    assert {"audit_log", "audit_texts", "audit_head"} <= set(Base.metadata.tables)


@pytest.mark.slow
def test_the_chain_is_whole_whatever_is_done_at_once(plane: ControlPlane, tmp_path: Path) -> None:
    """Four servers, as far as the database can tell; a SQLite file has one."""
    planes = (
        [plane, *(ControlPlane(plane.root) for _ in range(3))] if plane.database.on_postgres else [plane] * 4
    )
    together = threading.Barrier(4)

    def work(number: int) -> None:
        mine = planes[number]
        together.wait()
        for turn in range(6):
            tenant = f"t{number}-{turn}"
            mine.tenants.create(tenant, display_name=tenant)
            mine.keys.create(tenant, name=tenant)
            mine.tenants.update("acme", {"weight": turn + 1})
            mine.tenants.delete(tenant)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(4)]:
            done.result()
    verdict = verify(plane.database)
    assert (verdict.whole, verdict.num_rows) == (True, 4 * 6 * 4), verdict
    for other in planes[1:]:
        other.close()


# Texts that can be erased.


def test_texts_go_with_their_tenant_and_the_chain_stays_whole(plane: ControlPlane) -> None:
    plane.tenants.update("acme", {"display_name": "Acme Inc."})
    plane.keys.create("acme", name="Jane's key")
    plane.tenants.update("rival", {"display_name": "Rival Ltd."})
    assert "Acme Inc." in everything(plane)
    anchor = verify(plane.database).head
    plane.tenants.delete("acme")
    kept = everything(plane)
    assert "Acme Inc." not in kept
    assert "Jane" not in kept
    assert "Rival Ltd." in kept
    about = entries(plane, tenant="acme")
    assert [entry.action for entry in about] == ["tenant.update", "key.create", "tenant.delete"]
    assert about[0].after is not None
    assert about[1].after is not None
    assert (about[0].after["display_name"], about[1].after["name"]) == (ERASED, ERASED)
    verdict = verify(plane.database, anchor)
    assert verdict.whole, verdict


def test_a_text_that_went_without_its_tenant_is_found(plane: ControlPlane) -> None:
    plane.tenants.delete("rival")
    plane.keys.create("acme", name="one")
    plane.keys.create("acme", name="two")
    with plane.database.write() as session:
        session.execute(text("DELETE FROM audit_texts WHERE seq = 3"))
    verdict = verify(plane.database)
    assert (verdict.broken_at, verdict.reason) == (3, "a text is missing, and its tenant was not deleted")


# Tampering by whom the database obeys: see test_audit_check.py. On PostgreSQL:


def test_change_by_a_superuser_on_postgresql_is_found(tmp_path: Path) -> None:
    need_programs()
    use_database(tmp_path, postgres_server().clear())
    plane = ControlPlane(tmp_path)
    for number in range(5):
        plane.tenants.create(f"t{number}")
    anchor = verify(plane.database).head
    assert anchor is not None
    with plane.database.write() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("UPDATE audit_log SET target = 'tenants/x' WHERE seq = 3"))
    assert (verify(plane.database).broken_at, verify(plane.database).num_rows) == (3, 2)
    with plane.database.write() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("DELETE FROM audit_log WHERE seq > 2"))
        session.execute(
            text("UPDATE audit_head SET seq = 2, hash = (SELECT hash FROM audit_log WHERE seq = 2)")
        )
    assert verify(plane.database).whole
    assert verify(plane.database, anchor).broken_at == 3
    with plane.database.write() as session:
        record(session, LOCAL, "tenant.create", "tenants/false", tenant_id="false")
    for expected in (anchor, Anchor(3, "0" * 64)):
        assert not verify(plane.database, expected).whole
    plane.close()
