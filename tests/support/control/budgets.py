"""Servers that take from one token budget, on a clock moved by hand, and a database that can go away for each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Literal

from sqlalchemy import select

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Budget, BudgetSlice
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.limits.budget_store import BudgetStore, budget_states
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.plan import BudgetCharge, Owner
from loraplex.control.types import BudgetPeriod, BudgetState, Limits
from support.control.plane import FakeClock

ACME = Owner("tenant", "acme")
SLICE_S = 300.0


class Replica:
    """One server's budgets. `reach`: what becomes of a call to the database: it answers, it is away, or it does what
    was asked and the answer is lost."""

    def __init__(self, database: Database, clock: FakeClock, run: Callable[[Any], Any]) -> None:
        store = BudgetStore(database, slice_s=SLICE_S, now=lambda _: clock.now())
        self.budgets = Budgets(store, self._ask, clock=clock, answer_timeout_s=60.0)
        self.reach: Literal["answers", "away", "lost"] = "answers"
        self.asked = 0
        self._run = run
        self._ids = (f"r{number}" for number in itertools.count())

    async def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        if self.reach == "away":
            raise DatabaseUnavailable()
        answer = function(*args)
        if self.reach == "lost":
            raise DatabaseUnavailable()
        return answer

    def take(self, *charges: BudgetCharge) -> str:
        name = next(self._ids)
        self._run(self.budgets.take_budget(name, charges))
        return name

    def settle(self, name: str, used: int | None) -> None:
        self._run(self.budgets.settle(name, used_tokens=used))

    def use(self, charge: BudgetCharge, used: int | None = None) -> None:
        self.settle(self.take(charge), charge.cost if used is None else used)

    def report(self) -> None:
        self._run(self.budgets.report())

    def close(self) -> None:
        self._run(self.budgets.close())


class World:
    """A database with the tenant `acme`, and as many servers as are asked for."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = FakeClock(epoch=1_800_000_000.0 - 1_800_000_000 % 86400)  # a day's first moment
        self._runner = asyncio.Runner()

    def replica(self) -> Replica:
        return Replica(self.database, self.clock, self._runner.run)

    def state(self, limit: int, period: BudgetPeriod = "day", owner: Owner = ACME) -> BudgetState:
        limits = Limits(token_budget=limit, budget_period=period)
        with self.database.read() as session:
            return budget_states(session, owner.kind, {owner.id: limits}, now=self.clock.now())[owner.id]

    def promised(self) -> int:
        """All tokens that are spent or granted, in the database's eyes."""
        with self.database.read() as session:
            spent = sum(row.spent for row in session.scalars(select(Budget)))
            return spent + sum(row.granted for row in session.scalars(select(BudgetSlice)))

    def close(self) -> None:
        self._runner.close()


def charge(cost: int, limit: int = 1000, period: BudgetPeriod = "day", owner: Owner = ACME) -> BudgetCharge:
    return BudgetCharge(owner, None if owner.kind == "server" else "acme", limit, period, cost)
