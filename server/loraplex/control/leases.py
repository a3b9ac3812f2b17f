"""Leases: which of all servers on a database does what one of them is to do.

A lease is held for some seconds by the database's clock, which all servers share. Each new holder begins a new term. A
holder that stalls may believe that it still leads; so it checks its term in each transaction that it leads by
(`check`). The check keeps the lease's row locked until the transaction ends: another server becomes the holder before
the check, which then fails, or after the commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import Lease
from loraplex.control.errors import ControlError

NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class LeaseLost(ControlError):
    """Another server does this now, or this one was too late to go on; nothing was changed."""

    code = "lease_lost"

    def __init__(self, name: str) -> None:
        super().__init__(f"This server does not hold the lease '{name}' any more; another one goes on.")


@dataclass(frozen=True, slots=True)
class Term:
    """A holder's time with a lease. `number` counts the terms of all holders."""

    name: str
    holder: str
    number: int


def take(database: Database, name: str, holder: str, ttl_s: float) -> Term | None:
    """Hold the lease for `ttl_s` seconds from now on: a holder stays in its term, another server gets a new one once
    the holder's time is over. None where another one holds it. Raises DatabaseUnavailable, DatabaseBusy."""
    # Not in turn with other writers: a lease must not end because they queue up.
    with database.write(ages_caches=False, in_turn=False) as session:
        insert = database.insert(Lease).values(name=name, holder="", term=0, until=NEVER)
        session.execute(insert.on_conflict_do_nothing())
        row = _locked(session, name)
        now = database_now(session)  # after the wait for the row
        ttl = timedelta(seconds=ttl_s)
        # An end far ahead: the clock went back, and the holder, which renews it to less, is gone.
        if row.until <= now or (row.holder != holder and row.until > now + 2 * ttl):
            row.holder, row.term = holder, row.term + 1
        elif row.holder != holder:
            return None
        row.until = now + ttl
        return Term(name, holder, row.term)


def check(session: Session, term: Term) -> None:
    """The first statement of a transaction that only the holder may make. Raises LeaseLost."""
    row = _locked(session, term.name)
    is_held = (row.holder, row.term) == (term.holder, term.number)
    if not is_held or row.until <= database_now(session):
        raise LeaseLost(term.name)


def give_up(database: Database, term: Term) -> None:
    """Let another server take the lease at once. Raises DatabaseUnavailable, DatabaseBusy."""
    with database.write(ages_caches=False, in_turn=False) as session:
        row = _locked(session, term.name)
        if (row.holder, row.term) == (term.holder, term.number):
            row.until = NEVER


def _locked(session: Session, name: str) -> Lease:
    query = select(Lease).where(Lease.name == name).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).one()
