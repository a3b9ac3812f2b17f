"""The tables of files and batches."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from loraplex.control.db.tables import Base, UtcDateTime


class StoredFile(Base):
    """A tenant's file, or what a batch wrote."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_created", "tenant_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    purpose: Mapped[str] = mapped_column(String(16))
    filename: Mapped[str] = mapped_column(String(256))
    bytes: Mapped[int] = mapped_column(BigInteger)
    requests: Mapped[int]
    """The file's lines that are not blank."""
    ready: Mapped[bool]
    """False while it is uploaded; only then do parts come."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    batch_id: Mapped[str | None] = mapped_column(String(40))
    """The batch that wrote it: its content are that batch's results, the failed ones if it is `of_errors`."""
    of_errors: Mapped[bool | None]


class FilePart(Base):
    """Whole lines of an upload, in order; `data` of all parts together is the file."""

    __tablename__ = "file_parts"

    file_id: Mapped[str] = mapped_column(ForeignKey("files.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_line: Mapped[int]
    """The number of its first line in the file, from 1."""
    repeated: Mapped[list[Any]] = mapped_column(JSON)
    """Numbers of lines whose custom_id an earlier line has."""
    data: Mapped[bytes] = mapped_column(LargeBinary)


class Batch(Base):
    """The requests of a file, for one route. `error` says why it failed as a whole."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_created", "tenant_id", "created_at", "id"),
        Index("ix_batches_status", "status"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    key_id: Mapped[str] = mapped_column(String(32))
    """The key that made it, whose rights its requests have."""
    endpoint: Mapped[str] = mapped_column(String(32))
    input_file_id: Mapped[str] = mapped_column(String(40))
    status: Mapped[str] = mapped_column(String(12))
    labels: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    """OpenAI's `metadata`."""
    total: Mapped[int]
    completed: Mapped[int]
    failed: Mapped[int]
    tokens: Mapped[int] = mapped_column(BigInteger)
    """An estimate of its prompts' tokens, for the limit `batch_tokens`."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    cancelling_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    output_file_id: Mapped[str | None] = mapped_column(String(40))
    error_file_id: Mapped[str | None] = mapped_column(String(40))
    error: Mapped[str | None] = mapped_column(String(200))


class BatchPart(Base):
    """A part of a batch's file, as work: the server `holder` has it until `until` by the database's clock."""

    __tablename__ = "batch_parts"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    done: Mapped[bool]
    holder: Mapped[str] = mapped_column(String(32))
    until: Mapped[datetime] = mapped_column(UtcDateTime)
    takes: Mapped[int]
    """How often it was taken since one of its lines was answered."""


class BatchResult(Base):
    """The answer to one line, written once: a line of the output file, or of the error file."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    failed: Mapped[bool]
    data: Mapped[bytes] = mapped_column(LargeBinary)
