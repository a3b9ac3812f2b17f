"""Reading the audit log, and the rows of what was refused: those have no change whose transaction could write them."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from loraplex.control import rules
from loraplex.control.audit.recorder import COMMITMENT, Actor, Outcome, read_head, record
from loraplex.control.db.database import Database
from loraplex.control.db.tables import AuditRow, AuditText
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page

MAX_REFUSALS = 60
"""Rows of refused calls that one caller gets in a minute; so refused calls cannot fill the log."""
WINDOW_S = 60.0
MAX_CALLERS = 10_000
ERASED = {"erased": True}
"""In place of a text that was erased with its tenant."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One row. `before` and `after` have their texts again, or `ERASED` where those are gone."""

    seq: int
    time: datetime
    by: Actor
    action: str
    tenant_id: str | None
    target: str
    outcome: Outcome
    code: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    hash: str


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """None is everything. `tenant`: rows about it or by its keys. `actor`: `admin`, `local`, or a key's id. From
    `start` on, and before `end`."""

    tenant: str | None = None
    actor: str | None = None
    action: str | None = None
    outcome: Outcome | None = None
    start: datetime | None = None
    end: datetime | None = None


class AuditLog:
    """All calls are synchronous; async callers use `Database.run`."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._refusals: OrderedDict[tuple[str, str | None], _Refusals] = OrderedDict()

    def list(
        self,
        chosen: AuditFilter,
        *,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> Page[AuditEntry]:
        """The latest first. Raises InvalidCursor, InvalidValue."""
        query = select(AuditRow).order_by(AuditRow.seq.desc()).limit(rules.check_page_limit(limit) + 1)
        before = _read_seq(cursor)
        if before is not None:
            query = query.where(AuditRow.seq < before)
        if chosen.tenant is not None:
            query = query.where(
                or_(AuditRow.tenant_id == chosen.tenant, AuditRow.actor_tenant_id == chosen.tenant)
            )
        if chosen.actor in ("admin", "local"):
            query = query.where(AuditRow.actor == chosen.actor)
        elif chosen.actor is not None:
            query = query.where(AuditRow.actor_key_id == chosen.actor)
        if chosen.action is not None:
            query = query.where(AuditRow.action == chosen.action)
        if chosen.outcome is not None:
            query = query.where(AuditRow.outcome == chosen.outcome)
        if chosen.start is not None:
            query = query.where(AuditRow.time >= chosen.start)
        if chosen.end is not None:
            query = query.where(AuditRow.time < chosen.end)
        with self._database.read(report=True) as session:
            rows = session.scalars(query).all()
            texts = _texts(session, [row.seq for row in rows])
        return rules.make_page(rows, limit, lambda row: str(row.seq), lambda row: _entry(row, texts))

    def note_change(self, by: Actor, action: str, target: str, *, after: dict[str, Any]) -> None:
        """A row for a change outside the database, before it is made. Raises DatabaseUnavailable, DatabaseBusy."""
        with self._database.write(ages_caches=False) as session:
            record(session, by, action, target, tenant_id=None, after=after)

    def note_refusal(
        self, by: Actor, action: str, target: str, *, tenant_id: str | None, outcome: Outcome, code: str
    ) -> None:
        """A row for a call that changed nothing; beyond `MAX_REFUSALS` of a caller and minute they are counted, and
        the caller's next row of this kind says how many had none. Raises DatabaseUnavailable, DatabaseBusy."""
        skipped = self._admit(by)
        if skipped is None:
            return
        after = {"not_recorded": skipped} if skipped else None
        try:
            with self._database.write(ages_caches=False) as session:
                record(
                    session, by, action, target, tenant_id=tenant_id, after=after, outcome=outcome, code=code
                )
        except BaseException:
            self._left_out(by, skipped + 1)
            raise

    def _left_out(self, by: Actor, count: int) -> None:
        """Counted in the caller's next row."""
        with self._lock:
            who = (by.kind, by.key_id)
            self._refusals.setdefault(who, _Refusals(self._clock())).skipped += count

    def _admit(self, by: Actor) -> int | None:
        """How many of the caller's were left out since the last that was not; None where this one is."""
        who, now = (by.kind, by.key_id), self._clock()
        with self._lock:
            known = self._refusals.setdefault(who, _Refusals(now))
            self._refusals.move_to_end(who)
            while len(self._refusals) > MAX_CALLERS:
                self._refusals.popitem(last=False)
            if now - known.began >= WINDOW_S:
                known.began, known.count = now, 0
            if known.count >= MAX_REFUSALS:
                known.skipped += 1
                return None
            known.count += 1
            skipped, known.skipped = known.skipped, 0
            return skipped


def last_row(database: Database) -> int:
    """The number of the last row. Raises DatabaseUnavailable, DatabaseBusy."""
    with database.read() as session:
        head = read_head(session)
    return 0 if head is None else head[0]


@dataclass
class _Refusals:
    """Refusals of one caller in the window that `began`."""

    began: float
    count: int = 0
    skipped: int = 0


def _read_seq(cursor: str | None) -> int | None:
    after = rules.read_cursor(cursor)
    if after is None:
        return None
    if not after.isascii() or not after.isdecimal() or len(after) > 18:
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    return int(after)


def _texts(session: Session, rows: list[int]) -> dict[tuple[int, str], str]:
    query = select(AuditText).where(AuditText.seq.in_(rows))
    return {(text.seq, text.place): text.text for text in session.scalars(query)}


def _entry(row: AuditRow, texts: dict[tuple[int, str], str]) -> AuditEntry:
    return AuditEntry(
        seq=row.seq,
        time=row.time,
        by=Actor(cast(Any, row.actor), row.actor_tenant_id, row.actor_key_id, row.source, row.request_id),
        action=row.action,
        tenant_id=row.tenant_id,
        target=row.target,
        outcome=cast(Outcome, row.outcome),
        code=row.code,
        before=_filled(row, "before", row.before, texts),
        after=_filled(row, "after", row.after, texts),
        hash=row.hash,
    )


def _filled(
    row: AuditRow, side: str, stored: str | None, texts: dict[tuple[int, str], str]
) -> dict[str, Any] | None:
    if stored is None:
        return None
    values: dict[str, Any] = json.loads(stored)
    for name, value in values.items():
        if isinstance(value, dict) and set(value) == {COMMITMENT}:
            values[name] = texts.get((row.seq, f"{side}.{name}"), ERASED)
    return values
