"""Whether the audit log is whole: every row as it was written, in order, none missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping, func, or_, select
from sqlalchemy.orm import Session

from loraplex.control.audit.recorder import COMMITMENT, GENESIS, commitment, read_head, row_hash
from loraplex.control.db.database import Database
from loraplex.control.db.tables import AuditRow, AuditText
from loraplex.control.errors import InvalidValue

BATCH = 500


@dataclass(frozen=True, slots=True)
class Anchor:
    """How the log ended at some time: number of rows, and the last one's hash. Kept elsewhere, it shows a later
    rewriting of all that was before it, also by the database's owner."""

    seq: int
    hash: str

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


def read_anchor(text: str) -> Anchor:
    """From `SEQ:HASH`, as `audit verify` prints it. Raises InvalidValue."""
    seq, colon, digest = text.partition(":")
    hexadecimal = len(digest) == 64 and set("0123456789abcdef").issuperset(digest)
    if not colon or not hexadecimal or not seq.isascii() or not seq.isdecimal() or len(seq) > 18:
        raise InvalidValue("An anchor is SEQ:HASH, such as 12:9f86d0…, as 'audit verify' printed it.")
    return Anchor(int(seq), digest)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`num_rows` were found whole before the first that is not, which has the number `broken_at` (one that is missing
    has its number too) and the `reason`. `head` is where the log ends by its own account."""

    num_rows: int
    head: Anchor | None
    broken_at: int | None = None
    reason: str | None = None

    @property
    def whole(self) -> bool:
        return self.broken_at is None


class _Broken(Exception):
    def __init__(self, seq: int, reason: str) -> None:
        super().__init__(reason)
        self.seq = seq
        self.reason = reason


@dataclass
class _Walk:
    """The state of the verification after row `seq`. `erased` is, by tenant, the first row that lacks a text for which
    no deletion of the tenant has been seen yet."""

    anchor: Anchor | None
    seq: int = 0
    hash: str = GENESIS
    erased: dict[str | None, int] = field(default_factory=dict)

    def step(self, row: RowMapping, texts: dict[str, AuditText]) -> None:
        if row["seq"] != self.seq + 1:
            raise _Broken(self.seq + 1, "the row is missing")
        self._check_hash(row)
        self._check_texts(row, texts)
        self.seq, self.hash = row["seq"], row["hash"]
        if row["action"] == "tenant.delete" and row["outcome"] == "done":
            self.erased.pop(row["tenant_id"], None)
        if self.anchor is not None and self.anchor.seq == self.seq and self.anchor.hash != self.hash:
            raise _Broken(self.seq, "its hash is not the recorded one: it, or a row before it, was rewritten")

    def _check_hash(self, row: RowMapping) -> None:
        try:
            expected = row_hash(dict(row))
        except (TypeError, ValueError, AttributeError) as error:
            raise _Broken(self.seq + 1, "its content was changed: it cannot be read") from error
        if row["hash"] != expected:
            raise _Broken(self.seq + 1, "its content was changed")
        if row["previous_hash"] != self.hash:
            raise _Broken(self.seq + 1, "it does not follow the row before it")

    def _check_texts(self, row: RowMapping, texts: dict[str, AuditText]) -> None:
        for place, promised in _commitments(row):
            kept = texts.pop(place, None)
            if kept is None:
                self.erased.setdefault(row["tenant_id"], self.seq + 1)
            elif kept.tenant_id != row["tenant_id"] or commitment(kept.salt, kept.text) != promised:
                raise _Broken(self.seq + 1, f"the text of {place} was changed")
        if texts:
            raise _Broken(self.seq + 1, f"it has no text at {min(texts)}, and one is there")

    def end(self, head: Anchor | None) -> None:
        if head is None:
            raise _Broken(self.seq + 1, "the log's head is missing")
        if head.seq > self.seq or (self.anchor is not None and self.anchor.seq > self.seq):
            raise _Broken(self.seq + 1, "the rows from here on are missing: the log was cut off")
        if (head.seq, head.hash) != (self.seq, self.hash):
            raise _Broken(
                max(self.seq, 1), "the log's head names another last row: the head or this row is false"
            )
        if self.erased:
            raise _Broken(min(self.erased.values()), "a text is missing, and its tenant was not deleted")


def verify(database: Database, anchor: Anchor | None = None) -> Verdict:
    """Walk the whole log, one snapshot of it, `BATCH` rows in memory at a time. With `anchor`, its row must be there
    with that hash. Raises DatabaseUnavailable, DatabaseBusy."""
    walk, head = _Walk(anchor), None
    with database.read(report=True) as session:
        try:
            head = _head(session)
            for rows in _batches(session):
                texts = _texts(session, rows[0]["seq"], rows[-1]["seq"])
                for row in rows:
                    walk.step(row, texts.pop(row["seq"], {}))
            walk.end(head)
            _check_stray_texts(session, walk.seq)
        except _Broken as broken:
            return Verdict(walk.seq, head, broken.seq, broken.reason)
    return Verdict(walk.seq, head)


def _head(session: Session) -> Anchor | None:
    found = read_head(session)
    return None if found is None else Anchor(*found)


def _batches(session: Session) -> Iterator[list[RowMapping]]:
    """All rows by number, from whatever number on. A value that its column cannot hold breaks its row."""
    after: int | None = None
    while True:
        query = select(*AuditRow.__table__.columns).order_by(AuditRow.seq).limit(BATCH)
        try:
            rows = list(session.execute(_above(query, after)).mappings())
        except (TypeError, ValueError):
            rows = []
            for _ in range(BATCH):
                try:
                    found = list(session.execute(_above(query.limit(1), after)).mappings())
                except (TypeError, ValueError) as error:
                    if rows:
                        break
                    raise _Broken((after or 0) + 1, "its content was changed: it cannot be read") from error
                rows += found
                after = rows[-1]["seq"]
        if not rows:
            return
        yield rows
        after = rows[-1]["seq"]


def _above(query: Any, after: int | None) -> Any:
    return query if after is None else query.where(AuditRow.seq > after)


def _texts(session: Session, first: int, last: int) -> dict[int, dict[str, AuditText]]:
    found: dict[int, dict[str, AuditText]] = {}
    for text in session.scalars(select(AuditText).where(AuditText.seq.between(first, last))):
        found.setdefault(text.seq, {})[text.place] = text
    session.expunge_all()
    return found


def _check_stray_texts(session: Session, last: int) -> None:
    query = select(func.min(AuditText.seq)).where(or_(AuditText.seq < 1, AuditText.seq > last))
    stray = session.scalar(query)
    if stray is not None:
        raise _Broken(stray, "a text is there without its row")


def _commitments(row: RowMapping) -> Iterator[tuple[str, str]]:
    """The places of a whole row where a text is promised, and what it must hash to."""
    for side in ("before", "after"):
        for name, value in json.loads(row[side] or "{}").items():
            if isinstance(value, dict) and set(value) == {COMMITMENT}:
                yield f"{side}.{name}", value[COMMITMENT]
