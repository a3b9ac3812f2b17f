"""What an operator may ask of the cache: to pin adapters, to forget them, and to bring them nearer."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache.adapter_cache import PinRefused, Residency
from support.adapters.cache_fakes import CacheRig, make_ref
from support.adapters.cache_integrity import check_cache

A, B, C, D = (make_ref(name) for name in "abcd")


def test_pinned_adapters_come_by_themselves_and_stay() -> None:
    rig = CacheRig(num_pages=2)
    rig.cache.pin(A)
    rig.transport.finish_load()
    rig.step()
    rig.transport.finish_copy()
    rig.step()
    assert rig.cache.state("a") == "hot"
    rig.bring(B, C, D)
    assert rig.cache.state("a") == "hot"
    rig.cache.unpin("a")
    rig.bring(B, C)
    assert rig.cache.state("a") == "warm"


def test_a_pinned_adapter_is_tried_again_after_a_failure() -> None:
    rig = CacheRig()
    rig.cache.pin(A)
    rig.transport.finish_load(error="no")
    rig.step()
    assert not rig.transport.loads
    assert rig.cache.next_timeout_s() == pytest.approx(1.0)
    (entry,) = rig.cache.entries()
    assert (entry.pinned, entry.error) == (True, "no")
    rig.clock.now += 1
    rig.step()
    assert len(rig.transport.loads) == 1
    rig.clock.now += 9
    assert rig.cache.next_timeout_s() == pytest.approx(51.0), (
        "only the load's own time-out is left to wait for"
    )


def test_pins_hold_half_of_the_device_and_one_tenants_a_quarter() -> None:
    rig = CacheRig(num_pages=16, num_slots=12, sizes={"a": 3, "b": 2, "c": 3, "d": 3, "big": 9, "huge": 16})
    rig.bring(A)
    rig.bring(B)
    rig.cache.pin(A)
    with pytest.raises(
        PinRefused, match=r"one tenant's pins may hold 4 of the device's 16 pages .* 3 are held"
    ):
        rig.cache.pin(B)
    others = [make_ref(name, tenant=f"other-{name}") for name in ("c", "d")]
    rig.bring(others[0])
    rig.cache.pin(others[0])
    rig.bring(others[1])
    with pytest.raises(PinRefused, match=r"all pins may hold 8 .* 6 are held, and it needs 3"):
        rig.cache.pin(others[1])
    # Whatever is pinned, the other half serves all adapters.
    rig.bring(make_ref("big"))
    assert rig.cache.state("big") == "hot"
    rig.clock.now += 5
    rig.step(make_ref("huge"))
    rig.transport.finish_load()
    assert rig.step(make_ref("huge")) == [Residency.FAILED]
    assert (
        "it needs 16 pages of device memory; the device memory for adapters has 16, and 6 of them are pinned"
        in (rig.failed("huge"))
    )


def test_places_are_shared_like_pages() -> None:
    rig = CacheRig(num_pages=40, num_slots=4)
    rig.bring(A)
    rig.bring(B)
    rig.cache.pin(A)
    with pytest.raises(PinRefused, match="one tenant's pins may hold 1 of the 4 slots"):
        rig.cache.pin(B)
    rig.cache.unpin("a")
    rig.cache.pin(B)


def test_a_pin_whose_adapter_turns_out_too_large_holds_nothing_and_the_adapter_is_served() -> None:
    rig = CacheRig(num_pages=16, num_slots=12, sizes={"a": 3, "b": 3})
    rig.bring(A)
    rig.cache.pin(A)
    rig.cache.pin(B)  # nobody knows its size yet
    rig.transport.finish_load("b")
    for _ in range(5):
        rig.step()
        rig.clock.now += 40
    assert not rig.transport.copies
    assert rig.transport.num_loads == 2
    assert rig.cache.state("b") == "warm"
    rig.bring(B)
    assert rig.cache.state("b") == "hot"
    rig.bring(make_ref("c"), make_ref("d"))
    rig.cache.unpin("a")
    rig.step()
    # Now its pin holds it: others that need all the room do not drive it out.
    rig.bring(*(make_ref(str(n)) for n in range(30)))
    assert rig.cache.state("b") == "hot"
    assert rig.cache.state("a") != "hot"


def test_pins_leave_a_place_for_loads_to_requests() -> None:
    rig = CacheRig()
    for pinned in (A, B, C):
        rig.cache.pin(pinned)
    rig.step()
    assert [move.digest for move in rig.transport.loads] == ["a"]
    assert rig.step(D) == [Residency.LOADING]
    rig.transport.finish_load("a")
    rig.step(D)
    assert [move.digest for move in rig.transport.loads] == ["d", "b"]


def test_adapter_without_room_is_not_read_again() -> None:
    """Hundreds of requests for what has no room would keep the loaders busy without end."""
    rig = CacheRig(num_pages=16, sizes={"b": 3, "c": 14})
    rig.bring(B)
    rig.cache.pin(B)
    rig.step(C)
    rig.transport.finish_load("c")
    for _ in range(10):
        assert rig.step(C) == [Residency.FAILED]
        rig.clock.now += 20
    assert rig.transport.num_loads == 2
    assert "3 of them are pinned" in rig.failed("c")
    with pytest.raises(PinRefused, match="needs 14 pages"):
        rig.cache.pin(C)
    rig.cache.unpin("b")
    rig.clock.now += 40
    assert rig.step(C) == [Residency.LOADING]


def test_a_dropped_version_is_forgotten_when_nothing_uses_it() -> None:
    rig = CacheRig()
    rig.bring(A)
    lease = rig.cache.acquire("a")
    rig.cache.pin(A)
    rig.cache.drop("a")
    assert rig.cache.state("a") == "hot"
    assert rig.transport.read(lease.slot, (rig.transport.pages.index("a"),)) == {"a"}
    rig.cache.release(lease)
    check_cache(rig.cache)
    assert rig.cache.entries() == ()
    assert rig.cache.usage().num_arena_pages_used == 0
    assert rig.cache.usage().host_bytes_used == 0


def test_dropping_on_the_way_cancels_the_load_and_waits_for_the_copy() -> None:
    rig = CacheRig()
    rig.step(A, B)
    rig.transport.finish_load("b")
    rig.step(B)
    rig.cache.drop("a")
    rig.cache.drop("b")
    assert rig.transport.loads[0].cancelled
    assert rig.cache.usage().num_arena_pages_used == 1
    rig.transport.finish_copy()
    rig.step()
    assert rig.cache.usage().num_arena_pages_used == 0
    assert rig.cache.entries() == ()


def test_asked_for_again_a_dropped_version_stays() -> None:
    rig = CacheRig()
    rig.bring(A)
    lease = rig.cache.acquire("a")
    rig.cache.drop("a")
    assert rig.step(A) == [Residency.READY]
    rig.cache.release(lease)
    assert rig.cache.state("a") == "hot"


def test_prefetch_takes_free_room_only() -> None:
    rig = CacheRig(num_pages=1)
    rig.cache.prefetch(A)
    rig.cache.prefetch(B)
    rig.step()
    assert len(rig.transport.loads) == 1, "prefetches are read one at a time"
    rig.transport.finish_load()
    rig.step()
    rig.transport.finish_copy()
    rig.transport.finish_load()
    rig.step()
    assert [rig.cache.state(d) for d in "ab"] == ["hot", "warm"]
    rig.cache.prefetch(C)
    rig.step()
    rig.transport.finish_load(error="no")
    for _ in range(3):
        rig.step()
    assert not rig.transport.loads, "a failed prefetch is not tried again"


def test_a_prefetch_pushes_no_image_out_of_host_memory() -> None:
    rig = CacheRig(num_pages=1, host_pages=2)
    rig.bring(A, B)  # A was evicted for B, and kept its image
    rig.cache.prefetch(C)
    rig.step()
    assert not rig.transport.loads
    assert rig.cache.residency() == {"a": "warm", "b": "hot"}


def test_prefetched_adapter_is_evicted_before_used_ones() -> None:
    rig = CacheRig(num_pages=2, host_pages=0)
    rig.bring(A)
    rig.cache.prefetch(B)
    rig.step()
    rig.transport.finish_load()
    rig.step()
    rig.transport.finish_copy()
    rig.step()
    assert rig.cache.residency() == {"a": "hot", "b": "hot"}
    rig.bring(C)
    assert rig.cache.residency() == {"a": "hot", "c": "hot"}


def test_one_that_lives_on_another_engine_is_evicted_first() -> None:
    rig = CacheRig(num_pages=2, host_pages=0)
    rig.bring(A, B)
    rig.cache.set_elsewhere(["b"])
    rig.bring(C)
    assert rig.cache.residency() == {"a": "hot", "c": "hot"}


def test_a_prefetch_never_stands_in_the_way_of_a_request() -> None:
    rig = CacheRig(max_loads=2)
    for ref in (A, B, C):
        rig.cache.prefetch(ref)
    assert rig.step(D) == [Residency.LOADING]


def test_what_left_a_tier_is_counted_by_reason() -> None:
    rig = CacheRig(num_pages=1, host_pages=2)
    rig.limit("tenant", host=1)
    rig.bring(A, B)  # A leaves the device for B, and host memory for its tenant's cap
    assert rig.cache.usage().evictions == {
        "device": {"room": 1, "cap": 0, "deleted": 0, "failed": 0},
        "host": {"room": 0, "cap": 1, "deleted": 0, "failed": 0},
    }
    rig.cache.drop("b")
    rig.step(C)
    rig.transport.finish_load("c")
    rig.step(C)
    rig.transport.finish_copy("c", error="the driver fails")
    rig.step()
    usage = rig.cache.usage()
    assert usage.evictions["device"] == {"room": 1, "cap": 0, "deleted": 1, "failed": 1}
    assert usage.evictions["host"] == {"room": 0, "cap": 1, "deleted": 1, "failed": 1}


def test_entries_of_some_digests() -> None:
    rig = CacheRig()
    rig.bring(A, B)
    rig.cache.pin(C)
    rig.transport.finish_load("c", error="its bytes are away")
    rig.step()
    assert [entry.ref for entry in rig.cache.entries(["b", "nobody", "c"])] == [B, C]
    assert rig.cache.entries(["c"])[0].error == "its bytes are away"
    assert {entry.ref.digest for entry in rig.cache.entries()} == {"a", "b", "c"}
