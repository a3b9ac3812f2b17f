"""A rate window against a model that goes through all charges there ever were."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.control.limits.gcra import PERIOD_S, RateWindow


@dataclass
class Replay:
    """The same window without any cleverness: all charges there ever were, gone through from the first each time."""

    charges: list[list[float]] = field(default_factory=list)

    def tat(self) -> float:
        tat = float("-inf")
        for at, seconds in self.charges:
            tat = max(tat, at) + seconds
        return tat


_EVENTS = st.lists(
    st.tuples(
        st.floats(0, 40, allow_nan=False),  # time that passes
        st.integers(1, 60),  # seconds of the period that are asked for
        st.floats(0, 1),  # the part of them that is used
        st.integers(0, 7),  # which of those held is settled afterwards; most numbers settle none
    ),
    max_size=60,
)


@given(_EVENTS)
def test_a_window_is_what_it_would_be_had_only_what_was_used_been_charged(events: list[Any]) -> None:
    window, replay, now = RateWindow(), Replay(), 0.0
    held: dict[str, tuple[list[float], float]] = {}
    for number, (passed, seconds, used, settled) in enumerate(events):
        now += passed
        wait = window.wait(seconds, now)
        assert wait == pytest.approx(max(0.0, max(replay.tat(), now) + seconds - PERIOD_S - now), abs=1e-6)
        if wait == 0.0:
            is_final = settled == 7  # nothing of it will be given back
            window.charge(seconds, now, None if is_final else f"r{number}")
            replay.charges.append([now, float(seconds)])
            if not is_final:
                held[f"r{number}"] = (replay.charges[-1], seconds * (1 - used))
        if settled < len(held):
            name = list(held)[settled]
            charge, unused = held.pop(name)
            window.give_back(name, unused)
            charge[1] -= unused
        assert window.spent(now) == pytest.approx(min(max(0.0, replay.tat() - now), PERIOD_S), abs=1e-6)
    # Whatever was settled when: in no stretch of time more than a period's worth and what flowed back meanwhile.
    for first, (start, _) in enumerate(replay.charges):
        total = 0.0
        for at, seconds in replay.charges[first:]:
            total += seconds
            assert total <= PERIOD_S + (at - start) + 1e-6
