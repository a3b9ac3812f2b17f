from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.fair_share import FairShare


def take_all(shares: FairShare, owner: str, capacity: int) -> int:
    before = shares.held(owner)
    while shares.acquire(owner, capacity):
        pass
    return shares.held(owner) - before


@pytest.mark.parametrize(
    ("capacity", "first", "second", "third"), [(12, 6, 3, 2), (2, 1, 1, 0), (1, 1, 0, 0)]
)
def test_late_owner_finds_room(capacity: int, first: int, second: int, third: int) -> None:
    shares = FairShare()
    assert take_all(shares, "a", capacity) == first
    assert take_all(shares, "b", capacity) == second
    assert take_all(shares, "c", capacity) == third
    for _ in range(first):
        shares.release("a")
    assert shares.held("a") == 0
    assert len(shares) == second + third


def test_shares_even_out_as_room_comes_back() -> None:
    shares = FairShare()
    take_all(shares, "greedy", 300)
    for _ in range(1000):
        shares.release("greedy")
        shares.acquire("late", 300)
        shares.acquire("greedy", 300)
    assert abs(shares.held("greedy") - shares.held("late")) <= 1


@given(st.integers(0, 20), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), max_size=50))
def test_many_at_once_are_as_many_one_by_one(capacity: int, wanted: list[tuple[str, int]]) -> None:
    shares, singles = FairShare(), FairShare()
    for owner, amount in wanted:
        taken = shares.acquire(owner, capacity, amount)
        one_by_one = [singles.acquire(owner, capacity) for _ in range(amount)]
        assert taken == all(one_by_one)
        if not taken:
            for _ in range(sum(one_by_one)):
                singles.release(owner)
        assert shares.held(owner) == singles.held(owner)
    for owner in "abc":
        if held := shares.held(owner):
            shares.release(owner, held)
    assert len(shares) == 0


@pytest.mark.parametrize("owners", ["a", "ab", "abc"])
def test_owner_with_its_share_is_refused_for_its_own_use(owners: str) -> None:
    shares = FairShare()
    for _ in range(120):
        for owner in owners:
            shares.acquire(owner, 120)
    assert all(shares.is_beyond_share(owner, 120) for owner in owners)
    assert not shares.is_beyond_share("late", 120)


@given(st.integers(0, 20), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
def test_the_room_is_never_overfull(capacity: int, moves: list[tuple[str, bool]]) -> None:
    shares = FairShare()
    for owner, takes in moves:
        if takes:
            shares.acquire(owner, capacity)
        elif shares.held(owner):
            shares.release(owner)
        assert len(shares) == sum(shares.held(o) for o in "abc") <= capacity
