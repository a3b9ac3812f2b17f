"""The charge of one request to its caller's limits, from before its body is read until its answer ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import structlog

from loraplex.api.context import DataContext
from loraplex.api.errors import from_exception, invalid
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.metrics import LimitsOutcome, Metrics
from loraplex.control.errors import NeverFits, QuotaSpent, RateLimited
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import Admission, Principal, ReachedLimit, Reservation
from loraplex.http.errors import ClientGone

log = structlog.get_logger("loraplex.api")


class Charge:
    """Made by `admitted`. `reserve` at most once."""

    def __init__(
        self, limiter: RequestLimits, metrics: Metrics, context: DataContext, principal: Principal
    ) -> None:
        self.principal = principal
        self._limiter = limiter
        self._metrics = metrics
        self._context = context
        self._admission = Admission(context.internal_id)
        self._seconds = 0.0

    async def admit(self) -> None:
        """One request of its rates. Raises what the limiter raises."""
        began = time.monotonic()
        with anyio.CancelScope(shield=True):
            try:
                self._admission = await self._limiter.admit(self._context.internal_id, self.principal)
            except Exception as error:
                self._metrics.limits_decided(_outcome(error), time.monotonic() - began, _reached(error))
                raise
        self._seconds = time.monotonic() - began

    async def reserve(self, plan: GenerationPlan, source: str) -> Reservation:
        """The rest. `source` is the field that holds the prompt. Raises ApiError (400) for what can never fit, and what
        the limiter raises."""
        began = time.monotonic()
        outcome: LimitsOutcome = "allowed"
        reached: ReachedLimit | None = None
        try:
            with anyio.CancelScope(shield=True):
                reservation = await self._limiter.reserve(
                    self._admission,
                    self.principal,
                    prompt_tokens=plan.tokens_read,
                    asked_tokens=plan.asked,
                    default_tokens=max(plan.max_tokens),
                    n=plan.num_sequences,
                )
            return reservation
        except Exception as error:
            outcome, reached = _outcome(error), _reached(error)
            if isinstance(error, NeverFits):
                # The limiter knows three causes; which field each is depends on the route.
                fields = {"max_tokens": plan.asked_field, "n": plan.sequences_field(source)}
                raise invalid(fields.get(error.param or "", source), error.message) from error
            raise
        finally:
            self._metrics.limits_decided(outcome, self._seconds + time.monotonic() - began, reached)

    async def settle(self, error: BaseException | None) -> None:
        """`error` is what ended the request, if it failed."""
        used: int | None = self._context.prompt_tokens + self._context.completion_tokens
        if not used and not _costs_a_request(error):
            used = None
        with anyio.CancelScope(shield=True):
            try:
                await self._limiter.settle(self._admission, used_tokens=used)
            except Exception:
                # The answer is out; what could not be settled runs out by itself.
                log.exception("settle_failed", id=self._context.internal_id)

    def refusal(self, error: Exception) -> Exception:
        """The error; with a later Retry-After where the refused request has cost one of its rates."""
        answer = from_exception(error)
        again_s = self._limiter.again_s(self._admission)
        if not answer.asks_to_retry or not _costs_a_request(error) or again_s <= (answer.retry_after_s or 0):
            return error
        answer.retry_after_s = again_s
        return answer


@asynccontextmanager
async def admitted(
    limiter: RequestLimits, metrics: Metrics, context: DataContext, principal: Principal
) -> AsyncIterator[Charge]:
    """Around the whole of a request whose caller is known: nothing is done for one that its rates do not let in. What
    the block raises comes out, with the true Retry-After."""
    charge = Charge(limiter, metrics, context, principal)
    await charge.admit()
    ended: BaseException | None = None
    try:
        yield charge
    except Exception as error:
        ended = error
        refusal = charge.refusal(error)
        if refusal is error:
            raise
        raise refusal from error
    except BaseException as error:
        ended = error
        raise
    finally:
        await charge.settle(ended)


def _outcome(error: Exception) -> LimitsOutcome:
    if isinstance(error, NeverFits):
        return "never_fits"
    if isinstance(error, RateLimited):
        return "rate_limit_exceeded"
    return "insufficient_quota" if isinstance(error, QuotaSpent) else "unavailable"


def _reached(error: Exception) -> ReachedLimit | None:
    return error.reached if isinstance(error, RateLimited | QuotaSpent) else None


def _costs_a_request(error: BaseException | None) -> bool:
    """Whether a request that computed nothing costs one of its rates: not if the server, or the load of others, is the
    cause."""
    if not isinstance(error, Exception) or isinstance(error, ClientGone):
        return True
    answer = from_exception(error)
    return answer.status < 500 if answer.is_own is None else answer.is_own
