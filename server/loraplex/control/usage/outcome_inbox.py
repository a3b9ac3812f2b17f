"""Outcomes on their way from the ledger to the guard of a release: each is read once.

The transaction that writes a request's row into the ledger puts its outcome here; the one that counts it removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseOutcome, ReleaseRun
from loraplex.control.usage.outcome import Outcome
from loraplex.control.usage.records import Ended

WatchedArms = Mapping[tuple[str, str], tuple[int, int]]
"""The two versions of each release that is being run, by tenant and name."""


def watched_arms(session: Session, names: Iterable[tuple[str, str]]) -> WatchedArms:
    """The arms of those of these releases, by tenant and name, that a guard or a schedule moves now."""
    pairs, run = set(names), ReleaseRun
    if not pairs:
        return {}
    query = (
        select(run.tenant_id, run.name, run.control, run.candidate)
        .where(run.tenant_id.in_({tenant for tenant, _ in pairs}), run.name.in_({name for _, name in pairs}))
        .where(run.status == "running")
    )
    return {
        (tenant, name): (control, candidate) for tenant, name, control, candidate in session.execute(query)
    }


def put_outcomes(database: Database, session: Session, rows: Iterable[Ended], arms: WatchedArms) -> None:
    """Put in the outcomes of those requests that a running release sent to one of its arms. A request that named its
    version itself is none of them: its caller was not assigned by chance."""
    values = [
        _columns(row)
        for row in rows
        if row.key_hash and row.version in arms.get((row.tenant_id, row.adapter), ())
    ]
    if values:
        session.execute(database.insert(ReleaseOutcome).on_conflict_do_nothing(), values)


def read_outcomes(session: Session, tenant_id: str, name: str, limit: int) -> dict[str, Outcome]:
    """Up to `limit` outcomes of a release, by the ids that `remove_outcomes` takes; the first to end come first."""
    of = ReleaseOutcome
    query = select(of).where(of.tenant_id == tenant_id, of.name == name).order_by(of.ended_at, of.id)
    return {row.id: _outcome(row) for row in session.scalars(query.limit(limit))}


def remove_outcomes(session: Session, ids: Iterable[str]) -> None:
    """Call in the transaction that counts them."""
    session.execute(delete(ReleaseOutcome).where(ReleaseOutcome.id.in_(list(ids))))


def remove_unwatched(session: Session) -> None:
    """Remove outcomes that no guard will read: those of releases that are not run any more."""
    run = ReleaseRun
    watched = (
        select(run.name)
        .where(run.tenant_id == ReleaseOutcome.tenant_id, run.name == ReleaseOutcome.name)
        .where(run.status == "running")
    )
    session.execute(delete(ReleaseOutcome).where(~watched.exists()))


def _columns(row: Ended) -> dict[str, Any]:
    found = asdict(Outcome.of(row))
    return found | {"id": row.id, "name": found.pop("adapter"), "key_hash": _signed(row.key_hash)}


def _outcome(row: ReleaseOutcome) -> Outcome:
    return Outcome(
        tenant_id=row.tenant_id,
        adapter=row.name,
        version=row.version,
        key_hash=row.key_hash % 2**64,
        started_at=row.started_at,
        ended_at=row.ended_at,
        status=row.status,
        first_token_s=row.first_token_s,
        inter_token_s=row.inter_token_s,
        output_tokens=row.output_tokens,
    )


def _signed(key_hash: int) -> int:
    """The same 64 bits as databases keep them."""
    return key_hash - 2**64 if key_hash >= 2**63 else key_hash
