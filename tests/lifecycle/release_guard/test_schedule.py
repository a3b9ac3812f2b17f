"""Schedules of releases: what is refused, and that no step is skipped or taken twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.control.catalog.schedule_state import ScheduleState, begin, pause, resume
from loraplex.control.errors import Conflict, InvalidValue
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import FIRST_PART, Verdict
from loraplex.lifecycle.release_guard.rules import Rules
from loraplex.lifecycle.release_guard.schedule import (
    Schedule,
    Step,
    advance,
    guard_of,
    parse_schedule,
)
from support.releases.traffic import ended

ISSUE = [
    {"weight": 1, "for_seconds": 600},
    {"weight": 10, "for_seconds": 3600},
    {"weight": 50, "for_seconds": 3600},
]
PASS = Verdict("pass", 0.1, 100.0, 50)
HOLD = Verdict("hold", 0.1, 100.0, 5)
BREACH = Verdict("breach", 130.0, 100.0, 50)

steps = st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True).flatmap(
    lambda weights: st.tuples(
        *(st.builds(Step, st.just(weight), st.integers(1, 1000)) for weight in sorted(weights))
    )
)
schedules = st.builds(Schedule, steps)
verdicts = st.sampled_from([PASS, PASS, PASS, HOLD])


def test_a_schedule_is_read_as_it_is_written() -> None:
    schedule = parse_schedule(ISSUE)
    assert schedule.steps == (Step(1, 600), Step(10, 3600), Step(50, 3600))
    assert schedule.document() == ISSUE


@pytest.mark.parametrize(
    ("document", "param", "words"),
    [
        ([], "schedule", "1 to 20 steps"),
        ({}, "schedule", "one list"),
        ([ISSUE, ISSUE], "schedule[0]", "one schedule, not several"),
        ([{"weight": 0, "for_seconds": 1}], "schedule[0].weight", "from 1 to 99"),
        ([{"weight": 100, "for_seconds": 1}], "schedule[0].weight", "100 follows by itself"),
        ([{"weight": 1.5, "for_seconds": 1}], "schedule[0].weight", "not 1.5"),
        ([{"weight": True, "for_seconds": 1}], "schedule[0].weight", "whole number"),
        ([{"weight": 1, "for_seconds": 0}], "schedule[0].for_seconds", "from 1 to"),
        ([{"weight": 1, "for_seconds": "10m"}], "schedule[0].for_seconds", "not '10m'"),
        ([{"weight": 1}], "schedule[0]", "weight and for_seconds"),
        ([{"weight": 1, "for_seconds": 1, "guard": {}}], "schedule[0]", "nothing else"),
        ([*ISSUE, {"weight": 50, "for_seconds": 1}], "schedule[3].weight", "weights rise"),
        ([ISSUE[1], ISSUE[0]], "schedule[1].weight", "is 1, and that of the step before 10"),
        ([ISSUE[0]] * 21, "schedule", "1 to 20 steps"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_named(document: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidValue, match="'") as refused:
        parse_schedule(document)
    assert refused.value.param == param
    assert words in str(refused.value)


def test_the_release_of_the_issue_from_its_begin_to_all_traffic() -> None:
    schedule, state = parse_schedule(ISSUE), begin(0.0)
    seen = []
    for now in range(0, 8000, 10):
        state = advance(schedule, state, PASS, float(now))
        seen.append((state.step, state.since))
    assert list(dict.fromkeys(seen)) == [(0, 0.0), (1, 600.0), (2, 4200.0), (3, 7800.0)]
    assert state.status == "promoted"


def test_a_breach_rolls_back_and_says_why_and_nothing_moves_after_it() -> None:
    schedule, state = parse_schedule(ISSUE), begin(0.0)
    state = advance(schedule, state, BREACH, 5.0)
    assert (state.status, state.reason) == ("rolled_back", "guard")
    assert advance(schedule, state, PASS, 1e9) == state


def test_a_step_waits_for_as_many_requests_as_the_rules_ask_for() -> None:
    schedule, state = parse_schedule(ISSUE), begin(0.0)
    assert advance(schedule, state, HOLD, 1e6) == state
    assert advance(schedule, state, PASS, 599.0) == state
    assert advance(schedule, state, PASS, -50.0) == state
    assert advance(schedule, state, PASS, 600.0) == ScheduleState(1, 600.0)


def test_a_pause_keeps_the_weight_and_a_resume_begins_the_step_again() -> None:
    schedule = parse_schedule(ISSUE)
    state = pause(ScheduleState(1, 600.0), 700.0)
    assert advance(schedule, state, BREACH, 1e6) == state
    assert state.step == 1
    state = resume(state, 9000.0)
    assert advance(schedule, state, PASS, 9000.0 + 3599) == state
    assert advance(schedule, state, PASS, 9000.0 + 3600).step == 2
    with pytest.raises(Conflict, match="only a paused one"):
        resume(state, 1.0)
    with pytest.raises(Conflict, match="only a running one"):
        pause(ScheduleState(3, 1.0, "promoted"), 2.0)


@pytest.mark.parametrize("status", ["running", "paused"])
def test_a_release_has_one_schedule(status: Any) -> None:
    with pytest.raises(Conflict, match=f"{status} at step 2, and a release has one"):
        begin(5.0, ScheduleState(1, 0.0, status))
    assert begin(5.0, ScheduleState(3, 0.0, "promoted")) == ScheduleState(0, 5.0)


@given(schedule=schedules, looks=st.lists(st.tuples(st.floats(0, 500), verdicts), max_size=40))
def test_no_step_is_skipped_or_taken_twice_or_left_early(
    schedule: Schedule, looks: list[tuple[float, Verdict]]
) -> None:
    now, state = 0.0, begin(0.0)
    for by, verdict in looks:
        now += by
        after = advance(schedule, state, verdict, now)
        if after != state:
            assert verdict == PASS
            assert (after.step, after.since) == (state.step + 1, now)
            assert now - state.since >= schedule.steps[state.step].for_seconds
        assert (after.status == "promoted") == (after.step == len(schedule.steps))
        assert advance(schedule, after, verdict, now) == after  # told twice
        state = after


@given(
    schedule=schedules,
    looks=st.lists(
        st.tuples(st.floats(0, 500), st.sampled_from([PASS, HOLD, BREACH])), min_size=1, max_size=20
    ),
    died=st.sets(st.integers(0, 19)),
)
def test_a_leader_that_takes_over_with_what_was_written_decides_the_same(
    schedule: Schedule, looks: list[tuple[float, Verdict]], died: set[int]
) -> None:
    def history(deaths: set[int]) -> list[ScheduleState]:
        now, state, found = 0.0, begin(0.0), []
        for index, (by, verdict) in enumerate(looks):
            now += by
            if index in deaths:
                state = msgspec.json.decode(msgspec.json.encode(state), type=ScheduleState)
            state = advance(schedule, state, verdict, now)
            found.append(state)
        return found

    assert history(died) == history(set())


def test_each_step_has_a_guard_of_its_own_which_a_new_leader_takes_over() -> None:
    rules, arms = Rules(), Arms(1, 2, 99.0, 1.0)

    def guard(since: float, persisted: bytes | None, of: Arms = arms) -> Any:
        return guard_of(rules, of, since=since, num_steps=3, persisted=persisted)

    running = guard(0.0, None)
    running.observe([ended(version=2, key="u1")], [], 10.0)
    written = running.to_json()
    assert guard(0.0, written).num_requests == 1
    assert guard(700.0, written).num_requests == 0
    assert guard(0.0, b"{}").num_requests == 0
    assert guard(0.0, written, Arms(1, 3, 99.0, 1.0)).num_requests == 0


def test_the_steps_share_the_allowed_false_alarms() -> None:
    guard = guard_of(
        Rules(max_false_alarm=0.03), Arms(1, 2, 99.0, 1.0), since=0.0, num_steps=3, persisted=None
    )
    assert guard.verdict().threshold == pytest.approx(1 / 0.01 / FIRST_PART)
