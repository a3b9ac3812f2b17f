"""State slots from admission to the end of a sequence: random histories, and single cases by hand."""

from __future__ import annotations

import functools

import pytest

from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_runner import Fault
from support.simulator.histories import Summary, Violation, play
from support.simulator.state_bugs import STATE_BUGS

HISTORIES = range(40)
BUGS = {bug.__name__: bug for bug in STATE_BUGS}


@functools.cache
def played() -> Summary:
    total = Summary()
    for seed in HISTORIES:
        total.add(play(seed, states=True))
    return total


def test_histories_with_states_keep_every_promise() -> None:
    """Each row's state is the recurrence over its own sequence alone, and at the end no slot is held."""
    total = played()
    assert min(total.preemptions, total.out_of_memory, total.poisoned, total.deletions) > 0
    assert min(total.restarts, total.resumed, total.cut_prompts, total.endings["abort"]) > 0
    assert total.prefix_hits == 0


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Violation):
        for seed in range(150):
            play(seed, states=True)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_with_states() -> None:
    for seed in range(2_000):
        play(seed, states=True)


def test_a_sequence_starts_when_a_slot_is_free() -> None:
    engine = CoreEngine(num_states=2)
    requests = [engine.add(f"r{number}", max_tokens=3) for number in range(4)]
    engine.step()
    assert (engine.core.stats().num_running, engine.core.stats().num_states_used) == (2, 2)
    engine.core.abort("r0")
    assert engine.core.stats().num_states_used == 1
    engine.step()
    assert engine.core.stats().num_states_used == 2
    engine.run()
    for request in requests[1:]:
        assert engine.tokens(request.request_id) == expected(request, 3)
    assert engine.core.stats().num_states_used == 0


def test_a_model_without_states_has_no_slots() -> None:
    engine = CoreEngine()
    engine.runner.keep_plans = True
    engine.add("r")
    engine.run()
    assert {row.state_slot for plan in engine.runner.plans for row in plan.scheduled} == {-1}


def test_equal_prompts_are_computed_each_for_itself() -> None:
    engine = CoreEngine(num_states=4)
    for name in ("first", "second"):
        engine.add(name, prompt_ids=tuple(range(1, 50)))
        engine.run()
        usage = engine.end(name).usage
        assert usage is not None
        assert usage.cached_tokens == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_without_memory_begins_its_sequences_again(lookahead: int) -> None:
    engine = CoreEngine(num_states=4, lookahead=lookahead)
    engine.runner.keep_plans = True
    request = engine.add("r", adapter(1), max_tokens=8)
    while not engine.tokens("r"):
        engine.step(0.01)
    engine.runner.fault = lambda plan: Fault("collect", memory=True)
    engine.runner.plans.clear()
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    assert engine.tokens("r") == expected(request, 8)
    starts = [row.start for plan in engine.runner.plans for row in plan.scheduled]
    assert 0 in starts[1:]


def test_an_activated_adapter_goes_on_in_the_next_step() -> None:
    engine = CoreEngine(num_states=4)
    engine.runner.keep_plans = True
    request = engine.add("r", adapter(1), adapter_from=10)
    engine.run()
    assert engine.tokens("r") == expected(request, 5)
    starts = [[row.start for row in plan.scheduled] for plan in engine.runner.plans]
    assert starts[:2] == [[0], [10]]


def test_background_sequences_leave_their_slots_to_others() -> None:
    engine = CoreEngine(num_states=2, max_num_seqs=2)
    behind = [engine.add(f"b{number}", background=True, max_tokens=30) for number in range(3)]
    for _ in range(4):
        engine.step(0.01)
    assert engine.core.stats().num_states_used == 2
    before = [engine.add(f"r{number}", max_tokens=3) for number in range(2)]
    engine.step(0.01)
    assert engine.core.stats().num_running == 2
    engine.run()
    for request in (*before, *behind):
        assert engine.tokens(request.request_id) == expected(request, request.sampling.max_tokens)
    assert engine.core.stats().num_states_used == 0
