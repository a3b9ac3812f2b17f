"""The e-process of one metric, against an exact sum over all outcomes and an independent form in numpy."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.lifecycle.release_guard.evidence import EFFECTS, Evidence, block_sizes, fewest_numbers
from support.releases.oracle import log_evidence

shares = st.floats(0.0, 1.0)


def expected_factor(evidence: Evidence, control: list[float], candidate: list[float]) -> float:
    """What a block multiplies the evidence by in the mean, over all outcomes of independent Bernoulli numbers."""
    before, total = evidence.log_e_value, 0.0
    means = [*control, *candidate]
    for outcome in itertools.product((0.0, 1.0), repeat=len(means)):
        chance = math.prod(mean if hit else 1 - mean for mean, hit in zip(means, outcome, strict=True))
        after = copy.deepcopy(evidence)
        after.add(outcome[: len(control)], outcome[len(control) :])
        total += chance * math.exp(after.log_e_value - before)
    return total


@given(
    margin=st.floats(0.0, 0.5),
    history=st.lists(st.tuples(shares, shares), max_size=4),
    control=st.lists(shares, min_size=1, max_size=4),
    spread=st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=3),
    below=shares,
)
def test_no_mean_of_the_null_hypothesis_has_a_factor_above_one(
    margin: float, history: list[tuple[float, float]], control: list[float], spread: list[float], below: float
) -> None:
    """Keys of one arm may differ: what counts is the mean of those in the block."""
    evidence = Evidence(margin, prior=0.01)
    for of_control, of_candidate in history:
        evidence.add([of_control], [of_candidate])
    most = min(1.0, sum(control) / len(control) + margin)
    mean = most * (1 - below * 0.5)
    candidate = [min(1.0, max(0.0, mean + by - sum(spread) / len(spread))) for by in spread]
    excess = sum(candidate) / len(candidate) - most
    candidate = [max(0.0, number - max(0.0, excess)) for number in candidate]
    if sum(candidate) / len(candidate) <= most:
        assert expected_factor(evidence, control, candidate) <= 1 + 1e-9


def test_a_candidate_above_the_margin_has_a_factor_above_one() -> None:
    evidence = Evidence(0.01, prior=0.01)
    assert expected_factor(evidence, [0.01] * 4, [0.1]) > 1.01


@pytest.mark.parametrize(("num_control", "num_candidate"), [(1, 1), (8, 1), (1, 3)])
def test_the_same_evidence_as_the_oracle_to_the_last_digits(num_control: int, num_candidate: int) -> None:
    rng = np.random.default_rng(4)
    control, candidate = rng.random((50, num_control)), rng.random((50, num_candidate))
    evidence = Evidence(0.05, prior=0.5)
    for of_control, of_candidate in zip(control, candidate, strict=True):
        evidence.add(of_control.tolist(), of_candidate.tolist())
    expected = log_evidence(control[None], candidate[None], margin=0.05, prior=0.5)[0, -1]
    assert evidence.log_e_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("num_control", "num_candidate"), [(4, 1), (1, 1)])
@pytest.mark.parametrize("margin", [0.0, 0.01])
def test_a_candidate_at_its_margin_is_called_worse_in_one_of_a_hundred_runs_at_most(
    num_control: int, num_candidate: int, margin: float
) -> None:
    """1,000 runs with a look after each of 250 blocks, at the least favourable point."""
    rng = np.random.default_rng(11)
    control = (rng.random((1000, 250, num_control)) < 0.02).astype(float)
    candidate = (rng.random((1000, 250, num_candidate)) < 0.02 + margin).astype(float)
    highest = log_evidence(control, candidate, margin=margin, prior=0.01).max(axis=1)
    assert (highest >= math.log(100)).sum() <= 10
    # A fixed-size test of 1 % looked at so often would be wrong far more often: the runs are hard enough.
    differences = np.cumsum(candidate.mean(2) - control.mean(2) - margin, axis=1)
    deviation = np.sqrt(np.cumsum(np.full(250, 0.02 * 0.98 * (1 / num_control + 1 / num_candidate))))
    assert ((differences / deviation)[:, 50:].max(axis=1) > 2.326).sum() > 30


def test_waves_that_meet_both_arms_are_no_evidence() -> None:
    rng = np.random.default_rng(5)
    rate = np.where(np.arange(300) % 100 < 50, 0.0, 0.6)[None, :, None]
    control = (rng.random((300, 300, 4)) < rate).astype(float)
    candidate = (rng.random((300, 300, 1)) < rate).astype(float)
    highest = log_evidence(control, candidate, margin=0.0, prior=0.01).max(axis=1)
    assert (highest >= math.log(100)).sum() <= 3


def test_five_points_of_errors_are_found_near_the_bound() -> None:
    rng = np.random.default_rng(6)
    control = (rng.random((200, 400, 6)) < 0.005).astype(float)
    candidate = (rng.random((200, 400, 1)) < 0.055).astype(float)
    found = log_evidence(control, candidate, margin=0.01, prior=0.01) >= math.log(100)
    needed = np.where(found.any(axis=1), found.argmax(axis=1) + 1, 10_000)
    bound = fewest_numbers(0.005, 0.055, 0.01, math.log(100))
    assert 0.8 * bound < np.median(needed) < 1.4 * bound


def test_the_bound_is_the_threshold_over_the_divergence() -> None:
    expected = 0.055 * math.log(0.055 / 0.015) + 0.945 * math.log(0.945 / 0.985)
    assert fewest_numbers(0.005, 0.055, 0.01, 4.0) == pytest.approx(4.0 / expected)
    assert fewest_numbers(0.0, 1.0, 0.5, 1.0) == pytest.approx(1 / math.log(2))
    assert fewest_numbers(0.05, 0.06, 0.01, 4.0) == math.inf


@given(control=st.floats(0.01, 1e6), candidate=st.floats(0.01, 1e6))
def test_a_block_has_both_arms_and_a_bounded_size(control: float, candidate: float) -> None:
    num_control, num_candidate = block_sizes(control, candidate)
    assert 1 <= num_control <= 8
    assert 1 <= num_candidate <= 8
    assert 1 in (num_control, num_candidate)


@given(
    blocks=st.lists(
        st.tuples(st.lists(shares, min_size=1, max_size=8), st.lists(shares, min_size=1, max_size=8))
    ),
    margin=st.floats(0.0, 0.5),
)
def test_evidence_stays_finite_whatever_the_numbers(
    blocks: list[tuple[list[float], list[float]]], margin: float
) -> None:
    evidence = Evidence(margin, prior=0.5)
    for control, candidate in blocks:
        evidence.add(control, candidate)
    assert math.isfinite(evidence.log_e_value)
    assert len(evidence.log_wealth) == len(EFFECTS)
