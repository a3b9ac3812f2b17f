"""States and the windows behind them, from admission to the end of a sequence: random histories, and single cases by
hand. Which states are kept and found, and that none which others may find is written."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from loraplex.engine.scheduling import speculation
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
    """Each row's state is the recurrence over its own sequence alone, and at the end none is held."""
    total = played()
    assert min(total.preemptions, total.out_of_memory, total.poisoned, total.deletions) > 0
    assert min(total.restarts, total.resumed, total.cut_prompts, total.endings["abort"]) > 0
    assert total.prefix_hits > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_two_thousand_histories_with_states() -> None:
    for seed in range(2_000):
        play(seed, states=True)


def test_drafts_leave_no_trace_in_states() -> None:
    total = Summary()
    for seed in range(12):
        total.add(play(seed, states=True, drafts="right"))
    assert 0 < total.accepted <= total.drafted


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Violation):
        for seed in range(150):
            play(seed, states=True)


def test_a_draft_that_ends_a_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_most_in_window", lambda start: 100)
    with pytest.raises(Violation):
        for seed in range(150):
            play(seed, states=True, drafts="right")


def engine_of(**config: Any) -> CoreEngine:
    engine = CoreEngine(num_states=24, num_windows=8, **config)
    engine.runner.keep_plans = True
    return engine


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("num_outputs", range(8, 26))
def test_a_second_turn_computes_at_most_16_rows_more(lookahead: int, num_outputs: int) -> None:
    engine = engine_of(lookahead=lookahead)
    first = engine.add("first", prompt_ids=tuple(range(1, 41)), max_tokens=num_outputs)
    engine.run()
    said = (*first.prompt_ids, *engine.tokens("first"))
    second = engine.add("second", prompt_ids=(*said, *range(50, 60)))
    engine.run()
    usage = engine.end("second").usage
    assert usage is not None
    assert len(second.prompt_ids) - usage.cached_tokens <= 10 + 16
    assert engine.tokens("second") == expected(second, 5)
    stats = engine.core.stats()
    assert (stats.num_states_used, stats.num_snapshots > 1) == (0, True)


def test_activated_adapters_share_the_states_before_them() -> None:
    engine = engine_of()
    talk = tuple(range(1, 53))
    engine.add("base", prompt_ids=talk)
    engine.run()
    judges = [
        engine.add(f"judge {n}", adapter(n), prompt_ids=(*talk, 90, 91), adapter_from=52, max_tokens=20)
        for n in range(1, 4)
    ]
    engine.runner.plans.clear()
    engine.run()
    rows = [row for plan in engine.runner.plans for row in plan.scheduled]
    firsts = {row.request_id: row for row in reversed(rows)}
    assert {row.start for row in firsts.values()} == {48}
    assert len({row.state for row in firsts.values()}) == 1
    for judge in judges:
        assert engine.tokens(judge.request_id) == expected(judge, 20)


def test_base_rows_and_adapter_rows_are_in_one_step() -> None:
    engine = engine_of()
    request = engine.add("r", adapter(1), prompt_ids=tuple(range(1, 41)), adapter_from=30)
    engine.run()
    assert engine.tokens("r") == expected(request, 5)
    starts = [[row.start for row in plan.scheduled] for plan in engine.runner.plans]
    assert starts[0] == [0, 30]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_without_memory_goes_on_at_its_window(lookahead: int) -> None:
    engine = engine_of(lookahead=lookahead)
    request = engine.add("r", prompt_ids=tuple(range(1, 41)), max_tokens=24)
    while len(engine.tokens("r")) < 10:
        engine.step(0.01)
    engine.runner.fault = lambda plan: Fault("collect", memory=True)
    engine.runner.plans.clear()
    engine.step(0.01)
    engine.runner.fault = lambda plan: Fault()
    engine.run()
    assert engine.tokens("r") == expected(request, 24)
    assert min(row.start for plan in engine.runner.plans for row in plan.scheduled) >= 32


def test_a_request_waits_for_a_state_while_others_write_new_ones() -> None:
    engine = CoreEngine(num_states=6, num_windows=5)
    talks = [tuple(range(first, first + 33)) for first in (1, 101)]
    for number, talk in enumerate(talks):
        engine.add(f"talk {number}", prompt_ids=talk, max_tokens=1)
        engine.run()
    asked = [
        engine.add(f"{number} {place}", prompt_ids=(*talk, *range(200, 213), 300 + place), max_tokens=4)
        for number, talk in enumerate(talks)
        for place in range(2)
    ]
    engine.step(0.01)
    asked.append(
        engine.add("last", prompt_ids=(7,) * 20, max_tokens=4)
    )  # as four sequences leave two shared states
    engine.run()
    assert [engine.tokens(request.request_id) for request in asked] == [expected(each, 4) for each in asked]


def test_lines_of_batches_evict_nobody_elses_state() -> None:
    engine = engine_of(num_blocks=256)
    shared = tuple(range(1, 65))
    engine.add("chat", prompt_ids=shared, max_tokens=1)
    engine.run()
    for n in range(30):  # each leaves states of its own
        line = {"background": True, "batch": True, "ignore_eos": True, "max_tokens": 1}
        engine.add(f"line-{n}", prompt_ids=(900 + n, *range(200, 280)), **line)
        engine.run()
    engine.add("again", prompt_ids=shared, max_tokens=1)
    engine.run()
    assert getattr(engine.end("again").usage, "cached_tokens", None) == 48


def test_a_sequence_starts_when_a_place_is_free() -> None:
    engine = CoreEngine(num_states=3, num_windows=2)
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


def test_background_sequences_leave_their_places_to_others() -> None:
    engine = CoreEngine(num_states=3, num_windows=2, max_num_seqs=2)
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
