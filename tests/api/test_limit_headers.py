"""What clients are told of limits is true to the second."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.errors import from_exception
from loraplex.api.limit_headers import duration, limit_headers
from loraplex.control.errors import RateLimited
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.types import NO_LIMITS, Decision, Limits
from support.control.limiters import whole_plan
from support.control.plane import FakeClock, caller


class Door:
    """A limiter that is asked for one request after the other, under one set of limits."""

    def __init__(self, limits: Limits, start: float) -> None:
        self.clock = FakeClock(seconds=start)
        self._limiter = InProcessLimiter(clock=self.clock)
        self._who = caller("acme", tenant_limits=limits)
        self._number = 0

    def ask(self, tokens: int) -> Decision:
        plan = whole_plan(self._who, NO_LIMITS, prompt_tokens=tokens, asked_tokens=0, default_tokens=1, n=1)
        self._number += 1
        return asyncio.run(self._limiter.reserve(str(self._number), plan))

    def refused(self, tokens: int) -> int:
        """The `Retry-After` that a client sees."""
        with pytest.raises(RateLimited) as caught:
            self.ask(tokens)
        return int(from_exception(caught.value).headers()["Retry-After"])


@given(
    st.integers(1, 100),
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 9, allow_nan=False)), min_size=1, max_size=12),
    st.floats(0, 1e7, allow_nan=False),
)
def test_a_refused_request_passes_when_it_was_told_and_not_a_second_earlier(
    requests: int, tokens: int, asked: list[tuple[int, float]], start: float
) -> None:
    door = Door(Limits(requests_per_minute=requests, tokens_per_minute=tokens), start)
    for wanted, passed in asked:
        cost = min(wanted, tokens)
        try:
            door.ask(cost)
        except RateLimited:
            wait = door.refused(cost)
            assert 1 <= wait <= 60
            door.clock.advance(wait - 1)
            if wait > 1:
                assert door.refused(cost) == 1
            door.clock.advance(1)
            door.ask(cost)
        door.clock.advance(passed)


@given(st.integers(1, 500), st.integers(1, 40), st.floats(0, 1e7, allow_nan=False))
def test_whole_limit_is_back_after_the_reset(limit: int, spent: int, start: float) -> None:
    door = Door(Limits(requests_per_minute=limit), start)
    for _ in range(min(spent, limit)):
        decision = door.ask(1)
    headers = dict(limit_headers(decision.windows))
    assert headers["x-ratelimit-limit-requests"] == str(limit)
    assert headers["x-ratelimit-remaining-requests"] == str(limit - min(spent, limit))
    reset = headers["x-ratelimit-reset-requests"]
    minutes, _, rest = reset.rpartition("m")
    door.clock.advance(int(minutes or 0) * 60 + int(rest.removesuffix("s")))
    after = door.ask(1).windows.get("requests")
    assert after is not None
    assert after.remaining == limit - 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.2, "1s"), (20.0000000003, "20s"), (60, "1m0s"), (361.5, "6m2s"), (3600, "1h0m0s")],
)
def test_times_are_written_in_whole_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text
