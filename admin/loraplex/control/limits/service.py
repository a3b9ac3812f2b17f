"""The limits of a request from its beginning to its end."""

from __future__ import annotations

import asyncio

from loraplex.control.background import BackgroundTasks
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.limiter import Limiter
from loraplex.control.limits.plan import plan_request
from loraplex.control.types import NO_LIMITS, Limits, Principal, Reservation


class RequestLimits:
    """`reserve` before a request is served, `settle` after it, once, whatever became of it. `server`: limits over all
    tenants together. Rates and places are the limiter's to decide; budgets are in the database, and in slices here."""

    def __init__(
        self,
        limiter: Limiter,
        budgets: Budgets,
        *,
        server: Limits = NO_LIMITS,
        background: BackgroundTasks | None = None,
    ) -> None:
        self._limiter = limiter
        self._budgets = budgets
        self._server = server
        self._background = background or BackgroundTasks()
        self._reports: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Before the first request. Raises LimitsNotShared."""
        await self._limiter.start()
        self._reports = self._background.start("budget-reports", self._budgets.run)

    async def reserve(
        self,
        request_id: str,
        principal: Principal,
        *,
        prompt_tokens: int,
        asked_tokens: int | None,
        default_tokens: int,
        n: int,
    ) -> Reservation:
        """Take one request and `prompt_tokens` + n answers from every limit there is, or nothing.

        `request_id` is the server's own and unique. `asked_tokens` is what the request asks for an answer; None takes
        `default_tokens`, or what the limits could ever allow if that is less. The reservation's `max_output_tokens` is
        what was reserved for each answer and must not be exceeded. `prompt_tokens` counts each prompt once.

        Raises NeverFits for what no wait would make fit, RateLimited for what a wait would, QuotaSpent for what a new
        period would; DatabaseUnavailable, DatabaseBusy where no slice of a budget is to be had, InvalidKey where its
        tenant is no more.
        """
        plan = plan_request(
            principal,
            self._server,
            prompt_tokens=prompt_tokens,
            asked_tokens=asked_tokens,
            default_tokens=default_tokens,
            n=n,
        )
        await self._budgets.take(request_id, plan.budgets)
        try:
            decision = await self._limiter.reserve(request_id, plan)
        except BaseException:
            await self._budgets.settle(request_id, used_tokens=None)
            raise
        return Reservation(
            request_id,
            requests=decision.requests,
            tokens=decision.tokens,
            max_output_tokens=plan.output_tokens,
        )

    async def settle(self, reservation: Reservation, *, used_tokens: int | None) -> None:
        """Give back what was reserved and not used. None: the request was refused after all, and costs nothing. A
        second time it does nothing."""
        request_id = reservation.reservation_id
        try:
            await self._limiter.settle(request_id, used_tokens=used_tokens)
        finally:
            await self._budgets.settle(request_id, used_tokens=used_tokens)

    async def close(self) -> None:
        """After the last request: what this server holds of budgets is given back."""
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.wait([self._reports])
        await self._budgets.close()
        await self._limiter.close()
