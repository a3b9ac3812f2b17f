from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.shares import Shares


def take_all(shares: Shares, owner: str, capacity: int) -> int:
    before = shares.held(owner)
    while shares.take(owner, capacity):
        pass
    return shares.held(owner) - before


@pytest.mark.parametrize(
    ("capacity", "first", "second", "third"), [(12, 6, 3, 2), (2, 1, 1, 0), (1, 1, 0, 0)]
)
def test_who_comes_late_finds_room(capacity: int, first: int, second: int, third: int) -> None:
    shares = Shares()
    assert take_all(shares, "a", capacity) == first
    assert take_all(shares, "b", capacity) == second
    assert take_all(shares, "c", capacity) == third
    for _ in range(first):
        shares.give_back("a")
    assert shares.held("a") == 0
    assert len(shares) == second + third


def test_shares_even_out_as_room_comes_back() -> None:
    shares = Shares()
    take_all(shares, "greedy", 300)
    for _ in range(1000):
        shares.give_back("greedy")
        shares.take("late", 300)
        shares.take("greedy", 300)
    assert abs(shares.held("greedy") - shares.held("late")) <= 1


@given(st.integers(0, 20), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=50))
def test_many_at_once_are_as_many_one_by_one(capacity: int, wanted: list[tuple[str, int]]) -> None:
    shares, singles = Shares(), Shares()
    for owner, amount in wanted:
        taken = shares.take(owner, capacity, amount)
        one_by_one = [singles.take(owner, capacity) for _ in range(amount)]
        assert taken == all(one_by_one)
        if not taken:
            for _ in range(sum(one_by_one)):
                singles.give_back(owner)
        assert shares.held(owner) == singles.held(owner)
    for owner in "abc":
        if held := shares.held(owner):
            shares.give_back(owner, held)
    assert len(shares) == 0


@pytest.mark.parametrize("owners", ["a", "ab", "abc"])
def test_who_has_its_share_is_refused_for_its_own_sake(owners: str) -> None:
    shares = Shares()
    for _ in range(120):
        for owner in owners:
            shares.take(owner, 120)
    assert all(shares.is_beyond_share(owner, 120) for owner in owners)
    assert not shares.is_beyond_share("late", 120)


@given(st.integers(0, 20), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_the_room_is_never_overfull(capacity: int, moves: list[tuple[str, bool]]) -> None:
    shares = Shares()
    for owner, takes in moves:
        if takes:
            shares.take(owner, capacity)
        elif shares.held(owner):
            shares.give_back(owner)
        assert len(shares) == sum(shares.held(o) for o in "abc") <= capacity
