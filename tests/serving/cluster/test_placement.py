"""Where adapters live: everyone who is asked for has a place, and what need not move does not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.placement.hashing import digest_key, key_of, score, scores
from loraplex.serving.placement.placement import (
    BOUND,
    FILL,
    KEEP,
    MOVED,
    SLACK,
    WEIGHS,
    AdapterDemand,
    AdapterPlace,
    Member,
    Places,
    elsewhere,
    place,
)

PLACES, BYTES = 16, 1000


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def members(count: int, resident: Iterable[str] = (), first: int = 0) -> list[Member]:
    found = frozenset(resident)
    return [Member(f"m{number}", PLACES, BYTES, found) for number in range(first, first + count)]


def settle(
    among: list[Member], demand: Mapping[str, AdapterDemand], before: Places, rounds: int = 400
) -> Places:
    """Places when nothing moves any more: each round, all have loaded what they were given."""
    for _ in range(rounds):
        placed = place([replace(member, resident=demand.keys()) for member in among], demand, before)
        if placed.places == before:
            return before
        before = placed.places
    raise AssertionError("it never comes to rest")


def names(places: tuple[AdapterPlace, ...]) -> set[str]:
    return {each.member for each in places}


demands = st.dictionaries(
    st.integers(0, 60).map(digest),  # few, so that those of two rounds are often the same
    st.builds(
        AdapterDemand,
        st.sampled_from([0.0, 1.0, 4.0, 12.0]) | st.floats(0, 60),
        st.sampled_from([1, 400, 700]) | st.integers(1, 1200),
        st.booleans(),
    ),
    max_size=40,
)
capacities = st.lists(st.sampled_from([BYTES, BYTES, 500, 300]), max_size=6)


@given(capacities, demands, st.integers(0, 6), demands, st.randoms(use_true_random=False))
def test_whatever_was_before(
    bytes_now: list[int],
    demand: dict[str, AdapterDemand],
    count_before: int,
    demand_before: dict[str, AdapterDemand],
    rng: random.Random,
) -> None:
    """Members and adapters that come and go: each has a place or is told of; bytes and moves stay within bounds; the
    order of what is given does not count."""
    before = place(members(count_before), demand_before, {}).places
    resident = [key for key in demand if rng.random() < 0.5]
    among = [
        replace(member, adapter_bytes=size)
        for member, size in zip(members(len(bytes_now), resident, first=2), bytes_now, strict=True)
    ]
    placed = place(among, demand, before)
    assert placed.places.keys() | placed.unplaced == demand.keys()
    assert not placed.places.keys() & placed.unplaced
    capacity = {member.id: member.adapter_bytes for member in among}
    held = dict.fromkeys(capacity, 0)
    for key, found in placed.places.items():
        assert found
        assert len(names(found)) == len(found)
        assert names(found) <= capacity.keys()
        assert any(each.reason != "leaving" for each in found)
        assert all(demand[key].size <= capacity[each.member] for each in found)
        if demand[key].is_pinned or demand[key].concurrency > WEIGHS * PLACES:
            for each in found:
                held[each.member] += demand[key].size
    assert all(used <= capacity[member] for member, used in held.items())
    assert placed.moved <= max(1, MOVED * len(demand))
    for key in placed.unplaced:
        if demand[key].size <= max(capacity.values(), default=0):
            # It weighs, and others that do have taken the room.
            assert demand[key].is_pinned or demand[key].concurrency > WEIGHS * PLACES
            assert all(held[member] + demand[key].size > size for member, size in capacity.items())
    shuffled, mixed = list(demand.items()), list(among)
    rng.shuffle(shuffled)
    rng.shuffle(mixed)
    assert place(mixed, dict(shuffled), before) == placed


@given(st.integers(1, 6), demands)
def test_at_rest_nothing_moves(count: int, demand: dict[str, AdapterDemand]) -> None:
    among = members(count)
    before = settle(among, demand, {})
    assert place([replace(m, resident=demand.keys()) for m in among], demand, before).moved == 0


def zipf(count: int, total: float) -> dict[str, AdapterDemand]:
    weights = [1 / (rank + 1) ** 1.1 for rank in range(count)]
    return {
        digest(rank): AdapterDemand(total * weight / sum(weights), 1) for rank, weight in enumerate(weights)
    }


def test_a_member_that_comes_takes_its_share_and_gives_it_back() -> None:
    demand = zipf(256, 83.0)
    eight = settle(members(8), demand, {})
    nine = settle(members(9), demand, eight)
    moved = [key for key in demand if names(eight[key]) != names(nine[key])]
    assert len(moved) / len(demand) <= 1 / 9 + 0.05
    gained = [key for key in demand if "m8" in names(nine[key])]
    assert 0.06 <= len(gained) / len(demand) <= 0.17
    assert settle(members(8), demand, nine) == settle(members(8), demand, eight)


def test_growth_moves_few_a_round_and_loads_before_it_leaves() -> None:
    demand = zipf(400, 83.0)
    before = settle(members(8), demand, {})
    nine = members(9, demand)
    empty = [*nine[:8], replace(nine[8], resident=frozenset())]
    placed = place(empty, demand, before)
    assert placed.moved == MOVED * 400
    moving = [key for key in demand if any(each.reason == "leaving" for each in placed.places[key])]
    assert len(moving) == placed.moved
    for key in moving:
        assert names(before[key]) <= names(placed.places[key])
    # It goes on to wait for the loads, and begins others; once they are there, the old places are free.
    again = place(empty, demand, placed.places)
    assert all(names(before[key]) <= names(again.places[key]) for key in moving)
    loaded = place(nine, demand, placed.places)
    assert not any(each.reason == "leaving" for key in moving for each in loaded.places[key])


def test_the_death_of_a_member_moves_what_it_had() -> None:
    demand = zipf(256, 83.0)
    before = settle(members(8), demand, {})
    placed = place(members(7, demand), demand, before)
    for key, found in before.items():
        if "m7" not in names(found):
            light = demand[key].concurrency <= WEIGHS * PLACES
            assert not light or placed.places[key] == found
    assert placed.moved <= MOVED * 256 + 1


def test_copies_follow_demand_with_hysteresis() -> None:
    among, key = members(8), digest(1)
    others = zipf(200, 60.0)
    step = FILL * PLACES

    def copies(concurrency: float, before: Places) -> tuple[int, Places]:
        found = settle(among, others | {key: AdapterDemand(concurrency, 1)}, before)
        return len(found[key]), found

    count, before = copies(0.9 * step, {})
    assert count == 1
    count, before = copies(1.1 * step, before)
    assert count == 2
    for share in (0.95, 0.7, 1.1, KEEP + 0.01):
        count, before = copies(share * step, before)
        assert count == 2
    count, before = copies((KEEP - 0.01) * step, before)
    assert count == 1
    count, before = copies(1000.0, before)
    assert count == len(among)


def test_heavy_adapters_are_spread() -> None:
    heavy = {digest(number): AdapterDemand(6.0, 1) for number in range(24)}
    found = settle(members(8), heavy, {})
    loads = dict.fromkeys((member.id for member in members(8)), 0.0)
    for places in found.values():
        for each in places:
            loads[each.member] += 6.0 / len(places)
    assert max(loads.values()) <= BOUND * SLACK * 24 * 6.0 / 8 + 6.0
    assert {each.reason for places in found.values() for each in places} == {"home", "overflow"}


def test_equal_adapters_are_placed_alike_in_any_order() -> None:
    heavy = {digest(number): AdapterDemand(6.0, 400, number % 3 == 0) for number in range(24)}
    back = dict(reversed(heavy.items()))
    assert place(members(8), heavy, {}) == place(members(8)[::-1], back, {})


def test_a_place_without_room_is_left_at_once() -> None:
    (key,) = heavy = {digest(1): AdapterDemand(1.0, 600)}
    before = place(members(2), heavy, {}).places
    (home,) = names(before[key])
    among = [replace(m, adapter_bytes=500 if m.id == home else BYTES) for m in members(2)]
    assert names(place(among, heavy, before).places[key]) == {"m0", "m1"} - {home}


def test_demand_that_swings_does_not_thrash() -> None:
    """Demand swings by up to a fifth, a fiftieth in a round, as smoothing leaves it of requests that come at random."""
    base = zipf(256, 83.0)
    rng = random.Random(0)
    places, factors = settle(members(8), base, {}), dict.fromkeys(base, 1.0)
    moved = 0
    for _ in range(200):
        factors = {key: min(1.2, max(0.8, each + rng.uniform(-0.02, 0.02))) for key, each in factors.items()}
        demand = {
            key: replace(each, concurrency=each.concurrency * factors[key]) for key, each in base.items()
        }
        placed = place(members(8, base), demand, places)
        places, moved = placed.places, moved + placed.moved
    assert moved <= 20  # one in ten rounds


def test_what_fits_nowhere_is_told() -> None:
    key = digest(1)
    for concurrency, is_pinned in ((0.0, True), (0.1, False), (50.0, False)):
        placed = place(members(3), {key: AdapterDemand(concurrency, BYTES + 1, is_pinned)}, {})
        assert placed.unplaced == {key}
    many = {digest(number): AdapterDemand(0.0, 400, True) for number in range(9)}
    placed = place(members(3), many, {})
    assert (len(placed.places), len(placed.unplaced)) == (6, 3)
    assert place([], many, {}).unplaced == many.keys()
    assert place(members(3), {}, placed.places).places == {}


def test_what_is_at_home_elsewhere() -> None:
    here, there, both, unknown = map(digest, range(4))
    places = {
        here: (AdapterPlace("m0", "home"),),
        there: (AdapterPlace("m1", "home"),),
        both: (AdapterPlace("m1", "home"), AdapterPlace("m0", "leaving")),
    }
    member = Member("m0", PLACES, BYTES, {here, there, both, unknown})
    assert elsewhere(member, places) == {there}


def test_one_order_of_members_is_computed_in_two_ways() -> None:
    keys = [digest_key(digest(number)) for number in range(20)]
    ids = [key_of(f"m{number}".encode()) for number in range(7)]
    assert scores(keys, ids).tolist() == [[score(key, each) for each in ids] for key in keys]


def test_the_order_of_members_is_the_same_in_every_process() -> None:
    assert key_of(b"m0") == int.from_bytes(hashlib.blake2b(b"\0\0\0\2m0", digest_size=8).digest(), "big")
    assert key_of(b"ab", b"c") != key_of(b"a", b"bc")


@pytest.mark.parametrize("count", [2, 5, 8])
def test_light_adapters_are_spread_evenly(count: int) -> None:
    demand = {digest(number): AdapterDemand(0.1, 1) for number in range(2000)}
    found = place(members(count), demand, {}).places
    held = [sum(names(places) == {f"m{number}"} for places in found.values()) for number in range(count)]
    assert max(held) <= 1.2 * 2000 / count
