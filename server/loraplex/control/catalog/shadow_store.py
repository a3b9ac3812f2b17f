"""Answers of shadow versions: sums of each release, and for a while the texts of some samples."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.control.catalog.release_changes import MAX_REVISIONS
from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.release_tables import ShadowCount, ShadowText
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.release_types import ReleaseInfo, ShadowInfo, ShadowTexts

MOST_TEXTS = 200
"""Samples of an adapter whose texts are kept: the newest, of whichever release."""
TEXT_BYTES = 16 << 10
"""Most of each text that is kept, in UTF-8; the rest is cut off."""
TEXTS_KEPT = timedelta(days=7)
_SUMS = (
    "samples",
    "dropped",
    "failed",
    "exact",
    "diverged_at",
    "live_tokens",
    "shadow_tokens",
    "scored",
    "live_logprob",
    "shadow_logprob",
)


@dataclass(frozen=True, slots=True)
class ShadowKey:
    """A shadow version of a release, from revision `began` on."""

    tenant_id: str
    name: str
    began: int
    version: int


@dataclass(slots=True)
class ShadowSums:
    """Samples of one key that are still to be stored: `sums` by the names of `ShadowInfo`, and `texts`."""

    sums: dict[str, float] = field(default_factory=dict)
    texts: list[tuple[datetime, str, str, str]] = field(default_factory=list)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def add_all(self, later: ShadowSums) -> None:
        """Add what was summed up later."""
        self.add(later.sums)
        self.texts = (self.texts + later.texts)[-MOST_TEXTS:]

    def add_texts(self, prompt: str, answer: str, shadow_answer: str) -> None:
        """Keep the texts of a sample. The oldest go where there are more than are kept."""
        self.texts.append((utc_now(), cut(prompt), cut(answer), cut(shadow_answer)))
        del self.texts[:-MOST_TEXTS]


def cut(text: str) -> str:
    """The beginning of a text, of `TEXT_BYTES` at most; without characters that no database takes."""
    text = text[:TEXT_BYTES].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return text.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore")


def began_of(release: ReleaseInfo) -> int:
    """The revision from which on the samples of a release's shadow are summed up. The steps of a schedule are one."""
    return release.revision if release.began is None else release.began


class ShadowStore:
    """The tables of samples. All methods block; they raise DatabaseUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, batch: Mapping[ShadowKey, ShadowSums]) -> None:
        """Add these samples in one transaction. Those of versions that are deleted are forgotten. Of the same adapter,
        texts beyond `MOST_TEXTS` or older than `TEXTS_KEPT` are removed, and sums of releases that history has not."""
        with self._database.write(ages_caches=False) as session:
            for key in _living(session, batch):
                self._add_sums(session, key, batch[key].sums)
                if batch[key].texts:
                    session.add_all(_text_row(key, *texts) for texts in batch[key].texts)
                    session.flush()
                    _trim_texts(session, key)

    def _add_sums(self, session: Session, key: ShadowKey, sums: Mapping[str, float]) -> None:
        row = session.get(ShadowCount, (key.tenant_id, key.name, key.began, key.version))
        if row is None:
            row = ShadowCount(
                tenant_id=key.tenant_id,
                name=key.name,
                began=key.began,
                version=key.version,
                **dict.fromkeys(_SUMS, 0),
            )
            session.add(row)
            _forget_sums(session, key)
        for name, value in sums.items():
            setattr(row, name, getattr(row, name) + value)

    def read(self, tenant_id: str, name: str, began: int) -> ShadowInfo | None:
        """The sums of the release that began with this revision; None where it has no sample."""
        of = ShadowCount
        with self._database.read() as session:
            row = session.scalar(
                select(of)
                .where(of.tenant_id == tenant_id, of.name == name, of.began == began)
                .order_by(of.version.desc())
                .limit(1)
            )
            if row is None:
                return None
            return ShadowInfo(f"v{row.version}", row.began, **{sum_: getattr(row, sum_) for sum_ in _SUMS})

    def texts(self, tenant_id: str, name: str, began: int, *, limit: int = MOST_TEXTS) -> list[ShadowTexts]:
        """The kept texts of the release that began with this revision, the newest first."""
        of = ShadowText
        query = (
            select(of)
            .where(
                of.tenant_id == tenant_id, of.name == name, of.began == began, of.at > utc_now() - TEXTS_KEPT
            )
            .order_by(of.at.desc(), of.id)
            .limit(limit)
        )
        with self._database.read() as session:
            return [
                ShadowTexts(row.id, f"v{row.version}", row.at, row.prompt, row.answer, row.shadow_answer)
                for row in session.scalars(query)
            ]

    def remove_old_texts(self) -> int:
        """Remove the texts of all adapters that are older than `TEXTS_KEPT`. Returns how many went."""
        with self._database.write(ages_caches=False) as session:
            old = session.scalars(select(ShadowText.id).where(ShadowText.at <= utc_now() - TEXTS_KEPT)).all()
            _remove(session, old)
            return len(old)


def forget_shadows(session: Session, tenant_id: str, name: str) -> None:
    """Remove the sums and texts of an adapter that is deleted."""
    for table in (ShadowCount, ShadowText):
        session.execute(delete(table).where(table.tenant_id == tenant_id, table.name == name))


def _living(session: Session, keys: Collection[ShadowKey]) -> list[ShadowKey]:
    """Those whose version is not deleted."""
    of = AdapterVersion
    query = select(of.tenant_id, of.name, of.number).where(
        LIVING, of.tenant_id.in_({key.tenant_id for key in keys}), of.name.in_({key.name for key in keys})
    )
    found = set(session.execute(query).tuples())
    return [key for key in keys if (key.tenant_id, key.name, key.version) in found]


def _text_row(key: ShadowKey, at: datetime, prompt: str, answer: str, shadow_answer: str) -> ShadowText:
    return ShadowText(
        id=secrets.token_hex(16),
        tenant_id=key.tenant_id,
        name=key.name,
        began=key.began,
        version=key.version,
        at=at,
        prompt=prompt,
        answer=answer,
        shadow_answer=shadow_answer,
    )


def _trim_texts(session: Session, key: ShadowKey) -> None:
    of = ShadowText
    own = (of.tenant_id == key.tenant_id, of.name == key.name)
    surplus: Sequence[str] = session.scalars(
        select(of.id).where(*own).order_by(of.at.desc(), of.id).offset(MOST_TEXTS)
    ).all()
    old = session.scalars(select(of.id).where(*own, of.at <= utc_now() - TEXTS_KEPT)).all()
    _remove(session, {*surplus, *old})


def _forget_sums(session: Session, key: ShadowKey) -> None:
    of = ShadowCount
    session.execute(
        delete(of).where(
            of.tenant_id == key.tenant_id, of.name == key.name, of.began <= key.began - MAX_REVISIONS
        )
    )


def _remove(session: Session, ids: Iterable[str]) -> None:
    ids = sorted(ids)
    for first in range(0, len(ids), MOST_TEXTS):
        session.execute(delete(ShadowText).where(ShadowText.id.in_(ids[first : first + MOST_TEXTS])))
