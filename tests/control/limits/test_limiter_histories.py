"""Limiters against a book that keeps every charge there ever was: whatever comes, they decide as the book says, so that
what was reserved is always what was settled, what was given back and what is live."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.types import Limits, Principal
from support.control.limiters import Held, LimiterKit, in_process_kit, redis_kit
from support.control.plane import caller

SERVER = Limits(tokens_per_minute=3000, requests_per_minute=40, max_concurrency=9, max_sequences=14)
TENANTS = (
    Limits(tokens_per_minute=1000, max_concurrency=4, max_sequences=6),
    Limits(requests_per_minute=7, tokens_per_minute=2000, max_output_tokens=300),
    Limits(),
)
KEYS = (Limits(requests_per_minute=5), Limits(tokens_per_minute=700, max_concurrency=2), Limits())


def _callers() -> list[Principal]:
    return [
        caller(f"t{i}", key_id=f"k{i}{j}", tenant_limits=of_tenant, key_limits=of_key)
        for i, of_tenant in enumerate(TENANTS)
        for j, of_key in enumerate(KEYS)
    ]


@dataclass
class Book:
    """For each rate all charges in order, [when, cost], with the limit that they share; for each owner who runs, and
    how many sequences."""

    rates: dict[tuple[object, str], tuple[int, list[list[float]]]] = field(default_factory=dict)
    running: dict[object, int] = field(default_factory=dict)
    sequences: Counter[object] = field(default_factory=Counter)

    def spent(self, name: tuple[object, str], now: float) -> float:
        """Seconds of the period, gone through from the first charge."""
        limit, charges = self.rates[name]
        until = -math.inf
        for at, cost in charges:
            until = max(until, at) + cost * PERIOD_S / limit
        return max(0.0, until - now)


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.5, 3.0, 20.0, 70.0]),  # time that passes
        st.integers(0, 8),  # who asks
        st.integers(1, 300),  # tokens of prompts
        st.integers(0, 400),  # asked for each answer
        st.integers(1, 3),  # answers
        st.integers(0, 12),  # which of the live ones ends afterwards, if there are enough
        st.one_of(st.none(), st.integers(0, 1500)),  # what it used
    ),
    max_size=50,
)
_Event = tuple[float, int, int, int, int, int, int | None]


def _follow(kit: LimiterKit, events: list[_Event], seen: Counter[str]) -> None:
    book, callers, now = Book(), _callers(), 0.0
    live: list[tuple[Held, list[list[float]]]] = []
    for passed, who, prompt, asked, n, ends, used in events:
        kit.advance(passed)
        now += passed
        try:
            held = kit.reserve(callers[who], prompt, asked, n, server=SERVER)
        except NeverFits:
            seen["never fit"] += 1
        except RateLimited as refusal:
            seen["had to wait"] += 1
            _check_refusal(book, refusal, callers[who], now, prompt + n * asked, n)
        else:
            seen["passed"] += 1
            live.append((held, _enter(book, held, now, kit)))
        if ends < len(live):
            seen["settled"] += 1
            held, charges = live.pop(ends)
            kit.settle(held, used)
            for charge, of in zip(charges, held.plan.rates, strict=True):
                if used is None:
                    charge[1] = 0
                elif of.what == "tokens":
                    charge[1] = min(used, of.cost)
            for place in held.plan.places:
                book.running[place.owner] -= 1
                book.sequences[place.owner] -= held.plan.held["sequences"]


def _enter(book: Book, held: Held, now: float, kit: LimiterKit) -> list[list[float]]:
    """Charges what passed, which must have fitted, and checks what was told of it."""
    charges = []
    left: dict[str, list[int]] = {"requests": [], "tokens": []}
    for of in held.plan.rates:
        limit, all_charges = book.rates.setdefault((of.owner, of.what), (of.limit, []))
        charges.append([now, float(of.cost)])
        all_charges.append(charges[-1])
        spent = book.spent((of.owner, of.what), now)
        assert spent <= PERIOD_S + kit.tolerance_s, of
        left[of.what].append(int((PERIOD_S - spent) * limit / PERIOD_S + 1e-3))
    for place in held.plan.places:
        running = book.running[place.owner] = book.running.get(place.owner, 0) + 1
        assert place.limits["concurrency"] is None or running <= place.limits["concurrency"]
        book.sequences[place.owner] += held.plan.held["sequences"]
        most = place.limits["sequences"]
        assert most is None or book.sequences[place.owner] <= most
    told = {what: window.remaining for what, window in held.decision.windows.items()}
    assert told == {what: pytest.approx(min(each), abs=1) for what, each in left.items() if each}
    return charges


def _check_refusal(book: Book, refusal: RateLimited, who: Principal, now: float, tokens: int, n: int) -> None:
    """Something is full, and the longest wait is what was told."""
    waits = []
    owners = {"key": who.key_limits, "tenant": who.tenant_limits, "server": SERVER}
    for (owner, what), (limit, _) in book.rates.items():
        kind, name = owner.kind, owner.id  # type: ignore[attr-defined]
        if name in (who.key_id, who.tenant_id, "") and getattr(owners[kind], f"{what}_per_minute"):
            cost = 1 if what == "requests" else tokens
            waits.append(book.spent((owner, what), now) + cost * PERIOD_S / limit - PERIOD_S)
    for owner, running in book.running.items():
        kind, name = owner.kind, owner.id  # type: ignore[attr-defined]
        if name in (who.key_id, who.tenant_id, "") and running >= (owners[kind].max_concurrency or math.inf):
            waits.append(1.0)
        most = owners[kind].max_sequences or math.inf
        if name in (who.key_id, who.tenant_id, "") and book.sequences[owner] + n > most:
            waits.append(1.0)
    assert refusal.retry_after_s == pytest.approx(max(waits), abs=1e-3)


def _run(make: Callable[[], LimiterKit], examples: int) -> None:
    seen = Counter[str]()

    @settings(max_examples=examples, deadline=None)
    @given(_EVENTS)
    def histories(events: list[_Event]) -> None:
        kit = make()
        try:
            _follow(kit, events, seen)
        finally:
            kit.close()

    histories()
    print(f"\n{examples} histories: {dict(seen)}")


def test_in_one_process() -> None:
    _run(in_process_kit, 80)


@pytest.mark.slow
def test_in_redis() -> None:
    _run(redis_kit, 25)


@pytest.mark.soak
@pytest.mark.parametrize("make", [in_process_kit, redis_kit])
def test_for_long(make: Callable[[], LimiterKit]) -> None:
    _run(make, 2000)
