"""Which version of a release a sticky caller gets."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.control.catalog.sticky import sticky_version

USERS = [f"user-{number}" for number in range(10_000)]


def assigned(weights: dict[int, int], release: str = "acme/support") -> dict[str, int]:
    return {user: sticky_version(release, user, weights) for user in USERS}


@pytest.mark.parametrize(
    "weights", [{1: 99, 2: 1}, {1: 90, 2: 10}, {1: 1, 2: 1, 3: 1}, {7: 3, 2: 500, 9: 497}]
)
def test_ten_thousand_users_are_split_by_weight_within_three_sigma(weights: dict[int, int]) -> None:
    counts = Counter(assigned(weights).values())
    for version, weight in weights.items():
        share = weight / sum(weights.values())
        sigma = math.sqrt(len(USERS) * share * (1 - share))
        assert abs(counts[version] - len(USERS) * share) <= 3 * sigma


def test_from_ten_to_twenty_percent_only_those_move_who_must() -> None:
    before, after = assigned({1: 90, 2: 10}), assigned({1: 80, 2: 20})
    moved = [user for user in USERS if before[user] != after[user]]
    assert all((before[user], after[user]) == (1, 2) for user in moved)
    assert abs(len(moved) - 1000) <= 3 * math.sqrt(len(USERS) * 0.1 * 0.9)


@pytest.mark.parametrize("raised", [1, 2, 3])
def test_a_larger_weight_among_three_takes_users_over_and_moves_no_other(raised: int) -> None:
    weights = {1: 80, 2: 10, 3: 10}
    before, after = assigned(weights), assigned(weights | {raised: weights[raised] + 10})
    moved = {after[user] for user in USERS if before[user] != after[user]}
    assert moved == {raised}


def test_the_order_of_targets_moves_no_user() -> None:
    assert assigned({1: 80, 2: 10, 3: 10}) == assigned({3: 10, 1: 80, 2: 10})


def test_two_releases_assign_independently() -> None:
    one, other = assigned({1: 50, 2: 50}), assigned({1: 50, 2: 50}, "acme/pirate")
    both = sum(one[user] == other[user] == 2 for user in USERS)
    assert abs(both - 2500) <= 3 * math.sqrt(len(USERS) * 0.25 * 0.75)


@given(
    weights=st.dictionaries(st.integers(1, 50), st.integers(1, 1_000_000), min_size=1, max_size=6),
    raised=st.integers(0, 5),
    by=st.integers(1, 1_000_000),
    user=st.text(max_size=20),
)
def test_raising_a_weight_moves_a_user_to_it_or_not_at_all(
    weights: dict[int, int], raised: int, by: int, user: str
) -> None:
    version = sorted(weights)[raised % len(weights)]
    before = sticky_version("acme/support", user, weights)
    after = sticky_version("acme/support", user, weights | {version: weights[version] + by})
    assert after in {before, version}
    assert before == sticky_version("acme/support", user, dict(weights))
