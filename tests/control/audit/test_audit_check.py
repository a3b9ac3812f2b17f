"""Every change of the audit log behind the server's back is found, and its place."""

from __future__ import annotations

import functools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.audit.recorder import LOCAL, AuditBroken, FreeText, record, row_hash
from loraplex.control.audit.verification import Anchor, Verdict, read_anchor, verify
from loraplex.control.db.database import Database
from loraplex.control.db.tables import AuditRow
from loraplex.control.errors import InvalidValue
from loraplex.migrations.run import upgrade

ROWS = 9
COLUMNS = [column.name for column in AuditRow.__table__.columns]
row_numbers = st.integers(1, ROWS)
values = st.one_of(
    st.none(),
    st.text(max_size=80).filter(str.isprintable),
    st.integers(-5, 2**40),
    st.floats(allow_nan=False),
    st.binary(max_size=8),
)


@functools.cache
def _template() -> tempfile.TemporaryDirectory[str]:
    """A log of `ROWS` rows without its triggers, as the owner of the file can make it; gone with the interpreter."""
    made = tempfile.TemporaryDirectory(prefix="loraplex-tests-")
    url = f"sqlite:///{made.name}/control.db"
    upgrade(url)
    database = Database(url)
    for number in range(1, ROWS + 1):
        with database.write() as session:
            record(
                session,
                LOCAL,
                "tenant.update",
                f"tenants/t{number}",
                tenant_id=f"t{number}",
                before={"display_name": FreeText(f"Before {number}"), "weight": number / 7},
                after={"display_name": FreeText(None)},
            )
    database.close()
    with closing(sqlite3.connect(f"{made.name}/control.db")) as raw:
        for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {name}")
        raw.commit()
    return made


class Log:
    """A copy of the template's log: `raw` changes it, `verify` looks, `restore` makes it what it was."""

    def __init__(self) -> None:
        path = Path(_template().name) / "copy.db"
        shutil.copyfile(Path(_template().name) / "control.db", path)
        self.raw = sqlite3.connect(path, isolation_level=None)
        self.raw.execute("PRAGMA synchronous=OFF")
        self.raw.execute("ATTACH ? AS original", [f"{_template().name}/control.db"])
        self.database = Database(f"sqlite:///{path}")

    def restore(self) -> None:
        self.raw.execute("BEGIN")
        for table in ("audit_log", "audit_texts", "audit_head"):
            self.raw.execute(f"DELETE FROM main.{table}")
            self.raw.execute(f"INSERT INTO main.{table} SELECT * FROM original.{table}")
        self.raw.execute("COMMIT")

    def verify(self, anchor: Anchor | None = None) -> Verdict:
        return verify(self.database, anchor)

    def value(self, seq: int, column: str) -> Any:
        return self.raw.execute(f"SELECT {column} FROM audit_log WHERE seq = ?", [seq]).fetchone()[0]

    def rechain(self, first: int) -> None:
        """Make the hashes from row `first` on right again, and the head, as a thorough forger does."""
        names = ", ".join(COLUMNS)
        rows = self.raw.execute(f"SELECT {names} FROM audit_log ORDER BY seq").fetchall()
        previous = dict(zip(COLUMNS, rows[first - 2], strict=True))["hash"] if first > 1 else "0" * 64
        for values in rows[first - 1 :]:
            row = dict(zip(COLUMNS, values, strict=True)) | {"previous_hash": previous}
            moment = datetime.fromisoformat(row["time"]).replace(tzinfo=UTC)
            previous = row_hash(row | {"time": moment})
            statement = "UPDATE audit_log SET previous_hash = ?, hash = ? WHERE seq = ?"
            self.raw.execute(statement, [row["previous_hash"], previous, row["seq"]])
        self.raw.execute("UPDATE audit_head SET seq = ?, hash = ?", [rows[-1][0], previous])


_the_log = functools.cache(Log)


@contextmanager
def log() -> Iterator[Log]:
    """To do with as one likes: one file for all examples, since a new one takes longer than to look through it."""
    made = _the_log()
    try:
        yield made
    finally:
        made.restore()


@functools.cache
def anchor() -> Anchor:
    """Of the log as it was written."""
    with closing(sqlite3.connect(f"{_template().name}/control.db")) as raw:
        return Anchor(*raw.execute("SELECT seq, hash FROM audit_head").fetchone())


def test_a_log_that_nobody_touched_is_whole() -> None:
    with log() as whole:
        verdict = whole.verify()
        assert (verdict.whole, verdict.num_rows, verdict.reason) == (True, ROWS, None)
        for seq in range(1, ROWS + 1):
            assert whole.verify(Anchor(seq, whole.value(seq, "hash"))).whole
            assert whole.verify(Anchor(seq, "f" * 64)).broken_at == seq


@given(row_numbers, st.sampled_from([name for name in COLUMNS if name != "seq"]), values)
def test_a_changed_value_is_found(seq: int, column: str, value: object) -> None:
    with log() as forged:
        before = forged.value(seq, column)
        try:
            forged.raw.execute(f"UPDATE audit_log SET {column} = ? WHERE seq = ?", [value, seq])
        except sqlite3.IntegrityError:
            return  # NOT NULL
        changed = forged.value(seq, column) != before
        assert forged.verify().broken_at == (seq if changed else None)


@given(row_numbers, st.integers(-3, 3 * ROWS))
def test_a_renumbered_row_is_found(seq: int, other: int) -> None:
    with log() as forged:
        try:
            forged.raw.execute("UPDATE audit_log SET seq = ? WHERE seq = ?", [other, seq])
        except sqlite3.IntegrityError:
            return  # there is one of this number
        assert forged.verify().broken_at == (None if other == seq else min(seq, max(other, 1)))


@given(st.sets(row_numbers, min_size=1))
def test_deleted_rows_are_found_also_where_they_were_the_last(gone: set[int]) -> None:
    with log() as forged:
        for seq in gone:
            forged.raw.execute("DELETE FROM audit_log WHERE seq = ?", [seq])
        assert forged.verify().broken_at == min(gone)


@given(row_numbers, row_numbers)
def test_exchanged_rows_are_found(one: int, other: int) -> None:
    with log() as forged:
        for old, new in ((one, -1), (other, one), (-1, other)):
            forged.raw.execute("UPDATE audit_log SET seq = ? WHERE seq = ?", [new, old])
        assert forged.verify().broken_at == (None if one == other else min(one, other))


@given(row_numbers, st.integers(1, ROWS + 1))
def test_an_inserted_row_is_found(copied: int, place: int) -> None:
    """Also with a hash of its own that is right."""
    names = ", ".join(name for name in COLUMNS if name != "seq")
    with log() as forged:
        forged.raw.execute("UPDATE audit_log SET seq = -seq WHERE seq >= ?", [place])
        forged.raw.execute("UPDATE audit_log SET seq = -seq + 1 WHERE seq < 0")
        source = copied if copied < place else copied + 1
        forged.raw.execute(
            f"INSERT INTO audit_log (seq, {names}) SELECT {place}, {names} FROM audit_log WHERE seq = ?",
            [source],
        )
        head = forged.raw.execute("SELECT seq, hash FROM audit_head").fetchone()
        forged.rechain(place)
        forged.raw.execute("UPDATE audit_head SET seq = ?, hash = ?", head)
        assert forged.verify().broken_at is not None


@given(st.integers(1, ROWS - 1))
@settings(max_examples=ROWS, deadline=None)
def test_a_cut_tail_is_found_by_the_head_and_with_a_forged_head_by_an_anchor(last: int) -> None:
    with log() as forged:
        forged.raw.execute("DELETE FROM audit_log WHERE seq > ?", [last])
        verdict = forged.verify()
        assert (verdict.broken_at, verdict.num_rows) == (last + 1, last)
        assert "cut off" in (verdict.reason or "")
        forged.raw.execute("DELETE FROM audit_texts WHERE seq > ?", [last])
        forged.rechain(1)
        assert forged.verify().whole
        assert forged.verify(anchor()).broken_at == last + 1


@given(row_numbers)
@settings(max_examples=ROWS, deadline=None)
def test_a_log_that_was_rewritten_with_all_its_hashes_is_found_by_an_anchor(seq: int) -> None:
    with log() as forged:
        forged.raw.execute("UPDATE audit_log SET target = 'tenants/x' WHERE seq = ?", [seq])
        forged.rechain(seq)
        assert forged.verify().whole
        verdict = forged.verify(anchor())
        assert verdict.broken_at == ROWS
        assert "rewritten" in (verdict.reason or "")


FORGERIES: dict[str, tuple[Callable[[Log], Any], int]] = {
    "a text is changed": (lambda log: log.raw.execute("UPDATE audit_texts SET text = 'x' WHERE seq = 4"), 4),
    "its salt": (lambda log: log.raw.execute("UPDATE audit_texts SET salt = 'x' WHERE seq = 4"), 4),
    "its tenant": (lambda log: log.raw.execute("UPDATE audit_texts SET tenant_id = 't5' WHERE seq = 4"), 4),
    "its place": (lambda log: log.raw.execute("UPDATE audit_texts SET place = 'after.x' WHERE seq = 4"), 4),
    "a text is gone": (lambda log: log.raw.execute("DELETE FROM audit_texts WHERE seq = 4"), 4),
    "all texts are gone": (lambda log: log.raw.execute("DELETE FROM audit_texts"), 1),
    "a text too many": (
        lambda log: log.raw.execute("INSERT INTO audit_texts VALUES (4, 'after.x', 't4', '', '')"),
        4,
    ),
    "a text behind the end": (
        lambda log: log.raw.execute("INSERT INTO audit_texts VALUES (99, 'after.x', 't4', '', '')"),
        99,
    ),
    "the head is gone": (lambda log: log.raw.execute("DELETE FROM audit_head"), ROWS + 1),
    "the head is behind": (lambda log: log.raw.execute("UPDATE audit_head SET seq = 3"), ROWS),
    "the head is ahead": (lambda log: log.raw.execute("UPDATE audit_head SET seq = 30"), ROWS + 1),
    "the head's hash": (lambda log: log.raw.execute("UPDATE audit_head SET hash = 'x'"), ROWS),
    "all rows are gone": (lambda log: log.raw.execute("DELETE FROM audit_log"), 1),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_other_forgeries(name: str) -> None:
    forge, broken_at = FORGERIES[name]
    with log() as forged:
        forge(forged)
        verdict = forged.verify()
        assert verdict.broken_at == broken_at, verdict
        assert verdict.reason


def test_nothing_is_changed_that_could_not_be_recorded() -> None:
    with log() as forged:
        forged.raw.execute("DELETE FROM audit_head")
        with pytest.raises(AuditBroken), forged.database.write() as session:
            record(session, LOCAL, "tenant.create", "tenants/x", tenant_id="x")


def test_anchors_are_read_back_as_they_are_printed() -> None:
    assert read_anchor(str(anchor())) == anchor()
    for wrong in (
        "",
        "5",
        "5:",
        ":" + "a" * 64,
        "5:" + "g" * 64,
        "x:" + "a" * 64,
        "-5:" + "a" * 64,
        "9" * 19 + ":" + "a" * 64,
    ):
        with pytest.raises(InvalidValue, match="SEQ:HASH"):
            read_anchor(wrong)
