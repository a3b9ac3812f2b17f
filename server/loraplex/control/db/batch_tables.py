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
    """Its lines that are not blank."""
    ready: Mapped[bool]
    """False while it is uploaded; only then do parts come."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


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
