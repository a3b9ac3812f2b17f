"""Token budgets in the database: what is spent of each, and the slices that servers hold of it.

A slice counts up from its making: `spent` of `granted` is used, and the rest is its server's alone. So a budget has
left what its limit is, less the spent of slices that were given back, less what the others were granted. Reports give
sums and not differences: one that is made twice counts once.

A server that is not heard of for a slice's time loses it. Then `drawn` of it counts as spent, which a server never
goes beyond without telling first, and the rest comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import Budget, BudgetSlice, Tenant
from loraplex.control.limits.periods import period_end, period_start
from loraplex.control.limits.plan import Owner
from loraplex.control.types import BudgetPeriod, BudgetState, LimitOwner, Limits

SPARE_PART = 8
"""A slice beyond what is needed at once is at most this part of what is left."""
KEEP_EXPIRED = timedelta(days=1)
"""How long a server that comes back may still say what it really spent."""


@dataclass(frozen=True, slots=True)
class SliceAsk:
    """A server's report about its slice, and its request for more. All in tokens; `spent`, `granted` and `drawn` are
    sums since its making, and what the database holds becomes no less than these two. `wanted` is what requests wait
    for, `spare` what may come soon, `may_draw` how much may be spent before the next report. `starts_at`: the period it
    was made in, None for a new one. `gives_back`: the slice ends with this."""

    slice_id: str
    owner: Owner
    tenant_id: str | None
    period: BudgetPeriod
    limit: int
    starts_at: datetime | None
    spent: int
    granted: int
    drawn: int
    wanted: int = 0
    spare: int = 0
    may_draw: int = 0
    gives_back: bool = False


@dataclass(frozen=True, slots=True)
class SliceGrant:
    """`spent` in the whole budget, as far as reported, and `limit`. `ends_in_s`: until the period's end."""

    starts_at: datetime
    ends_in_s: float | None
    granted: int
    drawn: int
    budget_spent: int


class BudgetStore:
    """Calls are synchronous and atomic; async callers use `Database.run`. `slice_s`: how long a slice stays a
    server's that is not heard of. `now` returns the time of a transaction: the database's, which all servers share."""

    def __init__(
        self,
        database: Database,
        *,
        slice_s: float = 300.0,
        now: Callable[[Session], datetime] = database_now,
    ) -> None:
        self._database = database
        self.slice_s = slice_s
        self._now = now

    def refresh(self, asks: Sequence[SliceAsk]) -> list[SliceGrant | None]:
        """One answer an ask, in order; None for a slice that was given back or cannot be: its period has ended, or its
        tenant is no more. Raises DatabaseUnavailable, DatabaseBusy."""
        with self._database.write(ages_caches=False) as session:
            now = self._now(session)
            return [self._refresh(session, ask, now) for ask in asks]

    def _refresh(self, session: Session, ask: SliceAsk, now: datetime) -> SliceGrant | None:
        start = period_start(ask.period, now)
        row = session.get(BudgetSlice, ask.slice_id)
        if row is None and ask.starts_at is not None:
            return None
        if row is not None and row.starts_at != start:
            session.delete(row)
            return None
        budget = _open_budget(session, ask, start)
        if budget is None:
            return None
        if ask.gives_back:
            if row is not None:
                budget.spent += ask.spent
                session.delete(row)
            return None
        if row is None:
            row = _new_slice(ask, budget)
            session.add(row)
        others = _others(session, budget, row.id, now)
        room = ask.limit - budget.spent - sum(other.granted for other in others)
        granted = max(ask.granted, ask.spent, min(room, ask.granted + ask.wanted))
        part = (room - granted) // SPARE_PART
        if part >= max(1, ask.wanted):  # near its end others need what is left
            granted += min(ask.spare, part)
        row.spent = ask.spent
        row.granted = granted
        # A server that gave up some of its slice has reported more before than it may spend by now.
        row.drawn = min(granted, max(ask.drawn, ask.spent + ask.may_draw))
        row.expires_at = now + timedelta(seconds=self.slice_s)
        session.flush()
        end = period_end(ask.period, start)
        return SliceGrant(
            starts_at=start,
            ends_in_s=None if end is None else (end - now).total_seconds(),
            granted=row.granted,
            drawn=row.drawn,
            budget_spent=budget.spent + row.spent + sum(other.spent for other in others),
        )


def budget_states(
    session: Session, kind: LimitOwner, limits: Mapping[str, Limits], *, now: datetime | None = None
) -> dict[str, BudgetState]:
    """Budgets by id of the owners with these limits that have one: the tokens spent, as far as servers have reported.
    The slice of a killed server is held until a server requests one."""
    wanted = {owner_id: found for owner_id, found in limits.items() if found.token_budget is not None}
    if not wanted:
        return {}
    now = now or database_now(session)
    slices = (
        select(
            BudgetSlice.owner_id,
            BudgetSlice.period,
            BudgetSlice.starts_at,
            func.sum(BudgetSlice.spent),
            func.sum(BudgetSlice.granted - BudgetSlice.spent),
        )
        .where(BudgetSlice.owner_kind == kind, BudgetSlice.owner_id.in_(wanted))
        .group_by(BudgetSlice.owner_id, BudgetSlice.period, BudgetSlice.starts_at)
    )
    in_slices = {tuple(row[:3]): (int(row[3]), int(row[4])) for row in session.execute(slices)}
    budgets = select(Budget).where(Budget.owner_kind == kind, Budget.owner_id.in_(wanted))
    given_back = {(row.owner_id, row.period, row.starts_at): row.spent for row in session.scalars(budgets)}
    states = {}
    for owner_id, found in wanted.items():
        assert found.token_budget is not None
        assert found.budget_period is not None
        start = period_start(found.budget_period, now)
        name = (owner_id, found.budget_period, start)
        spent, held = in_slices.get(name, (0, 0))
        spent += given_back.get(name, 0)
        states[owner_id] = BudgetState(
            limit=found.token_budget,
            period=found.budget_period,
            starts_at=start,
            ends_at=period_end(found.budget_period, start),
            spent=spent,
            held=held,
            left=max(0, found.token_budget - spent - held),
        )
    return states


def _open_budget(session: Session, ask: SliceAsk, start: datetime) -> Budget | None:
    """The row of this period. With a new one, those of earlier periods go. None: the tenant has gone."""
    name = (ask.owner.kind, ask.owner.id, ask.period, start)
    budget = session.get(Budget, name)
    if budget is None:
        if ask.tenant_id is not None and session.get(Tenant, ask.tenant_id) is None:
            return None
        session.execute(
            delete(Budget).where(
                Budget.owner_kind == ask.owner.kind,
                Budget.owner_id == ask.owner.id,
                Budget.period == ask.period,
            )
        )
        budget = Budget(
            owner_kind=ask.owner.kind,
            owner_id=ask.owner.id,
            period=ask.period,
            starts_at=start,
            tenant_id=ask.tenant_id,
            spent=0,
        )
        session.add(budget)
        session.flush()
    return budget


def _new_slice(ask: SliceAsk, budget: Budget) -> BudgetSlice:
    return BudgetSlice(
        id=ask.slice_id,
        owner_kind=budget.owner_kind,
        owner_id=budget.owner_id,
        period=budget.period,
        starts_at=budget.starts_at,
    )


def _others(session: Session, budget: Budget, own_id: str, now: datetime) -> list[BudgetSlice]:
    """The slices of other servers, after those that are expired were taken back."""
    query = select(BudgetSlice).where(
        BudgetSlice.owner_kind == budget.owner_kind,
        BudgetSlice.owner_id == budget.owner_id,
        BudgetSlice.period == budget.period,
        BudgetSlice.starts_at == budget.starts_at,
        BudgetSlice.id != own_id,
    )
    living = []
    with session.no_autoflush:
        for row in session.scalars(query).all():
            if row.expires_at <= now - KEEP_EXPIRED:
                budget.spent += row.drawn
                session.delete(row)
                continue
            if row.expires_at <= now:
                row.spent = row.granted = row.drawn
            living.append(row)
    return living
