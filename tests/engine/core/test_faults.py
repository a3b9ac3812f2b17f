"""What a device does wrong, through the core's own seam: too little memory, numbers that are not finite, the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from loraplex.engine.execution.device_errors import DeviceLost
from loraplex.engine.scheduling.step_budget import FIRST_CALM, LAST_CALM, PAUSES_S, StepBudget
from loraplex.engine.types import ScheduledSequence, StepPlan
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import Fault

Where = Literal["submit", "collect"]
both_lookaheads = pytest.mark.parametrize("lookahead", [0, 1])
both_places = pytest.mark.parametrize("where", ["submit", "collect"])


def at_most(
    room: int, where: Where, needs: Callable[[ScheduledSequence], int]
) -> Callable[[StepPlan], Fault]:
    """A device that computes no step whose slices need more than `room`."""

    def fault(plan: StepPlan) -> Fault:
        return Fault(where, memory=True) if sum(map(needs, plan.scheduled)) > room else Fault()

    return fault


def tokens(row: ScheduledSequence) -> int:
    return row.num_tokens


@both_lookaheads
@both_places
def test_steps_that_do_not_fit_are_recomputed_in_smaller_ones(lookahead: Literal[0, 1], where: Where) -> None:
    engine = CoreEngine(lookahead=lookahead)
    engine.runner.fault = at_most(3, where, tokens)
    requests = [
        engine.add("base"),
        engine.add("one", adapter(1), prompt_logprobs=1),
        engine.add("two", adapter(2), tenant_id="globex"),
        engine.add("three", adapter(1), logprobs=2),
    ]
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected(request, 5)
    stats = engine.core.stats()
    assert stats.num_out_of_memory >= 4  # 64 tokens, 32, 16, 8, 4
    assert (stats.num_kv_blocks_used, stats.num_leases) == (0, 0)


@both_lookaheads
def test_tokens_that_were_drawn_before_memory_ran_out_are_kept(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    requests = [engine.add("a", max_tokens=12), engine.add("b", adapter(1), max_tokens=12)]
    while min(len(engine.tokens("a")), len(engine.tokens("b"))) < 4:
        engine.step(0.01)
    before = {name: engine.tokens(name) for name in "ab"}
    engine.runner.fault = at_most(1, "collect", tokens)
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected(request, 12)
        assert (
            engine.tokens(request.request_id)[: len(before[request.request_id])] == before[request.request_id]
        )
    assert engine.core.stats().num_preemptions == 1, "only one runs in steps of one token"


@both_lookaheads
@both_places
def test_request_that_does_not_fit_alone_ends_and_others_go_on(
    lookahead: Literal[0, 1], where: Where
) -> None:
    engine = CoreEngine(lookahead=lookahead)
    engine.runner.fault = at_most(2, where, lambda row: row.num_tokens + row.start // 48)
    small = [engine.add("a"), engine.add("b", adapter(1)), engine.add("c", tenant_id="globex")]
    engine.add("large", prompt_ids=tuple(range(1, 100)))  # 1 + 98 // 48 = 3
    engine.run()
    for request in small:
        assert engine.tokens(request.request_id) == expected(request, 5)
    assert engine.error("large") == "server_overloaded"
    error = engine.end("large").error
    assert error is not None
    assert "too little memory" in error.message


def test_a_lack_of_memory_that_passes_ends_nobody() -> None:
    """Not even a token alone fits for a while: the engine waits, and does not spin meanwhile."""
    engine = CoreEngine()
    request = engine.add("r")
    engine.runner.fault = lambda plan: Fault("collect", memory=True) if engine.now < 0.6 else Fault()
    steps = 0
    while engine.core.has_work:
        engine.step()
        steps += 1
        idle_s = engine.core.idle_s()
        engine.now += idle_s or 0.001
        assert steps < 100
    assert engine.tokens("r") == expected(request, 5)
    assert engine.core.stats().num_out_of_memory < 15


def test_aborts_and_deadlines_hold_while_the_engine_waits_for_memory() -> None:
    engine = CoreEngine()
    engine.add("aborted")
    engine.add("late", deadline=0.01)
    engine.runner.fault = lambda plan: Fault("collect", memory=True)
    while (engine.core.idle_s() or 0) <= 0:
        engine.step()
    assert (engine.core.idle_s() or 0) <= PAUSES_S[0]
    engine.core.abort("aborted")
    engine.step(0.02)
    assert engine.end("aborted").finish_reason == "abort"
    assert engine.error("late") == "deadline_exceeded"
    assert engine.core.idle_s() is None


def test_steps_grow_again_and_more_slowly_each_time_that_this_is_too_much() -> None:
    size = StepBudget(64)
    assert size.ran_out(64, 0, None, 0.0)
    assert size.ran_out(32, 0, None, 0.0)
    assert size.limit == 16
    for _ in range(FIRST_CALM - 1):
        size.computed()
    assert size.limit == 16
    size.computed()
    assert size.limit == 32
    size.ran_out(32, 0, None, 0.0)
    for _ in range(2 * FIRST_CALM - 1):
        size.computed()
    assert size.limit == 16
    size.computed()
    assert size.limit == 32
    for _ in range(2 * FIRST_CALM):
        size.computed()
    assert size.limit == 64
    for _ in range(LAST_CALM + 1):
        size.computed()
    size.ran_out(64, 0, None, 0.0)
    for _ in range(FIRST_CALM):
        size.computed()
    assert size.limit == 64, "long calm forgets what was too much before"
    assert size.num_ran_out == 4


@both_lookaheads
def test_kv_that_is_not_finite_is_found_by_nobody(lookahead: Literal[0, 1]) -> None:
    """Blocks that were named before anybody noticed are not found any more, and those of other requests are."""
    engine = CoreEngine(lookahead=lookahead)
    prompt, other = tuple(range(1, 50)), tuple(range(100, 150))
    engine.add("good", prompt_ids=other)
    engine.run()
    poisoned = False

    def once(plan: StepPlan) -> Fault:
        nonlocal poisoned
        found = [i for i, row in enumerate(plan.scheduled) if row.start + row.num_tokens == 49]
        if not found or poisoned:
            return Fault()
        poisoned = True
        return Fault(poisoned=frozenset(found))

    engine.runner.fault = once
    engine.add("bad", prompt_ids=prompt)
    engine.run()
    assert engine.error("bad") == "internal_error"
    again = engine.add("again", prompt_ids=prompt)
    engine.add("good again", prompt_ids=other)
    engine.run()
    assert engine.tokens("again") == expected(again, 5)
    for name, cached in (("again", 0), ("good again", 48)):
        usage = engine.end(name).usage
        assert usage is not None
        assert usage.cached_tokens == cached


@both_lookaheads
def test_a_row_that_fails_in_its_prompt_leaves_nothing_to_be_found(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead, max_num_batched_tokens=16)
    prompt = tuple(range(1, 81))
    engine.runner.fault = lambda plan: Fault(
        rows=frozenset(
            i for i, row in enumerate(plan.scheduled) if row.start <= 50 < row.start + row.num_tokens
        )
    )
    neighbour = engine.add("neighbour", tenant_id="globex", prompt_ids=(5, 6), max_tokens=20)
    engine.add("bad", prompt_ids=prompt)
    engine.run()
    assert engine.error("bad") == "internal_error"
    assert engine.tokens("neighbour") == expected(neighbour, 20)
    engine.runner.fault = lambda plan: Fault()
    again = engine.add("again", prompt_ids=prompt)
    engine.run()
    assert engine.tokens("again") == expected(again, 5)
    usage = engine.end("again").usage
    assert usage is not None
    assert usage.cached_tokens == 0


@both_places
def test_a_device_that_is_lost_ends_the_engine(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request gets an error from the engine: the process ends, and its supervisor reports it."""
    engine = CoreEngine()
    engine.add("r")

    def lost(self: object) -> Exception:
        return DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr(Fault, "error", lost)
    engine.runner.fault = lambda plan: Fault(where)
    with pytest.raises(DeviceLost, match="illegal"):
        engine.core.step()
    assert engine.events == []
