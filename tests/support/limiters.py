"""Limiters for the conformance suite, each with its clock: one moved by hand, or the real one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from loraplex.control.errors import RateLimited
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.limiter import Limiter
from loraplex.control.limits.plan import LimitPlan, plan_request
from loraplex.control.types import NO_LIMITS, Decision, Limits, Principal
from support.control import FakeClock, caller


class LimiterKit:
    """One limiter as tests use it: calls are plain functions, `advance` lets its time pass.

    `tolerance_s`: how far its times may be off, for limiters on a real clock. A test process has one event loop a kit,
    so that connections stay with it.
    """

    def __init__(self, limiter: Limiter, advance: Callable[[float], None], tolerance_s: float = 1e-6) -> None:
        self.limiter = limiter
        self.advance = advance
        self.tolerance_s = tolerance_s
        self._ids = (f"r{number}" for number in itertools.count())
        self._runner = asyncio.Runner()

    def reserve(
        self,
        principal: Principal,
        prompt: int = 1,
        asked: int | None = 1,
        n: int = 1,
        *,
        server: Limits = NO_LIMITS,
        request_id: str | None = None,
    ) -> Held:
        plan = plan_request(
            principal, server, prompt_tokens=prompt, asked_tokens=asked, default_tokens=256, n=n
        )
        name = request_id or next(self._ids)
        return Held(name, plan, self.run(self.limiter.reserve(name, plan)))

    def settle(self, held: Held, used: int | None) -> None:
        self.run(self.limiter.settle(held.request_id, used_tokens=used))

    def refused(self, principal: Principal, **asked: Any) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.reserve(principal, **asked)
        return caught.value

    def about(self, seconds: float) -> Any:
        """For a comparison with a time that was told."""
        return pytest.approx(seconds, abs=2 * self.tolerance_s)

    def run(self, call: Any) -> Any:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self.limiter.close())
        self._runner.close()


class Held:
    """A reservation with what it took."""

    def __init__(self, request_id: str, plan: LimitPlan, decision: Decision) -> None:
        self.request_id = request_id
        self.plan = plan
        self.decision = decision

    @property
    def tokens_left(self) -> int:
        assert self.decision.tokens is not None
        return self.decision.tokens.remaining

    @property
    def requests_left(self) -> int:
        assert self.decision.requests is not None
        return self.decision.requests.remaining


def in_process_kit() -> LimiterKit:
    clock = FakeClock()
    return LimiterKit(InProcessLimiter(clock=clock), clock.advance)


def tenant(name: str = "acme", **limits: int) -> Principal:
    """A caller whose tenant has these limits, and whose key has none."""
    return caller(name, tenant_limits=Limits(**limits))
