"""The core through its own seam: requests in, events out, with the fake runner and transport."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.execution.step_results import RowFailure, RowResult, StepResult
from loraplex.engine.types import StepPlan
from support.engine.core_engine import EOS, VOCAB_SIZE, CoreEngine, adapter, expected
from support.engine.fake_runner import FakeRunner, Fault


@pytest.fixture(params=[0, 1], ids=["lookahead-0", "lookahead-1"])
def lookahead(request: pytest.FixtureRequest) -> Literal[0, 1]:
    return request.param


def test_base_and_adapters_run_in_one_step_with_their_own_tokens(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    requests = [engine.add("base"), engine.add("one", adapter(1)), engine.add("two", adapter(2))]
    engine.runner.keep_plans = True
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected(request, 5)
    assert max(len(plan.scheduled) for plan in engine.runner.plans) == 3
    assert engine.core.stats().num_leases == 0
    assert engine.core.stats().num_kv_blocks_used == 0


def test_the_events_of_a_request_from_first_to_last() -> None:
    engine = CoreEngine()
    engine.add("r", adapter(1), max_tokens=3)
    engine.run()
    first, second, last = engine.events
    assert first.adapter_state == "cold"
    assert second.adapter_state is None
    assert (first.finish_reason, last.finish_reason) == (None, "length")
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (20, 3, 0)
    assert last.timing is not None
    assert last.timing.first_token_s is not None
    assert 0 < last.timing.queue_s <= last.timing.first_token_s < last.timing.total_s
    engine.add("again", adapter(1))
    engine.run()
    assert engine.end("again").usage.cached_tokens == 16  # type: ignore[union-attr]
    assert next(e for e in engine.events if e.request_id == "again").adapter_state == "hot"


def test_host_is_one_step_behind_the_device_with_lookahead() -> None:
    engine = CoreEngine(lookahead=1)
    engine.add("r", max_tokens=3)
    assert engine.step() == []
    assert engine.runner.num_in_flight == 1
    assert len(engine.step()) == 1
    assert engine.runner.num_in_flight == 1
    engine.step()
    assert engine.step()[0].finish_reason == "length" if engine.core.has_work else True
    assert engine.runner.num_steps == 3, "no step is spent on tokens beyond max_tokens"


def test_stop_ids_end_a_sequence_and_a_token_in_flight_is_dropped(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    chain = expected(engine.add("probe", max_tokens=8), 8)
    engine.run()
    engine.add("r", max_tokens=8, stop_token_ids=(chain[3],))
    engine.add("late", max_tokens=8, stop_token_ids=(chain[3],), min_tokens=4)
    engine.run()
    assert engine.tokens("r") == chain[:4]
    assert (engine.end("r").finish_reason, engine.end("r").stop_token_id) == ("stop", chain[3])
    assert engine.tokens("late") == chain


def test_eos_ends_a_sequence_unless_it_is_ignored() -> None:
    class EosRunner(FakeRunner):
        def collect(self, handle: object) -> StepResult:
            result = super().collect(handle)
            return replace(result, rows=[RowResult((EOS,) if row.token_ids else ()) for row in result.rows])

    engine = CoreEngine()
    engine.runner = EosRunner(64, engine.transport.mark_in_slot, VOCAB_SIZE)
    engine.core = EngineCore(
        engine.config, engine.runner, engine.cache, eos_ids=frozenset({EOS}), clock=lambda: engine.now
    )
    engine.add("r")
    engine.add("deaf", ignore_eos=True)
    engine.run()
    assert (engine.end("r").finish_reason, engine.end("r").stop_token_id, engine.tokens("r")) == (
        "stop",
        EOS,
        [EOS],
    )
    assert (engine.end("deaf").finish_reason, len(engine.tokens("deaf"))) == ("length", 5)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_step_may_bring_several_tokens_for_a_sequence(count: int, lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    engine.runner.tokens_per_row = lambda row: count
    request = engine.add("r", max_tokens=10)
    engine.run()
    assert engine.tokens("r") == expected(request, 10)
    assert max(len(event.token_ids) for event in engine.events) > 1
    assert len(engine.events) == len([e for e in engine.events if e.token_ids])


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_at_any_moment_frees_everything_at_once(steps: int, lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(lookahead=lookahead)
    engine.add("r", adapter(1), max_tokens=50)
    engine.add("other", max_tokens=6)
    for _ in range(steps):
        engine.step()
    engine.core.abort("r")
    engine.core.abort("r")
    engine.core.abort("never heard of")
    assert [event.request_id for event in engine.step() if event.finish_reason] == ["r"]
    assert engine.end("r").finish_reason == "abort"
    engine.run()
    assert engine.end("other").finish_reason == "length"
    assert engine.core.stats().num_kv_blocks_used == engine.core.stats().num_leases == 0


def test_deadlines_end_running_and_waiting_requests() -> None:
    engine = CoreEngine(max_num_seqs=1)
    engine.add("runs", deadline=2.0, max_tokens=100)
    engine.add("waits", deadline=1.0)
    engine.add("patient")
    engine.step()
    assert engine.core.idle_s() == 0
    assert [e.request_id for e in engine.step(1.0) if e.finish_reason] == ["waits"]
    engine.step(1.5)
    assert engine.error("waits") == engine.error("runs") == "deadline_exceeded"
    assert len(engine.tokens("runs")) == 2
    engine.run()
    assert engine.end("patient").finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids": (1,) * 508, "max_tokens": 5}, "context_length_exceeded"),
        ({"prompt_ids": (1,) * 250, "max_tokens": 8}, "context_length_exceeded"),
        ({"prompt_ids": ()}, "internal_error"),
        ({"prompt_ids": (-1,)}, "internal_error"),
        ({"prompt_ids": (2**40,)}, "internal_error"),
        ({"max_tokens": -1}, "internal_error"),
        ({"logprobs": 21}, "internal_error"),
        ({"prompt_logprobs": -1}, "internal_error"),
        ({"deadline": float("nan")}, "internal_error"),
        ({"deadline": -1.0}, "deadline_exceeded"),
    ],
)
def test_a_request_that_cannot_be_served_is_answered_and_harms_nobody(
    changes: dict[str, Any], code: str
) -> None:
    engine = CoreEngine(num_blocks=16)
    engine.add("good")
    engine.add("bad", **changes)
    engine.run()
    assert engine.error("bad") == code
    assert engine.end("bad").usage is not None
    assert engine.end("good").finish_reason == "length"


def test_the_largest_request_that_fits_is_served(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(num_blocks=16, lookahead=lookahead)
    request = engine.add("r", prompt_ids=(7,) * 250, max_tokens=7)
    engine.run()
    assert engine.tokens("r") == expected(request, 7)


def test_a_full_queue_answers_at_once() -> None:
    engine = CoreEngine(max_waiting=2)
    for name in "abc":
        engine.add(name)
    (event,) = engine.step()[:1]
    assert (event.request_id, engine.error("c")) == ("c", "server_overloaded")
    engine.run()
    assert engine.end("a").finish_reason == engine.end("b").finish_reason == "length"


def failed(engine: CoreEngine, name: str) -> bool:
    return any(event.error is not None for event in engine.events if event.request_id == name)


def test_nobody_can_fill_the_queue_against_others() -> None:
    engine = CoreEngine(max_waiting=4)
    for number in range(6):
        engine.add(f"greedy-{number}", tenant_id="greedy")
    engine.add("modest", tenant_id="modest")
    engine.step()
    refused = [name for name in (f"greedy-{n}" for n in range(6)) if failed(engine, name)]
    assert refused == ["greedy-3", "greedy-4", "greedy-5"], "the newest of the greedy tenant make room"
    errors = [event.error for event in engine.events if event.error is not None]
    assert all(error.is_own for error in errors), "what is refused for its own backlog is told so"
    engine.run()
    assert engine.end("modest").finish_reason == "length"


def test_full_queue_of_equal_tenants_refuses_the_last_request() -> None:
    engine = CoreEngine(max_waiting=4)
    for number in range(4):
        engine.add(f"r{number}", tenant_id=f"t{number % 2}")
    for tenant in ("t0", "t1"):
        engine.add(f"late-{tenant}", tenant_id=tenant)
    engine.run()
    assert [engine.error(f"late-{tenant}") for tenant in ("t0", "t1")] == ["server_overloaded"] * 2
    assert {engine.end(f"r{n}").finish_reason for n in range(4)} == {"length"}


def test_queue_filled_by_other_tenants_is_not_the_callers_fault() -> None:
    engine = CoreEngine(max_waiting=3)
    for number in range(3):
        engine.add(f"r{number}", tenant_id=f"t{number}")
    engine.add("late", tenant_id="late")
    engine.run()
    (error,) = (event.error for event in engine.events if event.error is not None)
    assert (error.code, error.is_own) == ("server_overloaded", False)


def test_an_id_in_flight_is_refused_to_a_second_request_and_the_first_goes_on() -> None:
    engine = CoreEngine()
    request = engine.add("r")
    engine.step()
    engine.add("r", prompt_ids=(1, 2, 3))
    engine.run()
    (twin,) = (event for event in engine.events if event.duplicate)
    assert (twin.finish_reason, twin.error.code) == ("error", "internal_error")  # type: ignore[union-attr]
    engine.events.remove(twin)
    assert engine.tokens("r") == expected(request, 5)
    assert engine.end("r").finish_reason == "length"
    engine.events.clear()
    engine.add("r")
    engine.run()
    assert engine.end("r").finish_reason == "length", "an id that has ended may be used again"


@pytest.mark.parametrize("at", ["submit", "collect"])
def test_a_step_that_raises_ends_its_requests_and_no_others(
    at: str, lookahead: Literal[0, 1], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = CoreEngine(lookahead=lookahead, max_num_seqs=2)
    first, second = engine.add("a", adapter(1)), engine.add("b")
    for _ in range(4):
        engine.step(0.01)
    engine.runner.fault = lambda plan: Fault(at)
    engine.step()
    engine.runner.fault = lambda plan: Fault()
    waiting = engine.add("c")
    engine.run()
    assert engine.error("a") == engine.error("b") == "internal_error"
    assert engine.tokens("a") == expected(first, 5)[: len(engine.tokens("a"))]
    assert engine.tokens("b") == expected(second, 5)[: len(engine.tokens("b"))]
    assert engine.tokens("c") == expected(waiting, 5)
    assert engine.core.stats().num_kv_blocks_used == engine.core.stats().num_leases == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: replace(result, step_id=result.step_id + 1),
        lambda result: replace(result, rows=[]),
        lambda result: replace(result, rows=[RowResult()]),
        lambda result: replace(result, rows=[RowResult((-1,))]),
        lambda result: replace(result, rows=[RowResult(failed=RowFailure("a row of its own"))]),
    ],
)
def test_a_runners_nonsense_ends_the_request_and_not_the_engine(
    spoil: Callable[[StepResult], StepResult], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = CoreEngine()
    collect = engine.runner.collect
    engine.runner.collect = lambda handle: spoil(collect(handle))  # type: ignore[method-assign]
    engine.add("r")
    engine.step()
    assert engine.error("r") == "internal_error"
    engine.runner.collect = collect  # type: ignore[method-assign]
    engine.add("next")
    engine.run()
    assert engine.end("next").finish_reason == "length"


def test_preempted_sequences_resume_where_they_were(lookahead: Literal[0, 1]) -> None:
    engine = CoreEngine(num_blocks=6, lookahead=lookahead)
    requests = [
        engine.add(f"r{index}", adapter(index), prompt_ids=(index,) * 17, max_tokens=60)
        for index in range(1, 4)
    ]
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    for request in requests:
        assert engine.tokens(request.request_id) == expected(request, 60)


def test_stats_tell_what_is_going_on() -> None:
    engine = CoreEngine(max_num_seqs=2)
    engine.add("a", adapter(1), tenant_id="acme", max_tokens=9)
    while not engine.core.stats().num_running:
        engine.step()
    engine.add("b", tenant_id="umbrella", max_tokens=9)
    engine.add("c", tenant_id="umbrella", max_tokens=9)
    engine.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.num_kv_blocks == 64
    assert stats.num_kv_blocks_used == 4
    assert (stats.num_arena_pages, stats.num_arena_pages_used, stats.num_leases) == (4, 1, 1)
    assert stats.running_adapters == (adapter(1).digest,)
    assert sum(t.running for t in stats.tenants.values()) == 2
    assert stats.tenants["umbrella"].counter > 0
    engine.run()
    stats = engine.core.stats()
    assert stats.tenants == {}
    assert (stats.prompt_tokens, stats.generation_tokens) == (60, 27)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (60, 16)


def test_an_engine_without_work_plans_nothing() -> None:
    engine = CoreEngine()
    assert not engine.core.has_work
    assert engine.step() == []
    assert engine.core.idle_s() is None
    assert engine.runner.num_steps == 0


def test_plans_are_copies_that_later_changes_cannot_reach() -> None:
    engine = CoreEngine(lookahead=1)
    engine.runner.keep_plans = True
    engine.add("r", max_tokens=40)
    engine.step()
    plan: StepPlan = engine.runner.plans[0]
    blocks = plan.scheduled[0].block_ids
    for _ in range(20):
        engine.step()
    assert plan.scheduled[0].block_ids == blocks
    assert len(engine.runner.plans[-1].scheduled[0].block_ids) > len(blocks)


def test_a_step_of_an_ended_request_brings_nothing_to_the_next_of_its_name(lookahead: Literal[0, 1]) -> None:
    """A name is used again while a step of its first request is in flight."""
    engine = CoreEngine(lookahead=lookahead)
    engine.add("r", prompt_ids=tuple(range(1, 21)))
    engine.step()
    engine.core.abort("r")
    second = engine.add("r", prompt_ids=tuple(range(30, 60)))
    engine.events.clear()
    engine.run()
    assert engine.tokens("r") == expected(second, 5)
