"""Batches as their tenants see them: made, listed, cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from loraplex.control import rules
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.batches.files import file_not_found, new_id
from loraplex.control.batches.pages import ListPage, read_page
from loraplex.control.db.batch_tables import Batch, BatchPart, FilePart, StoredFile
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.errors import BatchNotFound, InvalidValue
from loraplex.control.tenancy.tenants import require_tenant

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/classify", "/v1/classify", "/score",
    "/v1/score", "/v1/rerank", "/rerank", "/v2/rerank",
]  # fmt: skip
Status = Literal["in_progress", "cancelling", "cancelled", "completed", "expired", "failed"]
WINDOW_S = 86_400.0
BYTES_A_TOKEN = 4
"""Bytes of a file that count as one token of the limit `batch_tokens`."""
LIVE = ("in_progress", "cancelling")
NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """A batch. `labels` are OpenAI's `metadata`; `error` says why it failed as a whole."""

    id: str
    tenant_id: str
    endpoint: str
    input_file_id: str
    status: str
    labels: Mapping[str, str] | None
    total: int
    completed: int
    failed: int
    created_at: datetime
    expires_at: datetime
    cancelling_at: datetime | None
    ended_at: datetime | None
    output_file_id: str | None
    error_file_id: str | None
    error: str | None


class Batches:
    """All calls are synchronous and atomic; async callers use `Database.run`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        tenant_id: str,
        key_id: str,
        file_id: str,
        endpoint: Endpoint,
        labels: Mapping[str, str] | None = None,
        by: Actor = LOCAL,
    ) -> BatchInfo:
        """One that runs from now on; one that has failed where the tenant's `batch_tokens` are all queued. Raises
        FileNotFound, and InvalidValue for what another batch wrote."""
        with self._database.write(ages_caches=False) as session:
            limits = rules.read_limits(require_tenant(session, tenant_id).limits)
            file = session.get(StoredFile, file_id)
            now = database_now(session)
            if file is None or file.tenant_id != tenant_id or not file.ready or file.expires_at <= now:
                raise file_not_found(file_id)
            if file.batch_id is not None:
                message = f"The file '{file_id}' was written by a batch; upload it with the purpose 'batch'."
                raise InvalidValue(message, param="input_file_id")
            tokens = -(-file.bytes // BYTES_A_TOKEN)
            error = None
            if limits.batch_tokens is not None:
                error = _too_many(limits.batch_tokens, _queued(session, tenant_id), tokens)
            row = Batch(
                id=new_id("batch_"),
                tenant_id=tenant_id,
                key_id=key_id,
                endpoint=endpoint,
                input_file_id=file_id,
                status="in_progress" if error is None else "failed",
                labels=None if labels is None else dict(labels),
                total=file.requests,
                completed=0,
                failed=0,
                tokens=tokens,
                created_at=now,
                expires_at=now + timedelta(seconds=WINDOW_S),
                ended_at=None if error is None else now,
                error=error,
            )
            session.add(row)
            session.flush()
            if error is None:
                numbers = session.scalars(select(FilePart.number).where(FilePart.file_id == file_id)).all()
                common = {"batch_id": row.id, "done": False, "holder": "", "until": NEVER, "takes": 0}
                parts = [common | {"number": number} for number in numbers]
                if parts:
                    session.execute(self._database.insert(BatchPart), parts)
            _record(session, by, "batch.create", row)
            return batch_info(row)

    def get(self, tenant_id: str, batch_id: str) -> BatchInfo:
        """Raises BatchNotFound, also for another tenant's."""
        with self._database.read() as session:
            return batch_info(_own(session, tenant_id, batch_id))

    def list(self, tenant_id: str | None, *, limit: int, after: str | None) -> ListPage[BatchInfo]:
        """The newest first; None: of all tenants. Raises InvalidCursor."""
        query: Select[tuple[Batch]] = select(Batch)
        if tenant_id is not None:
            query = query.where(Batch.tenant_id == tenant_id)
        with self._database.read() as session:
            return read_page(session, query, Batch, batch_info, limit, after, newest_first=True)

    def cancel(self, tenant_id: str | None, batch_id: str, by: Actor = LOCAL) -> BatchInfo:
        """Nothing more of it is begun, and what is done is kept. One that has ended stays as it is. Raises
        BatchNotFound; `tenant_id` None: whosever it is."""
        with self._database.write(ages_caches=False) as session:
            row = _own(session, tenant_id, batch_id)
            if row.status == "in_progress":
                row.status, row.cancelling_at = "cancelling", database_now(session)
                _record(session, by, "batch.cancel", row)
            return batch_info(row)


def _queued(session: Session, tenant_id: str) -> int:
    """Tokens of the tenant's batches that are not answered yet."""
    rows = session.scalars(select(Batch).where(Batch.tenant_id == tenant_id, Batch.status.in_(LIVE)))
    return sum(row.tokens * (row.total - row.completed - row.failed) // row.total for row in rows)


def _too_many(most: int, queued: int, tokens: int) -> str | None:
    if queued + tokens <= most:
        return None
    return (
        f"The tenant's limit batch_tokens is {most}; {queued} are queued, and this file has about {tokens}."
    )


def _own(session: Session, tenant_id: str | None, batch_id: str) -> Batch:
    row = session.get(Batch, batch_id)
    if row is None or tenant_id not in (None, row.tenant_id):
        raise BatchNotFound(f"There is no batch '{batch_id[:80]}'.", param="batch_id")
    return row


def _record(session: Session, by: Actor, action: str, row: Batch) -> None:
    about = {"endpoint": row.endpoint, "status": row.status, "file": row.input_file_id, "requests": row.total}
    target = f"tenants/{row.tenant_id}/batches/{row.id}"
    record(session, by, action, target, tenant_id=row.tenant_id, after=about)


def batch_info(row: Batch) -> BatchInfo:
    return BatchInfo(
        row.id,
        row.tenant_id,
        row.endpoint,
        row.input_file_id,
        row.status,
        row.labels,
        row.total,
        row.completed,
        row.failed,
        row.created_at,
        row.expires_at,
        row.cancelling_at,
        row.ended_at,
        row.output_file_id,
        row.error_file_id,
        row.error,
    )
