"""Rounds of looks at all watched releases, by the one server that has the lease."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import structlog
from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from loraplex.adapters.errors import LoraplexError
from loraplex.control import leases
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseOutcome, ReleaseRun, RunningArmRow, WebhookDelivery
from loraplex.control.db.tables import Release
from loraplex.control.errors import DatabaseBusy, DatabaseUnavailable
from loraplex.control.leases import LeaseLost, Term
from loraplex.control.usage.outcome_inbox import remove_unwatched
from loraplex.lifecycle.releases.deliveries import put_delivery
from loraplex.lifecycle.releases.look import Change, look, remove_old_rows

LEASE = "releases"
LEASE_S = 5.0
"""Time without a round after which another server leads."""
RENEW_S = 1.0
IDLE_LOOK_S = 5.0
"""Time between looks at a guarded release while no request of it runs or ends: a look costs milliseconds."""
MAX_LOOKS = 32
"""Looks at releases of one tenant in a round, which keep other tenants waiting: each of the 256 that a tenant may have
is looked at in one of eight rounds."""
TELL_AGAIN_S = 60.0
"""Time after which it is logged again that a release cannot be looked at."""
log = structlog.get_logger("loraplex")


class Watched(NamedTuple):
    """A release that is watched now, by its key."""

    tenant_id: str
    name: str
    revision: int
    status: str


def _by_turns(watched: Sequence[Watched]) -> list[Watched]:
    """One release of each tenant, then a second one of each, and so on: nobody waits for all of another tenant's."""
    tenants = itertools.groupby(watched, key=lambda each: each.tenant_id)
    turns = itertools.zip_longest(*(list(own) for _, own in tenants))
    return [each for turn in turns for each in turn if each is not None]


def _end_of(step: int, since: float, schedule: Sequence[Mapping[str, int]] | None) -> float:
    """The time at which the step of a schedule ends; infinite without one."""
    if schedule is None or step >= len(schedule):
        return math.inf
    return since + schedule[step]["for_seconds"]


class Rounds:
    """Calls are synchronous, in one thread at a time. `holder` is this server's own name for itself; with `announces`
    each end of a release is put into the deliveries of the webhook. `now` gives seconds since the epoch, by default the
    database's."""

    def __init__(
        self,
        database: Database,
        holder: str,
        *,
        announces: bool = False,
        now: Callable[[Session], float] = lambda session: database_now(session).timestamp(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._holder = holder
        self._announces = announces
        self._now = now
        self._clock = clock
        self._renewed = 0.0
        self.term: Term | None = None
        """This server's term with the lease; None where it does not lead, as far as it knows."""
        self.watched: Sequence[Watched] = ()
        """Releases that were watched at the last round, by whichever server."""
        self._looked: dict[Watched, float] = {}  # seconds since the epoch
        self._told: dict[Watched, float] = {}  # by the clock

    def round(self, on_change: Callable[[Change], None]) -> None:
        """Look at each watched release if this server leads, or can. Without anything to watch nobody leads.
        Raises DatabaseUnavailable, DatabaseBusy."""
        try:
            due = self._read()
        except LoraplexError:
            self._lead(None)
            raise
        if due is None:
            self.give_up()
            return
        try:
            self._renew(at_once=True)
            if self.term is None:
                return
            for watched, now in due.items():
                self._renew()
                self._look(watched, on_change)
                self._looked[watched] = now
            self._tidy()
        except LeaseLost:
            self._lead(None)

    def give_up(self) -> None:
        """Let another server lead at once. Raises DatabaseUnavailable, DatabaseBusy."""
        if self.term is not None:
            term = self.term
            self._lead(None)
            leases.give_up(self._database, term)

    def _read(self) -> dict[Watched, float] | None:
        """Releases to look at, with the time of the reading; None where nothing is watched or waits."""
        of = ReleaseRun
        plan = and_(
            Release.tenant_id == of.tenant_id, Release.name == of.name, Release.revision == of.revision
        )
        query = (
            select(of.tenant_id, of.name, of.revision, of.status, of.step, of.since, Release.schedule)
            .join(Release, plan, isouter=True)
            .where(of.status.in_(("running", "paused")))
        )
        with self._database.read() as session:
            rows = session.execute(query.order_by(of.tenant_id, of.name)).all()
            self.watched = _by_turns([Watched(*row[:4]) for row in rows])
            known = set(self.watched)
            self._looked = {each: at for each, at in self._looked.items() if each in known}
            self._told = {each: at for each, at in self._told.items() if each in known}
            if self.watched:
                now = self._now(session)
                ends = {Watched(*row[:4]): _end_of(row.step, row.since, row.schedule) for row in rows}
                return self._due(session, ends, now)
            rest = (ReleaseOutcome, RunningArmRow, *((WebhookDelivery,) if self._announces else ()))
            is_left = any(session.scalars(select(table).limit(1)).first() is not None for table in rest)
            return {} if is_left else None

    def _due(self, session: Session, ends: Mapping[Watched, float], now: float) -> dict[Watched, float]:
        """Running releases with new evidence, or whose step has ended since their last look, and all that were not
        looked at for `IDLE_LOOK_S`; of each tenant those that have waited longest, at most `MAX_LOOKS`. `ends`: when
        each one's step ends."""
        news: set[tuple[str, str]] = set()
        for table in (ReleaseOutcome, RunningArmRow):
            news.update(session.execute(select(table.tenant_id, table.name).distinct()).tuples())
        due = []
        for each in self.watched:
            looked = self._looked.get(each, -math.inf)
            has_news = (each.tenant_id, each.name) in news or looked < ends[each] <= now
            if (each.status == "running" and has_news) or not 0 <= now - looked < IDLE_LOOK_S:
                due.append(each)
        looks: Counter[str] = Counter()
        chosen = set()
        for each in sorted(due, key=lambda each: self._looked.get(each, -math.inf)):
            looks[each.tenant_id] += 1
            if looks[each.tenant_id] <= MAX_LOOKS:
                chosen.add(each)
        return {each: now for each in self.watched if each in chosen}

    def _renew(self, *, at_once: bool = False) -> None:
        if at_once or self._clock() - self._renewed >= RENEW_S:
            began = self._clock()
            self._lead(leases.take(self._database, LEASE, self._holder, LEASE_S))
            self._renewed = began
            if self.term is None and not at_once:
                raise LeaseLost(LEASE)

    def _lead(self, term: Term | None) -> None:
        if term != self.term:
            leads = term is not None
            log.info("release_leader", leads=leads, term=(term or self.term or Term("", "", 0)).number)
        self.term = term

    def _look(self, watched: Watched, on_change: Callable[[Change], None]) -> None:
        assert self.term is not None
        try:
            with self._database.write() as session:
                leases.check(session, self.term)
                run = session.get(ReleaseRun, (watched.tenant_id, watched.name))
                if run is None or run.status not in ("running", "paused"):
                    return
                change = look(session, run, self._now(session))
                if self._announces and change is not None:
                    put_delivery(session, change)
        except (LeaseLost, DatabaseUnavailable, DatabaseBusy):
            raise
        except Exception as error:
            # One that cannot be looked at must not keep the others from it.
            self._tell(watched, error)
            return
        if change is not None:
            on_change(change)

    def _tell(self, watched: Watched, error: Exception) -> None:
        if self._clock() - self._told.get(watched, -math.inf) < TELL_AGAIN_S:
            return
        self._told[watched] = self._clock()
        log.error(
            "release_not_watched",
            tenant=watched.tenant_id,
            adapter=watched.name,
            reason=str(error)[:200],
            exc_info=None if isinstance(error, LoraplexError) else error,
        )

    def _tidy(self) -> None:
        assert self.term is not None
        with self._database.write(ages_caches=False) as session:
            leases.check(session, self.term)
            remove_unwatched(session)
            remove_old_rows(session, self._now(session))
