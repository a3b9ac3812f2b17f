"""The work of batches, shared between servers: parts that are held by lease, and results that are written once.

A server takes a part for some seconds by the database's clock and renews that while it works. A server that dies leaves
its parts to others, which answer the lines that have no result yet. A result's key is its batch and line: of two
servers that answer the same line the first one's answer counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Select, Update, delete, exists, func, select, update
from sqlalchemy.orm import Session

from loraplex.control.batches.batches import LIVE
from loraplex.control.batches.files import kept_for, new_id
from loraplex.control.db.batch_tables import Batch, BatchPart, BatchResult, FilePart, StoredFile
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import Tenant

INPUT_GONE = "The input file was deleted before the batch was complete."


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a file that has no result yet. `repeated`: an earlier line has its custom_id."""

    number: int
    data: bytes
    repeated: bool


@dataclass(frozen=True, slots=True)
class Work:
    """A part that this server holds, with its lines that have no result. `expired`: the batch's time is over, and its
    lines are not to be run. `takes`: how often it was taken since one of its lines was answered."""

    batch_id: str
    number: int
    tenant_id: str
    key_id: str
    endpoint: str
    lines: tuple[Line, ...]
    expired: bool
    takes: int

    @property
    def key(self) -> tuple[str, int]:
        return self.batch_id, self.number


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the output file, or of the error file where it `failed`."""

    line: int
    failed: bool
    data: bytes


class BatchWork:
    """The work of one server, by its id `holder`. Calls are synchronous and atomic, and raise what `Database` does. A
    part is held for `ttl_s` seconds at a time."""

    def __init__(self, database: Database, holder: str, *, ttl_s: float = 60.0) -> None:
        self._database = database
        self._holder = holder
        self.ttl_s = ttl_s

    def take(self, held: Mapping[str, int], most: int) -> Work | None:
        """The next part: of the tenant whose parts this server holds the fewest of, and fewer than `most`. Nothing is
        written where there is none."""
        with self._database.read() as session:
            if session.scalars(self._open(database_now(session)).limit(1)).first() is None:
                return None
        with self._database.write(ages_caches=False) as session:
            now = database_now(session)
            joined = self._open(now)
            tenants = session.scalars(joined.with_only_columns(Batch.tenant_id).distinct()).all()
            tenant = min(tenants, key=lambda one: (held.get(one, 0), one), default=None)
            if tenant is None or held.get(tenant, 0) >= most:
                return None
            query = joined.where(Batch.tenant_id == tenant)
            part = session.scalars(query.order_by(Batch.created_at, BatchPart.number).limit(1)).one()
            part.holder, part.until = self._holder, now + timedelta(seconds=self.ttl_s)
            part.takes += 1
            return self._work(session, part, now)

    def _open(self, now: datetime) -> Select[BatchPart]:
        """Parts that nobody holds. A lease that ends long after any could is of a clock that was wrong. Those of a
        suspended tenant wait for its return, or for the end of their batch's time."""
        is_free = (BatchPart.until <= now) | (
            BatchPart.until > now + timedelta(seconds=10 * self.ttl_s + 600)
        )
        may_run = Tenant.suspended_at.is_(None) | (Batch.expires_at <= now)
        joined = select(BatchPart).join(Batch, Batch.id == BatchPart.batch_id)
        joined = joined.join(Tenant, Tenant.id == Batch.tenant_id)
        return joined.where(Batch.status == "in_progress", ~BatchPart.done, is_free, may_run)

    def _work(self, session: Session, part: BatchPart, now: datetime) -> Work | None:
        batch = session.get_one(Batch, part.batch_id)
        source = session.get(FilePart, (batch.input_file_id, part.number))
        if source is None:
            batch.error = INPUT_GONE
            _finish(session, batch, "failed", now)
            return None
        numbered = list(enumerate(source.data.split(b"\n"), source.first_line))
        answered = set(
            session.scalars(
                select(BatchResult.line).where(
                    BatchResult.batch_id == batch.id,
                    BatchResult.line.between(source.first_line, source.first_line + len(numbered)),
                )
            )
        )
        lines = tuple(
            Line(number, data, number in source.repeated)
            for number, data in numbered
            if data.strip() and number not in answered
        )
        return Work(
            batch.id,
            part.number,
            batch.tenant_id,
            batch.key_id,
            batch.endpoint,
            lines,
            batch.expires_at <= now,
            part.takes,
        )

    def renew(self, works: Sequence[Work]) -> set[tuple[str, int]]:
        """Hold them for longer; the keys of those that are to be worked on: still held, of batches that were neither
        cancelled nor have expired."""
        kept = set()
        with self._database.write(ages_caches=False) as session:
            now = database_now(session)
            for work in works:
                part, batch = session.get(BatchPart, work.key), session.get(Batch, work.batch_id)
                if part is None or batch is None or part.holder != self._holder:
                    continue
                part.until = now + timedelta(seconds=self.ttl_s)
                if batch.status == "in_progress" and (work.expired or batch.expires_at > now):
                    kept.add(work.key)
        return kept

    def write(self, work: Work, results: Sequence[Result]) -> int:
        """Keep results; the number of those that no other server had written before."""
        with self._database.write(ages_caches=False) as session:
            batch = session.get(Batch, work.batch_id)
            if batch is None or batch.status not in LIVE:
                return 0
            insert = self._database.insert(BatchResult).on_conflict_do_nothing().returning(BatchResult.line)
            new = set()
            for result in results:
                row = {
                    "batch_id": work.batch_id,
                    "line": result.line,
                    "failed": result.failed,
                    "data": result.data,
                }
                new |= set(session.scalars(insert.values(row)))
            failed = sum(result.failed for result in results if result.line in new)
            batch.failed += failed
            batch.completed += len(new) - failed
            session.execute(_part_of(work).values(takes=0))
            return len(new)

    def release(self, work: Work, *, done: bool, again_s: float = 0.0) -> None:
        """Give a part back: `done`, or to be taken again by any server after `again_s` seconds."""
        with self._database.write(ages_caches=False) as session:
            until = database_now(session) + timedelta(seconds=again_s)
            mine = _part_of(work).where(BatchPart.holder == self._holder)
            session.execute(mine.values(done=done, holder="", until=until))

    def settle(self) -> list[tuple[str, str]]:
        """End the batches that are complete, or cancelled and held by nobody; their ids, with how they ended. Nothing
        is written where there are none."""
        ended: list[tuple[str, str]] = []
        with self._database.read() as session:
            if session.scalars(_to_end(database_now(session)).limit(1)).first() is None:
                return ended
        with self._database.write(ages_caches=False) as session:
            now = database_now(session)
            for batch in session.scalars(_to_end(now)):
                status = "cancelled" if batch.status == "cancelling" else "completed"
                if status == "completed" and batch.expires_at <= now:
                    status = "expired"
                _finish(session, batch, status, now)
                ended.append((batch.id, status))
        return ended


def _to_end(now: datetime) -> Select[Batch]:
    """Batches that are complete, or cancelled and held by nobody."""
    left = exists().where(BatchPart.batch_id == Batch.id, ~BatchPart.done)
    held = left.where(BatchPart.holder != "", BatchPart.until > now)
    complete = (Batch.status == "in_progress") & ~left
    return select(Batch).where(complete | (Batch.status == "cancelling") & ~held)


def _part_of(work: Work) -> Update:
    return update(BatchPart).where(BatchPart.batch_id == work.batch_id, BatchPart.number == work.number)


def _finish(session: Session, batch: Batch, status: str, now: datetime) -> None:
    """End the batch, with the files of what was written."""
    batch.status, batch.ended_at = status, now
    session.execute(delete(BatchPart).where(BatchPart.batch_id == batch.id))
    for of_errors in (False, True):
        mine = (BatchResult.batch_id == batch.id, BatchResult.failed.is_(of_errors))
        size = func.coalesce(func.sum(func.length(BatchResult.data)), 0)
        requests, num_bytes = session.execute(select(func.count(), size).where(*mine)).one()
        if not requests:
            continue
        file = StoredFile(
            id=new_id("file-"),
            tenant_id=batch.tenant_id,
            purpose="batch_output",
            filename=f"{batch.id}_{'error' if of_errors else 'output'}.jsonl",
            bytes=num_bytes,
            requests=requests,
            ready=True,
            created_at=now,
            expires_at=now + kept_for(session, batch.tenant_id),
            batch_id=batch.id,
            of_errors=of_errors,
        )
        session.add(file)
        if of_errors:
            batch.error_file_id = file.id
        else:
            batch.output_file_id = file.id
