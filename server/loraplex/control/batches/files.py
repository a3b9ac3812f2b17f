"""A tenant's files: kept in the database in parts of whole lines, so that all servers have them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from loraplex.control import rules
from loraplex.control.audit.recorder import LOCAL, Actor, FreeText, record
from loraplex.control.batches.lines import LineCutter, Part
from loraplex.control.batches.pages import ListPage, read_page
from loraplex.control.catalog.quota import check_bytes
from loraplex.control.db.batch_tables import Batch, BatchResult, FilePart, StoredFile
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.errors import FileNotFound
from loraplex.control.tenancy.tenants import require_tenant

FILE_DAYS = 30
"""Days for which files are kept where the tenant has no `file_days`."""
MAX_FILE_DAYS = 36_500
UPLOAD_S = 3600.0
"""An upload that has not ended after so long has died with its server, and is removed."""
LOOK_S = 600.0
"""How often expired files are looked for."""


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file that is complete. `requests` are its lines that are not blank."""

    id: str
    tenant_id: str
    purpose: str
    filename: str
    bytes: int
    requests: int
    created_at: datetime
    expires_at: datetime
    batch_id: str | None = None
    """The batch that wrote it."""
    of_errors: bool = False


class Upload:
    """One file on its way: `add` its bytes, then `finish`, or `discard`. Synchronous, for one thread at a time."""

    def __init__(self, database: Database, file_id: str, tenant_id: str) -> None:
        self._database = database
        self._id = file_id
        self._tenant_id = tenant_id
        self._cutter = LineCutter()
        self._num_parts = 0

    def add(self, data: bytes) -> None:
        """Raises InvalidValue, AdapterRefused (`quota_exceeded`), FileNotFound where its tenant is gone."""
        for part in self._cutter.feed(data):
            self._write(part)

    def finish(self, expires_s: float | None = None, by: Actor = LOCAL) -> FileInfo:
        """Raises as `add` does. `expires_s`: seconds until it expires, where the client says so."""
        for part in self._cutter.finish():
            self._write(part)
        with self._database.write(ages_caches=False) as session:
            row = session.get(StoredFile, self._id)
            if row is None:
                raise file_not_found(self._id)
            row.ready, row.requests = True, self._cutter.requests
            if expires_s is not None:
                row.expires_at = min(row.expires_at, row.created_at + timedelta(seconds=expires_s))
            _record(session, by, "file.create", row)
            return info_of(row)

    def discard(self) -> None:
        with self._database.write(ages_caches=False, in_turn=False) as session:
            session.execute(delete(StoredFile).where(StoredFile.id == self._id, ~StoredFile.ready))

    def _write(self, part: Part) -> None:
        with self._database.write(ages_caches=False) as session:
            limits = rules.read_limits(require_tenant(session, self._tenant_id).limits)
            check_bytes(session, limits, self._tenant_id, len(part.data))
            grown = update(StoredFile).where(StoredFile.id == self._id)
            session.execute(grown.values(bytes=StoredFile.bytes + len(part.data)))
            session.add(
                FilePart(
                    file_id=self._id,
                    number=self._num_parts,
                    first_line=part.first_line,
                    repeated=list(part.repeated),
                    data=part.data,
                )
            )
        self._num_parts += 1


class Files:
    """All calls are synchronous and atomic; async callers use `Database.run`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, tenant_id: str, filename: str) -> Upload:
        """Raises TenantNotFound."""
        with self._database.write(ages_caches=False) as session:
            now = database_now(session)
            kept = kept_for(session, tenant_id)
            row = StoredFile(
                id=new_id("file-"),
                tenant_id=tenant_id,
                purpose="batch",
                filename=filename,
                bytes=0,
                requests=0,
                ready=False,
                created_at=now,
                expires_at=now + kept,
            )
            session.add(row)
            return Upload(self._database, row.id, tenant_id)

    def get(self, tenant_id: str, file_id: str) -> FileInfo:
        """Raises FileNotFound, also for another tenant's."""
        with self._database.read() as session:
            query = select(StoredFile).where(
                StoredFile.id == file_id, StoredFile.tenant_id == tenant_id, StoredFile.ready
            )
            row = session.scalars(query).one_or_none()
            if row is None or row.expires_at <= database_now(session):
                raise file_not_found(file_id)
            return info_of(row)

    def list(
        self, tenant_id: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> ListPage[FileInfo]:
        """Raises InvalidCursor for an `after` that is no file of the tenant."""
        query = select(StoredFile).where(StoredFile.tenant_id == tenant_id, StoredFile.ready)
        if purpose is not None:
            query = query.where(StoredFile.purpose == purpose)
        with self._database.read() as session:
            query = query.where(StoredFile.expires_at > database_now(session))
            return read_page(session, query, StoredFile, info_of, limit, after, newest_first=newest_first)

    def delete(self, tenant_id: str, file_id: str, by: Actor = LOCAL) -> None:
        """Raises FileNotFound."""
        with self._database.write(ages_caches=False) as session:
            row = session.get(StoredFile, file_id)
            if row is None or row.tenant_id != tenant_id or not row.ready:
                raise file_not_found(file_id)
            _delete_results(session, [row])
            session.delete(row)
            _record(session, by, "file.delete", row)

    def content(self, file: FileInfo) -> Iterator[bytes]:
        """The content part by part, each read when it is asked for; it ends early where the file is deleted."""
        if file.batch_id is not None:
            yield from _results(self._database, file.batch_id, file.of_errors)
            return
        number = 0
        while True:
            query = select(FilePart.data).where(FilePart.file_id == file.id, FilePart.number == number)
            with self._database.read() as session:
                data = session.scalar(query)
            if data is None:
                return
            yield data
            number += 1

    def remove_expired(self) -> int:
        """Remove files that have expired, and uploads that died with their server; the number of both. Batches go
        that have ended as long ago."""
        with self._database.write(ages_caches=False) as session:
            now = database_now(session)
            dead = (~StoredFile.ready) & (StoredFile.created_at < now - timedelta(seconds=UPLOAD_S))
            gone = session.scalars(select(StoredFile).where(or_(StoredFile.expires_at <= now, dead))).all()
            _delete_results(session, gone)
            session.execute(delete(StoredFile).where(StoredFile.id.in_([row.id for row in gone])))
            for tenant_id in session.scalars(
                select(Batch.tenant_id).where(Batch.ended_at.is_not(None)).distinct()
            ).all():
                old = Batch.ended_at < now - kept_for(session, tenant_id)
                session.execute(delete(Batch).where(Batch.tenant_id == tenant_id, old))
            return len(gone)

    async def run(self) -> None:
        """Remove what has expired, now and then; until cancelled."""
        while True:
            await self._database.run(self.remove_expired)
            await asyncio.sleep(LOOK_S)


def kept_for(session: Session, tenant_id: str) -> timedelta:
    """The time for which files and ended batches of a tenant are kept. Raises TenantNotFound."""
    days = rules.read_limits(require_tenant(session, tenant_id).limits).file_days
    return timedelta(days=min(days or FILE_DAYS, MAX_FILE_DAYS))


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def file_not_found(file_id: str) -> FileNotFound:
    return FileNotFound(f"There is no file '{file_id[:80]}'.", param="file_id")


def _delete_results(session: Session, rows: Iterable[StoredFile]) -> None:
    """The content of files that batches wrote."""
    for row in rows:
        if row.batch_id is not None:
            mine = (BatchResult.batch_id == row.batch_id, BatchResult.failed.is_(bool(row.of_errors)))
            session.execute(delete(BatchResult).where(*mine))


def info_of(row: StoredFile) -> FileInfo:
    return FileInfo(
        row.id,
        row.tenant_id,
        row.purpose,
        row.filename,
        row.bytes,
        row.requests,
        row.created_at,
        row.expires_at,
        row.batch_id,
        bool(row.of_errors),
    )


def _record(session: Session, by: Actor, action: str, row: StoredFile) -> None:
    about = {"filename": FreeText(row.filename), "bytes": row.bytes, "requests": row.requests}
    side: dict[str, Any] = {"before" if action == "file.delete" else "after": about}
    record(session, by, action, f"tenants/{row.tenant_id}/files/{row.id}", tenant_id=row.tenant_id, **side)


def _results(database: Database, batch_id: str, of_errors: bool) -> Iterator[bytes]:
    """The lines of an output or error file, by their numbers, each read when it is asked for."""
    last = 0
    while True:
        query = select(BatchResult.line, BatchResult.data).where(
            BatchResult.batch_id == batch_id, BatchResult.failed.is_(of_errors), BatchResult.line > last
        )
        with database.read() as session:
            found = session.execute(query.order_by(BatchResult.line).limit(1)).one_or_none()
        if found is None:
            return
        last = found[0]
        yield found[1]
