"""What the engine says of the course of a request, and of the sizes of its steps."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import pytest

from loraplex.engine.reports import STEP_TOKENS
from loraplex.engine.types import Timing
from support.engine.core_engine import CoreEngine, adapter
from support.engine.fake_transport import Fate


def timing(engine: CoreEngine, name: str) -> Timing:
    found = engine.end(name).timing
    assert found is not None
    return found


def test_the_first_and_the_last_token_are_timed() -> None:
    engine = CoreEngine(lookahead=0)
    engine.add("r", max_tokens=4)
    for _ in range(4):
        engine.step(0.5)
    assert timing(engine, "r") == Timing(0.5, 0.5, 2.0, last_token_s=2.0, arrived=0.0)


def test_last_token_time_of_an_aborted_request_is_that_of_its_last_token() -> None:
    engine = CoreEngine(lookahead=0)
    engine.add("r", max_tokens=40)
    engine.step(0.5)
    engine.step(0.5)
    engine.now += 7.0
    engine.core.abort("r")
    engine.step(1.0)
    assert timing(engine, "r") == Timing(0.5, 0.5, 8.0, last_token_s=1.0, arrived=0.0)


def test_a_request_without_a_token_has_no_last_one() -> None:
    engine = CoreEngine(lookahead=0)
    engine.add("r")
    engine.core.abort("r")
    engine.step(0.5)
    assert timing(engine, "r").last_token_s is None


def test_preemptions_are_counted_by_request() -> None:
    engine = CoreEngine(num_blocks=6)
    names = [f"r{index}" for index in range(1, 4)]
    for index, name in enumerate(names):
        engine.add(name, adapter(index + 1), prompt_ids=(index + 1,) * 17, max_tokens=60)
    engine.run()
    of_requests = [timing(engine, name).num_preemptions for name in names]
    assert sum(of_requests) == engine.core.stats().num_preemptions > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_steps_are_counted_by_their_tokens(lookahead: Literal[0, 1]) -> None:
    """A chunk of a prompt counts what it computes; the last chunk and each later step count what they draw."""
    engine = CoreEngine(lookahead=lookahead, max_num_batched_tokens=16)
    engine.add("r", prompt_ids=tuple(range(1, 41)), max_tokens=3)
    engine.run()
    expected = [0] * (len(STEP_TOKENS) + 1)
    for num_tokens in (16, 16, 8 + 1, 1, 1):
        expected[bisect_left(STEP_TOKENS, num_tokens)] += 1
    stats = engine.core.stats()
    assert stats.steps_by_tokens == tuple(expected)
    assert stats.num_step_tokens == 40 + 3


def test_a_wait_for_the_adapter_is_timed() -> None:
    """From the arrival until it is on the device; a request that finds it there waits for nothing."""
    engine = CoreEngine(lookahead=0)
    engine.now = 5.0
    engine.transport.load_fate = lambda digest: Fate(2.0)
    engine.add("first", adapter(1), max_tokens=40)
    for _ in range(8):
        engine.step(0.5)
    engine.add("second", adapter(1), max_tokens=1)
    engine.run()
    first, second = timing(engine, "first"), timing(engine, "second")
    assert (first.arrived, second.arrived) == (5.0, 9.0)
    assert first.adapter_s is not None
    assert 2.0 <= first.adapter_s <= first.queue_s <= 3.5
    assert second.adapter_s is None


def test_a_request_that_ends_while_its_adapter_loads_has_waited_for_nothing_else() -> None:
    engine = CoreEngine(lookahead=0)
    engine.transport.load_fate = lambda digest: Fate(None)
    engine.add("waits", adapter(1))
    engine.add("base", max_tokens=1)
    engine.step(0.5)
    engine.step(0.5)
    engine.core.abort("waits")
    engine.run()
    found = timing(engine, "waits")
    assert found.adapter_s == found.queue_s == 1.0
    assert timing(engine, "base").adapter_s is None
