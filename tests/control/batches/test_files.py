"""Files in the database: whole or not listed, each tenant's own, within its bytes, gone when they expire."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.batches.files import FileInfo, Files
from loraplex.control.db.batch_tables import FilePart, StoredFile
from loraplex.control.db.database import utc_now
from loraplex.control.db.tables import AuditRow
from loraplex.control.errors import FileNotFound
from loraplex.control.rules import InvalidCursor
from support.control.plane import ControlPlane


@pytest.fixture
def files(plane: ControlPlane) -> Files:
    return Files(plane.database)


def upload(files: Files, data: bytes, tenant: str = "acme", name: str = "in.jsonl") -> FileInfo:
    made = files.begin(tenant, name)
    for start in range(0, len(data), 1000):
        made.add(data[start : start + 1000])
    return made.finish()


def count(plane: ControlPlane, table: type[FilePart] | type[StoredFile]) -> int:
    with plane.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_a_file_comes_back_as_it_was(files: Files) -> None:
    data = b'{"custom_id": "a"}\n' * 300
    made = upload(files, data)
    assert (made.bytes, made.requests, made.purpose) == (len(data), 300, "batch")
    assert b"".join(files.content(made)) == data
    assert files.get("acme", made.id) == made


def test_files_of_others_and_uploads_on_their_way_are_not_there(files: Files, plane: ControlPlane) -> None:
    made = upload(files, b"{}\n")
    on_its_way = files.begin("acme", "slow.jsonl")
    on_its_way.add(b"{}\n" * 100)
    for tenant, name in (("rival", made.id), ("acme", on_its_way._id), ("acme", "file-none")):
        with pytest.raises(FileNotFound):
            files.get(tenant, name)
        with pytest.raises(FileNotFound):
            files.delete(tenant, name)
    listed = files.list("acme", limit=10, after=None, purpose=None, newest_first=True)
    assert [file.id for file in listed.items] == [made.id]
    on_its_way.discard()
    assert count(plane, StoredFile) == 1


def test_lists_by_time_and_from_a_file_on(files: Files) -> None:
    ids = [upload(files, b"{}\n").id for _ in range(5)]
    for newest_first in (False, True):
        wanted = ids[::-1] if newest_first else ids
        found: list[str] = []
        while True:
            after = found[-1] if found else None
            page = files.list("acme", limit=2, after=after, purpose="batch", newest_first=newest_first)
            found += [file.id for file in page.items]
            if not page.has_more:
                break
        assert found == wanted
    with pytest.raises(InvalidCursor):
        files.list("rival", limit=2, after=ids[0], purpose=None, newest_first=True)
    assert files.list("acme", limit=9, after=None, purpose="batch_output", newest_first=True).items == ()


def test_files_count_in_the_tenants_bytes(files: Files, plane: ControlPlane) -> None:
    plane.tenants.update("acme", {"limits": {"max_adapter_bytes": 1000}})
    kept = upload(files, b"x" * 600)
    too_much = files.begin("acme", "more.jsonl")
    with pytest.raises(AdapterRefused, match="600 are in use") as caught:
        too_much.add(b"y" * 600)
        too_much.finish()
    assert caught.value.code == "quota_exceeded"
    too_much.discard()
    files.delete("acme", kept.id)
    assert count(plane, FilePart) == 0
    assert upload(files, b"z" * 900).bytes == 900


def test_what_has_expired_or_died_is_removed(files: Files, plane: ControlPlane) -> None:
    old, kept = upload(files, b"{}\n"), upload(files, b"{}\n")
    files.begin("acme", "dead.jsonl").add(b"{}\n" * 100)
    running = files.begin("acme", "running.jsonl")
    with plane.database.write() as session:
        past = utc_now() - timedelta(hours=2)
        session.execute(update(StoredFile).where(StoredFile.id == old.id).values(expires_at=past))
        session.execute(update(StoredFile).where(StoredFile.filename == "dead.jsonl").values(created_at=past))
    with pytest.raises(FileNotFound):
        files.get("acme", old.id)
    assert files.remove_expired() == 2
    running.add(b"{}\n")
    assert running.finish().requests == 1
    assert files.get("acme", kept.id) == kept


def test_deleting_a_tenant_erases_its_files(files: Files, plane: ControlPlane) -> None:
    upload(files, b"{}\n")
    other = upload(files, b"{}\n", tenant="rival")
    plane.tenants.delete("acme")
    assert (count(plane, StoredFile), count(plane, FilePart)) == (1, 1)
    assert files.get("rival", other.id) == other


def test_changes_are_in_the_audit_log(files: Files, plane: ControlPlane) -> None:
    made = upload(files, b"{}\n")
    files.delete("acme", made.id)
    with plane.database.read() as session:
        rows = session.execute(select(AuditRow.action, AuditRow.target).order_by(AuditRow.seq)).all()
    target = f"tenants/acme/files/{made.id}"
    assert [tuple(row) for row in rows] == [("file.create", target), ("file.delete", target)]
