"""The e-process of one metric, against an exact mean over all draws of the arms and an independent form in numpy."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from loraplex.lifecycle.release_guard.evidence import EFFECTS, WEIGHTS, Evidence
from support.releases.oracle import fewest_numbers, log_evidence

shares = st.floats(0.0, 1.0)
groups = st.lists(st.tuples(shares, st.booleans()), max_size=8)


def expected_factor(evidence: Evidence, users: list[tuple[float, float]], num_candidates: int) -> float:
    """What a group multiplies the evidence by in the mean over all draws of its candidates. A user has a number under
    the control and one under the candidate."""
    draws = list(itertools.combinations(range(len(users)), num_candidates))
    total = 0.0
    for candidates in draws:
        after = copy.deepcopy(evidence)
        after.add([(users[i][i in candidates], i in candidates) for i in range(len(users))])
        total += math.exp(after.log_e_value - evidence.log_e_value)
    return total / len(draws)


@given(
    margin=st.floats(0.0, 0.5),
    history=groups,
    users=st.lists(st.tuples(shares, shares), min_size=2, max_size=6),
    num_candidates=st.integers(0, 6),
)
def test_users_who_differ_as_they_like_are_no_evidence(
    margin: float, history: list[tuple[float, bool]], users: list[tuple[float, float]], num_candidates: int
) -> None:
    """Each user's number under the candidate is larger by the margin at most."""
    evidence = Evidence(margin, prior=0.01)
    evidence.add(history)
    allowed = [(number, min(1.0, number + margin * part)) for number, part in users]
    assert expected_factor(evidence, allowed, min(num_candidates, len(users))) <= 1 + 1e-9


@given(users=st.lists(shares, min_size=2, max_size=6), num_candidates=st.integers(1, 5))
def test_ranks_of_users_who_differ_as_they_like_are_no_evidence(
    users: list[float], num_candidates: int
) -> None:
    same = [(number, number) for number in users]
    assert expected_factor(Evidence(0.0, None), same, min(num_candidates, len(users))) <= 1 + 1e-9


def test_a_candidate_above_the_margin_has_a_factor_above_one() -> None:
    assert expected_factor(Evidence(0.01, prior=0.01), [(0.01, 0.1)] * 5, 1) > 1.01


def test_how_many_of_a_group_are_the_candidates_is_no_evidence() -> None:
    """A slow version's numbers come later than the control's."""
    for is_candidate in (True, False):
        evidence = Evidence(0.05, prior=0.02)
        evidence.add([(float(is_candidate), is_candidate)] * 40)
        assert evidence.log_e_value == pytest.approx(0.0)


@pytest.mark.parametrize(("num_users", "num_candidates"), [(18, 9), (18, 5), (24, 8)])
def test_two_arms_that_have_nothing_in_common_are_found_near_the_most_that_a_draw_can_prove(
    num_users: int, num_candidates: int
) -> None:
    """One of all draws has this order; the margin and the effects that were not bet on cost the rest."""
    evidence = Evidence(0.05, prior=0.02)
    arms = np.random.default_rng(3).permutation(np.arange(num_users) < num_candidates)
    evidence.add([(float(own), bool(own)) for own in arms])
    most = math.log(math.comb(num_users, num_candidates))
    assert most - math.log(15) < evidence.log_e_value < most


def drawn(rng: np.random.Generator, shape: tuple[int, ...], chance: float) -> NDArray[np.bool_]:
    return rng.random(shape) < chance


def test_the_same_evidence_as_the_oracle_to_the_last_digits() -> None:
    rng = np.random.default_rng(4)
    numbers, arms = rng.random((1, 5, 16)), drawn(rng, (1, 5, 16), 0.4)
    evidence = Evidence(0.05, prior=0.5)
    for group in range(5):
        pairs = zip(numbers[0, group].tolist(), arms[0, group].tolist(), strict=True)
        evidence.add(list(pairs))
    expected = log_evidence(numbers, arms, margin=0.05, prior=0.5)[0, -1]
    assert evidence.log_e_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("chance", [0.1, 0.5])
@pytest.mark.parametrize("margin", [0.0, 0.01])
def test_a_candidate_at_its_margin_is_called_worse_in_one_of_a_hundred_runs_at_most(
    chance: float, margin: float
) -> None:
    """1,000 runs with a look after each of 60 groups, at the least favourable point."""
    rng = np.random.default_rng(11)
    arms = drawn(rng, (1000, 60, 16), chance)
    numbers = (rng.random(arms.shape) < 0.02 + margin * arms).astype(float)
    highest = log_evidence(numbers, arms, margin=margin, prior=0.01).max(axis=1)
    assert (highest >= math.log(100)).sum() <= 10
    # A fixed-size test of 1 % looked at so often would be wrong far more often: the runs are hard enough.
    sums = [np.cumsum((numbers * own).sum(2), axis=1) for own in (arms, ~arms)]
    counts = [np.cumsum(own.sum(2), axis=1).clip(1) for own in (arms, ~arms)]
    difference = sums[0] / counts[0] - sums[1] / counts[1] - margin
    deviation = np.sqrt(0.02 * 0.98 * (1 / counts[0] + 1 / counts[1]))
    assert ((difference / deviation)[:, 5:].max(axis=1) > 2.326).sum() > 30


@pytest.mark.parametrize("period", [2, 3, 8])
def test_users_in_turn_of_whom_some_always_fail_are_no_evidence(period: int) -> None:
    """Each request draws its arm. A test that compares each number with one of the other arm beside it would be wrong
    in one of ten runs here."""
    rng = np.random.default_rng(7)
    arms = drawn(rng, (1000, 20, 16), 0.5)
    numbers = np.broadcast_to(np.arange(16) % period == 0, arms.shape).astype(float)
    highest = log_evidence(numbers, arms, margin=0.0, prior=0.01).max(axis=1)
    assert (highest >= math.log(100)).sum() <= 10


def test_waves_that_meet_both_arms_are_no_evidence() -> None:
    rng = np.random.default_rng(5)
    arms = drawn(rng, (300, 60, 16), 0.3)
    rate = np.where(np.arange(60) % 20 < 10, 0.0, 0.6)[None, :, None]
    numbers = (rng.random(arms.shape) < rate).astype(float)
    highest = log_evidence(numbers, arms, margin=0.0, prior=0.01).max(axis=1)
    assert (highest >= math.log(100)).sum() <= 3


def test_five_points_of_errors_are_found_near_the_bound() -> None:
    rng = np.random.default_rng(6)
    arms = drawn(rng, (200, 80, 32), 1 / 7)
    numbers = (rng.random(arms.shape) < 0.005 + 0.05 * arms).astype(float)
    found = log_evidence(numbers, arms, margin=0.01, prior=0.01) >= math.log(100)
    needed = np.where(found.any(axis=1), (found.argmax(axis=1) + 1) * 32 / 7, 10_000)
    bound = fewest_numbers(0.005, 0.055, 0.01, math.log(100))
    assert 0.8 * bound < np.median(needed) < 1.4 * bound


def test_the_bound_is_the_threshold_over_the_divergence() -> None:
    expected = 0.055 * math.log(0.055 / 0.015) + 0.945 * math.log(0.945 / 0.985)
    assert fewest_numbers(0.005, 0.055, 0.01, 4.0) == pytest.approx(4.0 / expected)
    assert fewest_numbers(0.0, 1.0, 0.5, 1.0) == pytest.approx(1 / math.log(2))
    assert fewest_numbers(0.05, 0.06, 0.01, 4.0) == math.inf


@given(history=st.lists(groups, max_size=5), margin=st.floats(0.0, 0.5), prior=st.sampled_from([None, 0.5]))
def test_evidence_stays_finite_whatever_the_numbers(
    history: list[list[tuple[float, bool]]], margin: float, prior: float | None
) -> None:
    evidence = Evidence(margin if prior else 0.0, prior)
    for group in history:
        evidence.add(group)
    assert math.isfinite(evidence.log_e_value)
    assert len(evidence.log_wealth) == len(EFFECTS)


def test_the_bets_use_all_of_the_evidence() -> None:
    assert sum(WEIGHTS) == pytest.approx(1.0)
    assert all(0 < effect < 1 for effect in EFFECTS)
