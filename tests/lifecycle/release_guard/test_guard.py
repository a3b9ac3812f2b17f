"""The guard: verdicts over outcomes and running requests, state that a new leader takes over."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator

import pytest

from loraplex.lifecycle.release_guard.comparison import Unit
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import (
    FIRST_PART,
    MAX_STATE_BYTES,
    REPEATS_PART,
    WINDOW_S,
    Guard,
    GuardStateInvalid,
    Verdict,
    later_part,
)
from loraplex.lifecycle.release_guard.repeats import MAX_USERS, NUM_REQUESTS
from loraplex.lifecycle.release_guard.rules import Rules
from loraplex.lifecycle.release_guard.window import MAX_KEYS, RunningArm
from support.releases.few_users import A_A, Few, verdicts
from support.releases.traffic import CANDIDATE, CONTROL, Fault, Look, Traffic, ended, looks
from support.releases.verdicts import first_breach

HALVES = Arms(CONTROL, CANDIDATE, 50.0, 50.0)
ONE_IN_TEN = Arms(CONTROL, CANDIDATE, 90.0, 10.0)


def guard(arms: Arms = HALVES, rules: Rules | None = None) -> Guard:
    return Guard(rules or Rules(), arms, since=0.0)


def feed(to: Guard, *, control: str, candidate: str, keys: int, at: float = 1.0) -> str:
    """Requests of this many keys of each arm, with these ends; the verdict."""
    for number in range(keys):
        of_control = ended(version=CONTROL, key=f"a{number}", status=control, started_at=at)
        of_candidate = ended(version=CANDIDATE, key=f"b{number}", status=candidate, started_at=at)
        to.observe([of_control, of_candidate], [], at + 10)
    return to.verdict().kind


def test_a_version_that_fails_is_a_breach_that_names_the_metric_and_its_bound() -> None:
    worse = guard()
    assert feed(worse, control="stop", candidate="internal_error", keys=40) == "breach"
    found = worse.verdict().breach
    assert found is not None
    assert found.metric == "error_rate"
    assert (found.control, found.candidate, found.bound) == (0.0, 1.0, 0.005)
    assert found.num_candidate < 20
    assert worse.verdict().e_value >= worse.verdict().threshold == pytest.approx(100 / FIRST_PART)
    assert feed(worse, control="internal_error", candidate="stop", keys=500, at=50.0) == "breach", "final"


def test_few_requests_hold_and_enough_pass() -> None:
    equal = guard(rules=Rules(min_requests=200))
    assert equal.verdict().kind == "hold"
    assert feed(equal, control="stop", candidate="stop", keys=199) == "hold"
    assert equal.verdict().advice == "needs 1 requests of the new version more"
    assert feed(equal, control="stop", candidate="stop", keys=1, at=2.0) == "pass"
    alone = guard(rules=Rules(min_requests=0))
    assert alone.observe([ended(version=CANDIDATE, key="b")], [], 5.0).kind == "hold", (
        "no control to compare with"
    )


@pytest.mark.parametrize("status", ["cancelled", "invalid_value", "rate_limit_exceeded", "server_overloaded"])
def test_ends_that_are_not_the_versions_doing_are_no_errors(status: str) -> None:
    assert feed(guard(), control="stop", candidate=status, keys=100) != "breach"


def test_an_outage_of_both_versions_is_no_breach() -> None:
    assert feed(guard(), control="engine_restarting", candidate="engine_restarting", keys=200) == "pass"


def test_an_outage_that_begins_between_two_looks_meets_both_versions() -> None:
    """The candidate's first failures are not compared with the control's requests from before the outage."""
    to = guard()
    before = [ended(version=CONTROL, key=f"a{number}") for number in range(40)]
    failing = [
        ended(version=version, key=f"{version}-{number}", status="engine_restarting", started_at=5.0)
        for version in (CANDIDATE, CONTROL)
        for number in range(20)
    ]
    assert to.observe([*before, *failing], [], 9.0).kind == "hold"
    errors = next(r for r in to.readings() if r.metric == "error_rate")
    assert (errors.num_control, errors.num_candidate) == (60, 20)
    assert errors.e_value < 10


def test_a_better_version_is_no_breach() -> None:
    assert feed(guard(), control="internal_error", candidate="stop", keys=200) == "pass"


def test_a_heavy_user_counts_once() -> None:
    """A thousand failures of one user are those of one user."""
    to = guard()
    for number in range(1000):
        control = ended(version=CONTROL, key=f"a{number}", started_at=1.0)
        candidate = ended(version=CANDIDATE, key="heavy", status="internal_error", started_at=1.0)
        assert to.observe([control, candidate], [], 20.0).kind != "breach"
    assert next(r for r in to.readings() if r.metric == "error_rate").num_candidate == 1


def test_requests_that_began_before_the_guard_do_not_count() -> None:
    assert feed(guard(), control="stop", candidate="internal_error", keys=100, at=-5.0) == "hold"


def test_other_versions_do_not_count() -> None:
    to = guard()
    for number in range(100):
        to.observe([ended(version=7, key=f"c{number}", status="internal_error")], [], 20.0)
    assert to.num_requests == 0
    assert to.verdict().kind == "hold"


def running(version: int, *started: float, prefix: str = "r") -> RunningArm:
    requests = [(hash_of(f"{prefix}{index}"), at) for index, at in enumerate(started)]
    return RunningArm(version, len(requests), tuple(requests))


def hash_of(key: str) -> int:
    return ended(version=1, key=key).key_hash


def test_answers_that_do_not_end_are_found_though_none_has_ended() -> None:
    to = guard()
    for number in range(40):
        to.observe([ended(version=CONTROL, key=f"a{number}", started_at=1.0)], [], 10.0)
    row = running(CANDIDATE, *[12.0] * 30)
    assert to.observe([], [row], 12.5).kind == "hold", "no longer than the control's"
    verdict = to.observe(
        [ended(version=CONTROL, key=f"more{number}", started_at=12.0) for number in range(60)], [row], 30.0
    )
    assert verdict.kind == "breach"
    assert verdict.breach is not None
    assert verdict.breach.metric in ("length_share", "output_length")


def test_answers_of_both_versions_that_do_not_end_are_no_breach() -> None:
    to = guard()
    for number in range(60):
        to.observe([ended(version=CONTROL, key=f"a{number}", started_at=1.0)], [], 10.0)
    rows = [running(CANDIDATE, *[12.0] * 15, prefix="b"), running(CONTROL, *[12.0] * 15, prefix="c")]
    for now in range(13, 100):
        assert to.observe([], rows, float(now)).kind != "breach"


def test_a_version_that_becomes_worse_is_found_by_users_that_were_counted_before() -> None:
    to = guard()
    assert feed(to, control="stop", candidate="stop", keys=200) == "pass"
    assert feed(to, control="stop", candidate="internal_error", keys=200, at=500.0) == "pass", (
        "the same users"
    )
    assert feed(to, control="stop", candidate="internal_error", keys=200, at=WINDOW_S + 1) == "breach"


def test_the_windows_share_the_allowed_false_alarms() -> None:
    assert FIRST_PART + REPEATS_PART + sum(later_part(index) for index in range(1, 100_000)) == pytest.approx(
        1.0, abs=1e-5
    )


def fed(traffic: Traffic, fault: Fault, seconds: int) -> Iterator[Look]:
    return looks(traffic, 3, seconds=seconds, fault=fault)


def test_a_leader_that_takes_over_at_any_look_comes_to_the_same_verdicts() -> None:
    kept, moved = guard(ONE_IN_TEN), guard(ONE_IN_TEN)
    rng = random.Random(5)
    for look in fed(Traffic(num_users=300), Fault(errors=0.2), 90):
        if rng.random() < 0.3:
            moved = Guard.from_json(moved.to_json())
        expected = kept.observe(look.outcomes, look.running, look.now)
        assert moved.observe(look.outcomes, look.running, look.now) == expected
    assert moved.to_json() == kept.to_json()


def test_the_state_is_bounded() -> None:
    to = guard()
    for began in (1.0, WINDOW_S + 5):
        pairs = [ended(version=1 + n % 2, key=f"p{n}", started_at=began) for n in range(400)]
        many = [ended(version=CANDIDATE, key=f"k{n}", started_at=began) for n in range(MAX_KEYS)]
        to.observe([*pairs, *many], [], began + 20)
    written = to.to_json()
    assert len(written) < MAX_STATE_BYTES
    assert Guard.from_json(written).to_json() == written


def test_the_largest_state_leaves_room_below_its_limit() -> None:
    """Above it each look would begin without evidence. All keys, numbers with all digits, users that wait."""
    rng, since = random.Random(7), 1.7e9
    to = Guard(Rules(), HALVES, since=since)

    def look(version: int | None, key: str, count: int, began: float) -> None:
        found = []
        for number in range(count):
            of = 1 + number % 2 if version is None else version
            one = ended(version=of, key=f"{key}{number}", started_at=began + rng.random())
            tiny = {"first_token_s": rng.random() / 1e150, "inter_token_s": rng.random() / 1e150}
            found.append(dataclasses.replace(one, ended_at=one.ended_at + rng.random(), **tiny))
        to.observe(found, [], began + 20)

    for began in (since, since + WINDOW_S):
        for _ in range((NUM_REQUESTS - 1) // 2):
            look(None, "p", MAX_USERS, began + 1)
        look(CANDIDATE, "k", MAX_KEYS, began + 1)
    written = to.to_json()
    assert 160 << 10 < len(written) < 0.75 * MAX_STATE_BYTES
    assert Guard.from_json(written).to_json() == written


def test_a_breach_is_kept_with_the_state() -> None:
    worse = guard()
    feed(worse, control="stop", candidate="internal_error", keys=40)
    assert Guard.from_json(worse.to_json()).verdict() == worse.verdict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"since": "yesterday"}, "cannot be read"),
        ({"more": 1}, "cannot be read"),
        ({"rules": {"margins": {"ttft": 0.1}}}, "not those of its rules"),
        ({"whole": None}, "cannot be read"),
        ({"rules": {"max_false_alarm": 0.0}}, "rules are out of range"),
        ({"rules": {"margins": {}}}, "rules are out of range"),
        ({"since": 1e300}, "times are out of range"),
        ({"index": -1}, "times are out of range"),
        (
            {"arms": {"control": 1, "candidate": 2, "control_weight": 0, "candidate_weight": 1}},
            "not above 0",
        ),
    ],
)
def test_a_state_of_another_form_is_refused_with_what_to_do(change: dict[str, object], words: str) -> None:
    state = json.loads(guard().to_json()) | change
    with pytest.raises(GuardStateInvalid, match=words) as refused:
        Guard.from_json(json.dumps(state).encode())
    assert "Restart the step." in str(refused.value)


def test_sums_that_no_numbers_have_are_refused() -> None:
    state = json.loads(guard().to_json())
    state["whole"]["groups"]["comparisons"][0]["evidence"]["control_sum"] = -50.0
    with pytest.raises(GuardStateInvalid, match="sums out of range"):
        Guard.from_json(json.dumps(state).encode())


def test_a_state_that_is_too_large_or_torn_is_refused() -> None:
    with pytest.raises(GuardStateInvalid, match="at most"):
        Guard.from_json(b" " * (MAX_STATE_BYTES + 1))
    with pytest.raises(GuardStateInvalid, match="cannot be read"):
        Guard.from_json(guard().to_json()[:-5])


def test_times_that_are_no_times_are_passed_over() -> None:
    for number in range(50):
        strange = dataclasses.replace(
            ended(version=CANDIDATE, key=f"b{number}"), first_token_s=float("nan"), inter_token_s=-1.0
        )
        assert guard().observe([strange, ended(version=CONTROL, key=f"a{number}")], [], 9.0).kind == "hold"


def found_of(few: Few, runs: int) -> tuple[list[Verdict], list[int]]:
    """The last verdicts, and the candidate's answers until each breach."""
    runs_of = [verdicts(few, seed) for seed in range(runs)]
    return [one for one, _ in runs_of], [answers for one, answers in runs_of if one.kind == "breach"]


def test_eighteen_sticky_users_are_enough_for_a_version_that_never_ends_by_itself() -> None:
    """However the hash splits them between the versions, it never passes, and nearly all splits find it."""
    last, answers = found_of(Few(18, rounds=7, kind="steady", cut=1.0), 30)
    assert len(answers) >= 27
    assert max(answers) <= 60
    assert {one.kind for one in last} <= {"breach", "hold"}
    breach = next(
        one.breach for one in last if one.breach is not None and one.breach.metric == "length_share"
    )
    shown = (
        f"length_share: 100 % cut at their limit ({breach.num_candidate} users); the control's 0 % allows 5 %"
    )
    assert breach.shown == shown


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_where_each_request_draws_its_version_requests_are_counted(share: float) -> None:
    few = Few(18, rounds=60, unit="request", share=share, kind="steady", cut=1.0)
    last, answers = found_of(few, 10)
    assert len(answers) == 10
    assert max(answers) <= 100
    assert last[0].breach is not None
    assert " requests); " in last[0].breach.shown


def test_half_of_the_answers_of_few_users_are_found_by_what_they_send_after_their_first_request() -> None:
    _, answers = found_of(Few(40, rounds=6, kind="steady", cut=0.5), 10)
    assert len(answers) >= 9


def test_one_user_tells_nothing_and_what_would_is_said() -> None:
    """A tenant's backend that sends no `user` is one: all of it is on one version."""
    for seed in range(4):
        verdict, _ = verdicts(Few(1, rounds=200, kind="steady", cut=1.0), seed)
        assert verdict.kind == "hold"
        assert re.fullmatch(r"needs [0-9]+ users more, or --sticky none", verdict.advice or "")


def test_a_guard_passes_with_as_many_users_as_it_says() -> None:
    to = guard(rules=Rules(min_requests=0))
    feed(to, control="stop", candidate="stop", keys=10)
    needs = int(re.findall(r"needs ([0-9]+) users more", to.verdict().advice or "")[0])
    assert feed(to, control="stop", candidate="stop", keys=10 + needs // 2 - 1) == "hold"
    assert feed(to, control="stop", candidate="stop", keys=10 + needs // 2 + 1) == "pass"


@pytest.mark.parametrize("unit", ["user", "request"])
def test_a_metric_of_one_answer_in_hundreds_is_not_waited_for(unit: Unit) -> None:
    """Answers of one token have no time between tokens; one of the control's has two tokens."""
    to = guard(Arms(CONTROL, CANDIDATE, 50.0, 50.0, unit))
    for number in range(200):
        pair = [ended(version=version, key=f"{version}-{number}") for version in (CONTROL, CANDIDATE)]
        times = [None, None] if number else [0.036, None]
        to.observe(
            [dataclasses.replace(one, inter_token_s=itl) for one, itl in zip(pair, times, strict=True)],
            [],
            9.0,
        )
    assert to.verdict().advice is None
    assert to.verdict().kind == "pass"


def test_a_metric_of_one_answer_in_five_is_waited_for() -> None:
    to = guard()
    for number in range(100):
        pair = [ended(version=version, key=f"{version}-{number}") for version in (CONTROL, CANDIDATE)]
        itl = None if number % 5 else 0.036
        to.observe([dataclasses.replace(one, inter_token_s=itl) for one in pair], [], 9.0)
    assert re.fullmatch(r"needs [0-9]+ users more, or --sticky none", to.verdict().advice or "")


def test_a_metric_that_looks_worse_is_no_pass_whatever_its_weight() -> None:
    alone = Guard(Rules({"length_share": 0.05}, min_requests=0), HALVES, since=0.0)
    beside = guard(rules=Rules(max_false_alarm=1e-6, min_requests=0))
    for number in range(100):
        pair = [
            ended(version=CONTROL, key=f"a{number}"),
            ended(version=CANDIDATE, key=f"b{number}", status="length"),
        ]
        beside.observe(pair, [], 20.0)
        if alone.observe(pair, [], 20.0).kind == "breach":
            break
    assert alone.verdict().kind == "breach"
    assert beside.verdict().kind == "hold"
    assert beside.verdict().advice == "length_share looks worse: waits for more evidence"


@pytest.mark.parametrize("unit", ["user", "request"])
def test_few_users_who_differ_are_no_breach(unit: Unit) -> None:
    """Each has all answers cut, or none; see `bench.release_guard_few` for many runs."""
    for users in (2, 5, 18):
        last, _ = found_of(Few(users, 90 // users, unit, kind="always or never"), 25)
        assert [one for one in last if one.kind == "breach"] == []


@pytest.mark.soak
@pytest.mark.parametrize("few", A_A, ids=str)
def test_the_same_version_is_called_worse_in_one_of_a_hundred_runs_at_most(few: Few) -> None:
    _, answers = found_of(few, 1000)
    assert len(answers) <= 10


@pytest.mark.slow
def test_a_hundred_releases_of_the_same_version_are_left_alone_under_a_look_every_second() -> None:
    traffic = Traffic(rate=8.0, share=0.3, num_users=500)
    assert [first_breach(traffic, seed, seconds=120) for seed in range(100)].count(None) >= 99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "most"), [(Fault(errors=0.05), 200), (Fault(never_stops=True), 50), (Fault(cut=0.5), 200)]
)
def test_planted_versions_are_found_within_their_number_of_requests(fault: Fault, most: int) -> None:
    traffic = Traffic(zipf=0.0, num_users=100_000)
    found = [first_breach(traffic, seed, seconds=600, fault=fault) for seed in range(9)]
    needed = sorted(10_000 if one is None else one.num_started for one in found)
    assert needed[4] <= most
