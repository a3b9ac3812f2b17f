"""Requests for the usage ledger, and what a database says of them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import select

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Usage
from loraplex.control.usage.records import BASE, Accepted, Ended

AT = datetime(2026, 3, 5, 12, 30, 15, 250_000, tzinfo=UTC)
_numbers = itertools.count(1)


def accepted(**changes: Any) -> Accepted:
    fields: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "at": AT,
        "tenant_id": "acme",
        "key_id": "k1",
        "adapter": BASE,
        "version": 0,
        "digest": "",
        "endpoint": "/v1/completions",
        "streamed": False,
        "n": 1,
    }
    return Accepted(**(fields | changes))


def ended(record: Accepted | None = None, **changes: Any) -> Ended:
    fields: dict[str, Any] = msgspec.structs.asdict(record or accepted()) | {
        "status": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": next(_numbers),
        "queue_s": 0.25,
        "first_token_s": 0.5,
        "total_s": 1.5,
    }
    return Ended(**(fields | changes))


def rows_of(database: Database) -> dict[str, Ended]:
    with database.read() as session:
        found = session.scalars(select(Usage)).all()
    names = [name for name in Ended.__struct_fields__ if name != "key_hash"]  # which the table does not keep
    return {row.id: Ended(**{name: getattr(row, name) for name in names}) for row in found}


def by_id(rows: Iterable[Ended]) -> dict[str, Ended]:
    return {row.id: row for row in rows}
