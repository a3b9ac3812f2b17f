"""The slices of token budgets that this server holds, from which requests take without asking the database.

For one event loop. The database never has less of a slice than this server believes: a slice shrinks
here first, and grows only when the database has answered. So nothing is overspent, whatever becomes of an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.errors import DatabaseUnavailable, InvalidKey, QuotaSpent, RateLimited
from loraplex.control.limits.budget_store import BudgetStore, SliceAsk, SliceGrant
from loraplex.control.limits.periods import in_words, period_end
from loraplex.control.limits.plan import BudgetCharge, Owner
from loraplex.control.types import BudgetPeriod, ReachedLimit

REPORT_INTERVAL_S = 5.0
ANSWER_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 5.0
HELD_RETRY_S = 1.0
"""When others give back what they hold of a budget cannot be known."""
SHORT_FOR_S = 1.0
"""How long a budget that had not enough left is not asked for more."""
SPARE_REQUESTS = 8
"""A new slice is enough for this number of requests like the one that needs it, if the budget allows."""
_MAX_TRIES = 16
log = structlog.get_logger("loraplex")


@dataclass(slots=True, eq=False)
class _Slice:
    """In tokens since its making: `spent` + `held` ≤ `granted`. `recent` were taken since the last round of reports,
    `wanted` is what requests wait for. `budget_spent` of the whole budget, and of that `reported` by this slice, when
    the database last answered; `asked`: it may know this slice, answered or not. Times are of the clock. `short_until`:
    before that, no more is to be had; `usable_until`: afterwards the database may soon give it to others."""

    charge: BudgetCharge
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: bool = False
    starts_at: datetime | None = None
    ends_at: float = math.inf
    usable_until: float = -math.inf
    granted: int = 0
    drawn: int = 0
    spent: int = 0
    held: int = 0
    recent: int = 0
    reported: int = 0
    wanted: int = 0
    budget_spent: int = 0
    short_until: float = -math.inf
    is_over: bool = False

    @property
    def free(self) -> int:
        return self.granted - self.spent - self.held

    def shrink(self, free: int) -> None:
        self.granted = min(self.granted, self.spent + self.held + free)


_Name = tuple[Owner, BudgetPeriod]


class Budgets:
    """`take` before a request is served, `settle` after it. `ask` runs a function of the store in a worker thread;
    `clock` is monotonic seconds. A request waits `answer_timeout_s` for the database; once one request has timed out,
    the others don't wait for the same answer."""

    def __init__(
        self,
        store: BudgetStore,
        ask: Callable[..., Awaitable[Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._store = store
        self._ask = ask
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._slices: dict[_Name, _Slice] = {}
        self._over: list[_Slice] = []  # to be given back
        self._live: dict[str, tuple[tuple[_Slice, int], ...]] = {}
        self._waiting: list[tuple[asyncio.Future[None], Sequence[_Slice]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._asked_at: float | None = None  # while the database has not answered

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def take_budget(self, request_id: str, charges: Sequence[BudgetCharge]) -> None:
        """Take all charges from slices that this server holds, or nothing; where they are too small, larger ones are
        asked for. The same request again, while it is not settled, takes nothing more.

        Raises QuotaSpent where a budget is spent, RateLimited where it is not and the rest is held for other requests,
        DatabaseUnavailable, DatabaseBusy where no slice is to be had, InvalidKey where the tenant is no more."""
        if not charges or request_id in self._live:
            return
        for _ in range(_MAX_TRIES):
            lacking = [charge for charge in charges if self._slice(charge).free < charge.cost]
            if not lacking:
                taken = tuple((self._slice(charge), charge.cost) for charge in charges)
                for piece, cost in taken:
                    piece.held += cost
                    piece.recent += cost
                self._live[request_id] = taken
                return
            await self._need(lacking)
        raise RateLimited("Too many requests share what is left of a budget.", retry_after_s=HELD_RETRY_S)

    async def settle(self, request_id: str, *, used_tokens: int | None) -> None:
        """Spend what was used, give back the rest. None: nothing was. A second time it does nothing.

        Afterwards the database counts what was spent even if this server is killed. A database that does not answer
        gets the report later."""
        undrawn = []
        for piece, cost in self._live.pop(request_id, ()):
            piece.held -= cost
            piece.spent += min(used_tokens or 0, cost)
            if piece.spent > piece.drawn and not piece.is_over:
                undrawn.append(piece)
        if undrawn:
            with contextlib.suppress(LoraplexError):
                await self._refreshed(undrawn)

    async def run(self, *, interval_s: float = REPORT_INTERVAL_S) -> None:
        """Report to the database regularly what is spent, keep the slices that are in use and give back the others;
        until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.report()

    async def report(self) -> None:
        """One round of `run`. Reports that fail are sent later."""
        pieces = [piece for piece in self._slices.values() if piece.starts_at is not None]
        for piece in pieces:
            if not piece.wanted:
                piece.shrink(2 * piece.recent)
            if not piece.wanted and not piece.held and not piece.free:
                self._end(piece)
        pieces = [*(piece for piece in pieces if not piece.is_over), *self._over]
        if pieces:
            with contextlib.suppress(LoraplexError):
                await self._refreshed(pieces)
        for piece in pieces:
            piece.recent = 0

    async def close(self) -> None:
        """Give all slices back. What still runs then is not counted."""
        for piece in list(self._slices.values()):
            self._end(piece)
        if self._over:
            with contextlib.suppress(LoraplexError):
                await self._refreshed(self._over, timeout_s=CLOSE_TIMEOUT_S)
        if self._over:
            log.warning("budget_slices_not_given_back", slices=len(self._over))

    def _slice(self, charge: BudgetCharge) -> _Slice:
        """This server's slice of a budget; an empty one where it has none, or its period has ended."""
        now = self._clock()
        name = (charge.owner, charge.period)
        piece = self._slices.get(name)
        if piece is not None and now >= piece.ends_at:
            self._end(piece)
            piece = None
        if piece is None:
            piece = self._slices[name] = _Slice(charge)
        elif charge.limit != piece.charge.limit:
            if charge.limit < piece.charge.limit:
                piece.shrink(0)
            piece.short_until = -math.inf
            piece.charge = charge
        if now >= piece.usable_until:
            piece.shrink(0)
        return piece

    def _end(self, piece: _Slice) -> None:
        """Give a slice back and count no later charges: its period is over, or the server stops."""
        piece.is_over = True
        name = (piece.charge.owner, piece.charge.period)
        if self._slices.get(name) is piece:
            del self._slices[name]
        if piece.asked and self._clock() < piece.ends_at:
            self._over.append(piece)

    async def _need(self, lacking: Sequence[BudgetCharge]) -> None:
        """Returns when trying again makes sense."""
        now = self._clock()
        for charge in lacking:
            if now < self._slice(charge).short_until:
                raise _refusal(charge, self._slice(charge))
        pieces = [self._slice(charge) for charge in lacking]
        for piece, charge in zip(pieces, lacking, strict=True):
            piece.wanted += charge.cost
        try:
            await self._refreshed(pieces)
        finally:
            for piece, charge in zip(pieces, lacking, strict=True):
                piece.wanted -= charge.cost
        if any(piece.is_over and piece.starts_at is None for piece in pieces):
            raise InvalidKey("Incorrect API key provided, or it has expired or was revoked.")

    async def _refreshed(self, pieces: Sequence[_Slice], *, timeout_s: float | None = None) -> None:
        """Wait until these slices were sent to the database, and answered. Those that wait meanwhile are sent together.
        Raises DatabaseUnavailable, DatabaseBusy."""
        loop = asyncio.get_running_loop()
        timeout_s = self._answer_timeout_s if timeout_s is None else timeout_s
        if self._asked_at is not None and loop.time() - self._asked_at > timeout_s:
            raise DatabaseUnavailable()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((waiter, tuple(pieces)))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        await asyncio.wait([waiter], timeout=timeout_s)
        if not waiter.done():
            waiter.cancel()
            raise DatabaseUnavailable()
        waiter.result()

    async def _work(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                self._asked_at = asyncio.get_running_loop().time()
                failure: BaseException | None = None
                try:
                    await self._refresh(list({id(p): p for _, pieces in waiting for p in pieces}.values()))
                except Exception as error:
                    failure = error
                self._asked_at = None
                if failure is not None and all(waiter.done() for waiter, _ in waiting):
                    log.error("budgets_not_refreshed", reason=str(failure), exc_info=failure)
                for waiter, _ in waiting:
                    if waiter.done():
                        continue
                    if failure is not None:
                        waiter.set_exception(failure)
                    else:
                        waiter.set_result(None)
        finally:
            self._worker = self._asked_at = None

    async def _refresh(self, pieces: Sequence[_Slice]) -> None:
        pieces = [piece for piece in pieces if not piece.is_over or piece in self._over]
        asks = [_ask_of(piece) for piece in pieces]
        asked_at = self._clock()
        grants = await self._ask(self._store.refresh, asks)
        for piece, ask, grant in zip(pieces, asks, grants, strict=True):
            if ask.gives_back:
                self._over.remove(piece)
            elif grant is None:
                self._slices.pop((piece.charge.owner, piece.charge.period), None)
                piece.is_over = True
            else:
                self._apply(piece, ask, grant, asked_at)

    def _apply(self, piece: _Slice, ask: SliceAsk, grant: SliceGrant, asked_at: float) -> None:
        piece.starts_at = grant.starts_at
        piece.ends_at = math.inf if grant.ends_in_s is None else asked_at + grant.ends_in_s
        # Requests that begin in the first half have the other half of the time to end in.
        piece.usable_until = asked_at + self._store.slice_s / 2
        piece.budget_spent = grant.budget_spent
        piece.reported = ask.spent
        if piece.charge.limit != ask.limit or piece.is_over:
            return  # it was lowered meanwhile, and what it was is too much
        piece.granted = grant.granted
        piece.drawn = max(piece.drawn, grant.drawn)
        if grant.granted < ask.granted + ask.wanted:
            piece.short_until = self._clock() + SHORT_FOR_S


def _ask_of(piece: _Slice) -> SliceAsk:
    charge = piece.charge
    piece.asked = True
    may_draw = max(2 * piece.recent, piece.wanted)
    piece.drawn = max(piece.spent, min(piece.drawn, piece.spent + may_draw))
    wanted = max(0, piece.wanted - piece.free)
    return SliceAsk(
        slice_id=piece.id,
        owner=charge.owner,
        tenant_id=charge.tenant_id,
        period=charge.period,
        limit=charge.limit,
        starts_at=piece.starts_at,
        spent=piece.spent,
        granted=piece.granted,
        drawn=piece.drawn,
        wanted=wanted,
        spare=max(0, max(SPARE_REQUESTS * piece.wanted, 2 * piece.recent) - max(0, piece.free)),
        may_draw=may_draw,
        gives_back=piece.is_over,
    )


def _refusal(charge: BudgetCharge, piece: _Slice) -> LoraplexError:
    budget = f"The {charge.owner.kind}'s budget of {in_words(charge.limit, charge.period)}"
    reached = ReachedLimit(charge.owner.kind, "budget")
    spent = piece.budget_spent + piece.spent - piece.reported
    if spent + charge.cost <= charge.limit:
        return RateLimited(
            f"{budget} is not spent, and what is left of it is held for requests that run.",
            retry_after_s=HELD_RETRY_S,
            reached=reached,
        )
    left = max(0, charge.limit - spent)
    end = None if piece.starts_at is None else period_end(charge.period, piece.starts_at)
    again = "" if end is None else f" It begins again at {end:%Y-%m-%d %H:%M} UTC."
    return QuotaSpent(
        f"{budget} has {left} tokens left, and this request may take {charge.cost}.{again}", reached=reached
    )
