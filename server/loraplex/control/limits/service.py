"""The limits of a request from its beginning to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loraplex.control.background import BackgroundTasks
from loraplex.control.errors import RateLimited
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.limiter import Limiter
from loraplex.control.limits.plan import plan_admission, plan_request
from loraplex.control.types import NO_LIMITS, PLACES, RATES, Admission, Limits, Principal, Reservation

BATCH_PERCENT = 50
"""The share of a batch's tokens that budgets count where the tenant has no `batch_percent`."""


class RequestLimits:
    """`admit` before anything is done for a request, `reserve` before it is served, `settle` after it, once, whatever
    became of it. `server`: limits over all tenants together. Rates and places are the limiter's to decide; budgets are
    in the database, and in slices here. `clock` is monotonic seconds.

    A request that was admitted has cost one of its rate. Only where the server is to blame that nothing came of it is
    that given back (docs/adr/0025).
    """

    def __init__(
        self,
        limiter: Limiter,
        budgets: Budgets,
        *,
        server: Limits = NO_LIMITS,
        background: BackgroundTasks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._budgets = budgets
        self._server = server
        self._background = background or BackgroundTasks()
        self._clock = clock
        self._reports: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Before the first request. Raises LimitsNotShared."""
        await self._limiter.start()
        self._reports = self._background.start("budget-reports", self._budgets.run)

    async def admit(self, request_id: str, principal: Principal) -> Admission:
        """Take one request from every request rate there is, or nothing. `request_id` is the server's own and unique.
        Raises RateLimited, LimitsUnavailable."""
        plan = plan_admission(principal, self._server)
        if not plan.rates:
            return Admission(request_id)
        decision = await self._limiter.reserve(_admission_id(request_id), plan)
        return Admission(request_id, decision.windows, self._clock() + decision.again_s)

    async def reserve(
        self,
        admission: Admission,
        principal: Principal,
        *,
        prompt_tokens: int,
        asked_tokens: int | None,
        default_tokens: int,
        n: int,
    ) -> Reservation:
        """Take `prompt_tokens` + n answers, a place and n sequences from every limit there is, or nothing.

        `asked_tokens` is what the request asks for an answer; None takes `default_tokens`, or what the limits could
        ever allow if that is less. The reservation's `max_output_tokens` is what was reserved for each answer and must
        not be exceeded. `prompt_tokens` counts each prompt once.

        Raises NeverFits for what no wait would make fit, RateLimited for what a wait would, QuotaSpent for what a new
        period would; LimitsUnavailable, and DatabaseUnavailable, DatabaseBusy where no slice of a budget is to be had,
        InvalidKey where its tenant is no more. Then the admission is still to be settled.
        """
        plan = plan_request(
            principal,
            self._server,
            prompt_tokens=prompt_tokens,
            asked_tokens=asked_tokens,
            default_tokens=default_tokens,
            n=n,
        )
        request_id = admission.request_id
        await self._budgets.take_budget(request_id, plan.budgets)
        try:
            decision = await self._limiter.reserve(request_id, plan)
        except BaseException as error:
            await self._budgets.settle(request_id, used_tokens=None)
            if isinstance(error, RateLimited):
                error.windows = {**admission.windows, **error.windows}
            raise
        return Reservation({**admission.windows, **decision.windows}, max_output_tokens=plan.output_tokens)

    def again_s(self, admission: Admission) -> float:
        """Seconds until the request rates would let another request in."""
        return max(0.0, admission.again_at - self._clock())

    async def settle(self, admission: Admission, *, used_tokens: int | None) -> None:
        """Give back what was reserved and not used. 0: nothing but one request of the rate. None: nothing at all. A
        second time it does nothing."""
        request_id = admission.request_id
        try:
            await self._limiter.settle(request_id, _admission_id(request_id), used_tokens=used_tokens)
        finally:
            await self._budgets.settle(request_id, used_tokens=used_tokens)

    def of_batches(self) -> RequestLimits:
        """The limits of requests of batches, from the same budgets."""
        return BatchLimits(self._limiter, self._budgets, server=self._server, clock=self._clock)

    async def close(self) -> None:
        """After the last request: what this server holds of budgets is given back."""
        if self._reports is not None:
            self._reports.cancel()
            await asyncio.wait([self._reports])
        await self._budgets.close()
        await self._limiter.close()


class BatchLimits(RequestLimits):
    """Limits of requests of batches: no rates and no places, which are for callers who wait. Budgets count the
    tenant's `batch_percent` of their tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._percents: dict[str, int] = {}

    async def admit(self, request_id: str, principal: Principal) -> Admission:
        return Admission(request_id)

    async def reserve(self, admission: Admission, principal: Principal, **asked: Any) -> Reservation:
        percent = principal.tenant_limits.batch_percent or BATCH_PERCENT
        alone = replace(
            principal,
            key_limits=_without_rates(principal.key_limits),
            tenant_limits=_without_rates(principal.tenant_limits),
        )
        plan = plan_request(alone, _without_rates(self._server), **asked)
        budgets = tuple(replace(one, cost=_share(one.cost, percent)) for one in plan.budgets)
        await self._budgets.take_budget(admission.request_id, budgets)
        self._percents[admission.request_id] = percent
        return Reservation({}, max_output_tokens=plan.output_tokens)

    async def settle(self, admission: Admission, *, used_tokens: int | None) -> None:
        percent = self._percents.pop(admission.request_id, BATCH_PERCENT)
        used = None if used_tokens is None else _share(used_tokens, percent)
        await self._budgets.settle(admission.request_id, used_tokens=used)


def _without_rates(limits: Limits) -> Limits:
    return replace(limits, **dict.fromkeys((*RATES.values(), *PLACES.values())))


def _share(tokens: int, percent: int) -> int:
    return -(-tokens * percent // 100)


def _admission_id(request_id: str) -> str:
    """Under which the limiter holds the request itself; the rest is held under the request's own id."""
    return f"{request_id}/admission"
