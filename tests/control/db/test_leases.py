"""Leases: one holder at a time, by the database's clock alone, whatever a holder believes."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import update

from loraplex.control import leases
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import Lease
from loraplex.control.db.tables import Tenant
from loraplex.control.leases import LeaseLost, Term
from support.control.plane import ControlPlane, at_once

TTL_S = 600.0
"""Longer than any test: time passes where a test ends a lease."""


def take(plane: ControlPlane, holder: str) -> Term | None:
    return leases.take(plane.database, "releases", holder, TTL_S)


def held(plane: ControlPlane, holder: str) -> Term:
    term = take(plane, holder)
    assert term is not None
    return term


def end(database: Database) -> None:
    """The time of the lease is over, by the database's clock."""
    with database.write() as session:
        past = database_now(session) - timedelta(seconds=1)
        session.execute(update(Lease).values(until=past))


def check(plane: ControlPlane, term: Term) -> None:
    with plane.database.write() as session:
        leases.check(session, term)


def test_one_holds_it_and_stays_in_its_term(plane: ControlPlane) -> None:
    first = take(plane, "a")
    assert first == Term("releases", "a", 1)
    assert take(plane, "b") is None
    assert take(plane, "a") == first
    check(plane, first)


def test_its_end_moves_it_and_the_one_before_is_refused(plane: ControlPlane) -> None:
    old = held(plane, "a")
    end(plane.database)
    with pytest.raises(LeaseLost, match="'releases'"):
        check(plane, old)
    new = held(plane, "b")
    assert new.number == old.number + 1
    assert take(plane, "a") is None
    check(plane, new)
    end(plane.database)
    again = held(plane, "a")
    assert again.number == 3
    with pytest.raises(LeaseLost):
        check(plane, old)  # the same holder, in another term
    check(plane, again)


def test_it_is_given_up_at_once_and_only_by_its_holder(plane: ControlPlane) -> None:
    old = held(plane, "a")
    leases.give_up(plane.database, old)
    new = held(plane, "b")
    leases.give_up(plane.database, old)
    assert take(plane, "a") is None
    check(plane, new)


def test_of_many_that_take_it_at_once_one_gets_it(plane: ControlPlane) -> None:
    found = at_once(*[lambda holder=holder: take(plane, holder) for holder in "abcdefgh"])
    assert [term for term in found if isinstance(term, Exception)] == []
    terms = [term for term in found if term is not None]
    assert len(terms) == 1
    assert terms[0].number == 1


def test_the_time_is_the_databases(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose clock is wrong holds it no longer, and takes it no earlier."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    held(plane, "a")
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert take(plane, "b") is None
    with plane.database.read() as session:
        left = session.get_one(Lease, "releases").until - database_now(session)
    assert timedelta(seconds=TTL_S - 120) < left <= timedelta(seconds=TTL_S)


def test_a_holder_that_stalls_in_its_transaction_is_the_last_or_changes_nothing(plane: ControlPlane) -> None:
    """It has checked, its time ends, and another server comes: that one gets the lease after its commit."""
    other = Database(plane.url)
    stalled, taken, lasts_s = threading.Event(), threading.Event(), 0.5

    def successor() -> Term | None:
        stalled.wait(60)
        term = leases.take(other, "releases", "b", TTL_S)
        taken.set()
        return term

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(successor)
        while True:
            old = leases.take(plane.database, "releases", "a", lasts_s)
            assert old is not None
            with contextlib.suppress(LeaseLost), plane.database.write() as session:
                leases.check(session, old)
                until = session.get_one(Lease, "releases").until
                while database_now(session) <= until:
                    taken.wait(0.02)
                session.add(Tenant(id="late", weight=1.0, limits={}, created_at=database_now(session)))
                stalled.set()
                assert not taken.wait(0.3), "it has the lease before the one before has ended"
                break
            lasts_s *= 2  # a machine that is too busy for so short a term
        new = waiting.result(60)
    assert new is not None
    assert new.number == old.number + 1
    with pytest.raises(LeaseLost), plane.database.write() as session:
        session.add(Tenant(id="too-late", weight=1.0, limits={}, created_at=database_now(session)))
        leases.check(session, old)
    with other.read() as session:
        assert session.get(Tenant, "late") is not None
        assert session.get(Tenant, "too-late") is None
    other.close()


def test_a_lease_that_a_clock_which_went_back_left_behind_can_be_taken(plane: ControlPlane) -> None:
    old = held(plane, "a")
    with plane.database.write() as session:
        ahead = database_now(session) + timedelta(seconds=1.5 * TTL_S)
        session.execute(update(Lease).values(until=ahead))
    assert take(plane, "b") is None
    with plane.database.write() as session:
        session.execute(update(Lease).values(until=ahead + timedelta(seconds=TTL_S)))
    assert take(plane, "a") == old, "its holder goes on"
    with plane.database.write() as session:
        session.execute(update(Lease).values(until=ahead + timedelta(seconds=TTL_S)))
    assert take(plane, "b") == Term("releases", "b", 2)
    with pytest.raises(LeaseLost):
        check(plane, old)
