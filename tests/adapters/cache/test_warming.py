"""Adapters that are loaded again after a restart, behind everything that a request waits for."""

from __future__ import annotations

from loraplex.adapters.cache.adapter_cache import Residency
from support.adapters.cache_fakes import CacheRig, make_ref
from support.adapters.cache_integrity import check_cache

REFS = [make_ref(name) for name in "abcdefgh"]
A, B, C, D, E, *_ = REFS


def settle(rig: CacheRig) -> list[str]:
    """Finish what is loaded and copied until nothing begins any more; the digests in the order of their loads."""
    order = []
    for _ in range(100):
        rig.step()
        if rig.transport.loads:
            order.append(rig.transport.loads[0].digest)
            rig.transport.finish_load()
        elif rig.transport.copies:
            rig.transport.finish_copy()
        else:
            return order
    raise AssertionError("it never ends")


def warmed(rig: CacheRig) -> dict[str, int]:
    return {outcome: count for outcome, count in rig.cache.usage().warmed.items() if count}


def test_in_order_to_the_device_and_then_to_host_memory() -> None:
    rig = CacheRig(num_pages=2, host_pages=4)
    rig.cache.warm(REFS)
    assert rig.cache.usage().num_warming == len(REFS)
    assert settle(rig) == ["a", "b", "c", "d"]
    assert rig.cache.residency() == {"a": "hot", "b": "hot", "c": "warm", "d": "warm"}
    assert rig.cache.usage().num_warming == 0
    assert warmed(rig) == {"device": 2, "host": 2, "skipped": 4}


def test_a_device_larger_than_host_memory_is_filled() -> None:
    rig = CacheRig(num_pages=4, host_pages=2)
    rig.cache.warm(REFS)
    settle(rig)
    assert rig.on_device(*REFS) == ["a", "b", "c", "d"]


def test_hints_come_first_and_pins_are_not_loaded_twice() -> None:
    rig = CacheRig(num_pages=8, num_slots=8)
    rig.cache.pin(C)
    rig.cache.warm([A, B, C])
    rig.cache.prefetch(D)
    assert settle(rig) == ["c", "d", "a", "b"]
    assert warmed(rig) == {"device": 2}


def test_no_request_waits_for_it() -> None:
    """Two loads at a time: with a warming load and one of a request under way, the next request has its own at once."""
    rig = CacheRig(max_loads=2)
    rig.cache.warm([A, B])
    rig.step()
    assert [move.digest for move in rig.transport.loads] == ["a"]
    assert rig.step(C, D) == [Residency.LOADING, Residency.LOADING]
    cancelled, *others = rig.transport.loads
    assert cancelled.cancelled
    assert [move.digest for move in others] == ["c", "d"]
    for ref in (C, D):
        rig.transport.finish_load(ref.digest)
    rig.step(C, D)
    assert not [move for move in rig.transport.loads if not move.cancelled], (
        "its thread may still be in that load"
    )
    rig.transport.finish_load("a")
    assert settle(rig) == ["a", "b"], "it is the next again"
    assert warmed(rig) == {"device": 2}
    check_cache(rig.cache)


def test_a_request_for_what_is_being_warmed_takes_its_load_over() -> None:
    rig = CacheRig(max_loads=1)
    rig.cache.warm([A, B])
    rig.step()
    assert rig.step(A, C) == [Residency.LOADING, Residency.NO_ROOM]
    assert rig.transport.num_loads == 1
    assert not rig.transport.loads[0].cancelled
    settle(rig)
    assert rig.cache.state("a") == "hot"


def test_a_request_that_host_memory_has_no_room_for_takes_that_of_warming() -> None:
    rig = CacheRig(num_pages=1, host_pages=1)
    rig.cache.warm([A])
    rig.step()
    rig.transport.finish_load()
    rig.step()
    rig.transport.finish_copy()
    rig.cache.warm([B])
    rig.step()
    assert rig.step(C) == [Residency.LOADING]


def test_what_is_warmed_pushes_out_nothing() -> None:
    """Neither images of others, where a load finds less memory than it takes, nor adapters on the device."""
    rig = CacheRig(num_pages=2, num_slots=4, host_pages=3)
    rig.bring(A, B)
    rig.cache.warm([C, D])
    rig.step()
    rig.transport.shortage = 100
    rig.step()
    assert rig.transport.loads[0].cancelled
    rig.transport.shortage = 0
    rig.transport.finish_load()
    settle(rig)
    assert rig.cache.state("a") == rig.cache.state("b") == "hot"
    assert rig.cache.usage().host_evictions == rig.cache.usage().device_evictions == 0
    assert warmed(rig) == {"host": 1, "skipped": 1}


def test_what_was_warmed_is_evicted_first_and_the_least_wanted_before_the_others() -> None:
    rig = CacheRig(num_pages=3)
    rig.bring(A)
    rig.cache.warm([B, C])
    settle(rig)
    rig.bring(D)
    assert rig.on_device(A, B, C, D) == ["a", "b", "d"]


def test_caps_of_tenants_hold() -> None:
    mine = [make_ref(f"m{number}", tenant="capped") for number in range(5)]
    rig = CacheRig(num_pages=8, num_slots=8)
    rig.limit("capped", most=2, host=3)
    rig.bring(A)  # the size of an adapter is known
    rig.cache.warm([*mine, B])
    settle(rig)
    assert rig.on_device(*mine) == ["m0", "m1"]
    assert [rig.cache.state(ref.digest) for ref in mine[2:]] == ["warm", "cold", "cold"]
    assert rig.cache.usage().cap_evictions == {"device": 0, "host": 0}, "it is not loaded to be dropped"
    assert rig.cache.state("b") == "hot", "other tenants' adapters are still warmed"
    assert rig.cache.tenants.tenant_bytes()["capped"].host <= 300


def test_a_reservation_keeps_what_was_warmed() -> None:
    mine = make_ref("mine", tenant="reserving")
    rig = CacheRig(num_pages=4)
    rig.limit("reserving", reserved=1)
    rig.cache.warm([mine, A, B, C])
    settle(rig)
    rig.bring(D, E)
    assert rig.on_device(mine) == ["mine"]


def test_failures_deletions_and_a_new_list() -> None:
    rig = CacheRig(num_pages=8, num_slots=8)
    rig.cache.warm([A, B, C, D])
    rig.step()
    rig.transport.finish_load(error="its bytes are away")
    rig.step()
    rig.cache.drop("b")  # while it is loaded
    rig.cache.drop("c")  # before
    rig.transport.finish_load("b")
    assert settle(rig) == ["d"]
    assert warmed(rig) == {"failed": 1, "skipped": 2, "device": 1}
    rig.cache.warm([E])
    rig.cache.warm([A, D])
    assert settle(rig) == [], "what failed is not tried again at once, what is there is not loaded again"
    assert rig.cache.state("e") == "cold"
    assert rig.cache.usage().num_warming == 0


def test_pins_on_their_way_and_those_that_will_not_come() -> None:
    rig = CacheRig(num_pages=4, num_slots=4, sizes={"a": 1, "b": 1, "c": 2})

    def pins() -> tuple[int, int, int]:
        usage = rig.cache.usage()
        return usage.num_pins, usage.num_pins_held, usage.num_pins_coming

    for name in "abc":
        rig.cache.pin(make_ref(name, tenant=f"tenant-{name}"))
    assert pins() == (3, 0, 3)
    rig.step()
    rig.transport.finish_load("a")
    rig.step()
    rig.transport.finish_copy("a")
    rig.step()
    assert pins() == (3, 1, 2)
    rig.transport.finish_load("b", error="its bytes are damaged")
    rig.step()
    assert pins() == (3, 1, 1)
    rig.transport.finish_load("c")
    rig.step()
    assert pins() == (3, 1, 0), "it is too large beside the other pin"
