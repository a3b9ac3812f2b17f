"""Which member serves a request: the least wait, and among alike ones always the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.serving.placement.choice import MemberLoad, choose
from loraplex.serving.placement.hashing import key_of
from loraplex.serving.placement.levels import HALF_LIFE_S, RISE_S, DemandLevels


def load(name: str, running: int = 0, *, places: int = 16, mean_s: float = 2.0) -> MemberLoad:
    return MemberLoad(key_of(name.encode()), running, places, mean_s)


def cluster(*running: int) -> dict[str, MemberLoad]:
    return {f"m{number}": load(f"m{number}", count) for number, count in enumerate(running)}


def test_nobody_is_there() -> None:
    assert choose({}) is None
    assert choose({}, places=["m0"]) is None


def test_a_request_goes_where_its_adapter_lives() -> None:
    among = cluster(10, 0, 0)
    assert choose(among, places=["m0"], resident=["m0"], load_s=0.5) == "m0"
    # A place whose member is gone is none.
    assert choose(among, places=["gone", "m2"], resident=[], load_s=0.5) == "m2"
    assert choose(among, places=["gone"], load_s=0.5) in among


def test_a_load_counts_twice() -> None:
    # A wait of two requests at m0: 2 / 16 · 2 s = 0.25 s, beside 2 · load_s at m1.
    among = cluster(17, 15)
    both = {"places": ["m0", "m1"], "resident": ["m0"]}
    assert choose(among, load_s=0.05, **both) == "m1"
    assert choose(among, load_s=0.5, **both) == "m0"
    # Between the two: alone, the load would be the shorter one.
    assert choose(among, load_s=0.24, **both) == "m0"


def test_full_places_spill_over() -> None:
    among = cluster(40, 20, 3)
    assert choose(among, places=["m0"], resident=["m0"], load_s=0.1) == "m2"
    # A request that waits less than the load would take stays.
    assert choose(cluster(17, 20, 3), places=["m0"], resident=["m0"], load_s=5.0) == "m0"


def test_conversations_stay_and_spread() -> None:
    among = cluster(3, 3, 3, 3)
    chosen = [choose(among, prefix=str(number).encode()) for number in range(400)]
    assert chosen == [choose(among, prefix=str(number).encode()) for number in range(400)]
    assert all(70 <= chosen.count(name) <= 130 for name in among)
    # One that leaves takes only its own along.
    rest = {name: each for name, each in among.items() if name != "m1"}
    for number, before in enumerate(chosen):
        if before != "m1":
            assert choose(rest, prefix=str(number).encode()) == before


def test_conversations_stay_among_the_members_that_have_the_adapter() -> None:
    among = cluster(3, 3, 3, 3)
    options = {"places": list(among), "resident": ["m1", "m2"], "load_s": 0.5}
    chosen = [choose(among, prefix=str(number).encode(), **options) for number in range(200)]
    assert {*chosen} == {"m1", "m2"}
    assert 70 <= chosen.count("m1") <= 130
    # One that has it comes before one that would load it in no time.
    assert {choose(among, prefix=str(n).encode(), **{**options, "load_s": 0.0}) for n in range(50)} == {
        "m1",
        "m2",
    }


def test_one_prefix_for_all_fills_no_member_first() -> None:
    running = dict.fromkeys(cluster(0, 0, 0, 0), 0)
    for _ in range(40):
        among = {name: load(name, count) for name, count in running.items()}
        found = choose(among, prefix=b"you are a helpful assistant")
        assert found is not None
        running[found] += 1
    assert max(running.values()) <= 1.25 * 10 + 2


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.integers(0, 60), st.integers(1, 32), st.floats(0, 100))
    ),
    st.sets(st.sampled_from("abcdefgh")),
    st.sets(st.sampled_from("abcdefgh")),
    st.floats(0, 10),
    st.binary(max_size=8),
)
def test_the_order_of_what_is_given_does_not_count(
    given_loads: dict[str, tuple[int, int, float]],
    places: set[str],
    resident: set[str],
    load_s: float,
    prefix: bytes,
) -> None:
    among = {
        name: load(name, running, places=seats, mean_s=mean)
        for name, (running, seats, mean) in given_loads.items()
    }
    options = {"resident": resident, "load_s": load_s, "prefix": prefix}
    found = choose(among, places=sorted(places), **options)
    back = dict(reversed(among.items()))
    assert choose(back, places=sorted(places, reverse=True), **options) == found
    assert (found is None) == (not among)
    free = {name for name in places & among.keys() if among[name].load < among[name].places}
    if free and found is not None:
        assert found in places


def test_demand_rises_in_seconds_and_falls_in_minutes() -> None:
    levels = DemandLevels()
    levels.begin("a", 0.0, 10)
    assert levels.levels(0.0) == {"a": 0.0}
    assert 6.2 < levels.levels(RISE_S)["a"] < 6.4
    assert levels.levels(60.0)["a"] > 9.99
    levels.end("a", 60.0, 10)
    assert 4.99 < levels.levels(60.0 + HALF_LIFE_S)["a"] < 5.01
    assert levels.levels(60.0 + 12 * HALF_LIFE_S) == {}
    levels.begin("a", 5000.0)
    levels.end("a", 5000.1)
    assert levels.levels(5000.1)["a"] < 0.05


def test_how_often_it_is_looked_at_does_not_matter() -> None:
    often, once = DemandLevels(), DemandLevels()
    for each in (often, once):
        each.begin("a", 0.0, 3)
    for step in range(1, 100):
        often.levels(step / 10)
    assert abs(often.levels(10.0)["a"] - once.levels(10.0)["a"]) < 1e-9
