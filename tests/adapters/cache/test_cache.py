"""The cache's state machine, move by move: loads, copies, leases, and eviction. What an operator asks of it is in
`test_cache_operator.py`; `test_cache_random.py` makes the moves at random."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache.adapter_cache import Lease, LeaseError, Residency
from loraplex.adapters.cache.recent_loads import MOST_COUNTED, MOST_TOLD, RecentLoads
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_fakes import PAGE_BYTES, CacheRig, make_ref
from support.adapters.cache_integrity import check_cache

A, B, C, D = (make_ref(name) for name in "abcd")


def test_the_way_from_disk_to_device_and_its_states() -> None:
    rig = CacheRig()
    assert rig.cache.state("a") == "cold"
    assert rig.step(A) == [Residency.LOADING]
    assert rig.cache.state("a") == "cold"
    rig.transport.finish_load()
    assert rig.step(A) == [Residency.LOADING]
    assert rig.cache.state("a") == "warm"
    rig.transport.finish_copy()
    assert rig.step(A) == [Residency.READY]
    assert rig.cache.residency() == {"a": "hot"}
    (entry,) = rig.cache.entries()
    assert (entry.ref, entry.pages, entry.device_bytes, entry.host_bytes) == (A, 1, PAGE_BYTES, PAGE_BYTES)
    assert entry.load_seconds["disk"] == pytest.approx(0.01)
    assert entry.load_seconds["copy"] == pytest.approx(0.01)
    usage = rig.cache.usage()
    assert (
        usage.num_arena_pages_used,
        usage.num_adapter_slots_used,
        usage.host_bytes_used,
        usage.adapter_loads,
    ) == (
        1,
        1,
        PAGE_BYTES,
        1,
    )


def test_equal_digests_share_one_residency() -> None:
    rig = CacheRig()
    same = make_ref("a", tenant="other", version=7)
    rig.bring(A)
    assert rig.step(A, same) == [Residency.READY] * 2
    assert rig.transport.num_loads == 1
    leases = [rig.cache.acquire("a"), rig.cache.acquire("a")]
    assert leases[0].slot == leases[1].slot
    for lease in leases:
        rig.cache.release(lease)


def test_the_least_recently_used_goes_first_and_stays_warm() -> None:
    rig = CacheRig()
    rig.bring(A, B, C, D)
    rig.step(A)
    e = make_ref("e")
    rig.bring(e)
    assert {d: rig.cache.state(d) for d in "abcde"} == {
        "a": "hot",
        "b": "warm",
        "c": "hot",
        "d": "hot",
        "e": "hot",
    }
    loads = rig.transport.num_loads
    rig.bring(B)
    assert rig.transport.num_loads == loads, "a warm adapter was read from disk again"
    assert rig.cache.state("c") == "warm"


def test_leased_adapters_stay_whatever_happens() -> None:
    rig = CacheRig(num_pages=2)
    rig.bring(A, B)
    leases = [rig.cache.acquire("a"), rig.cache.acquire("b")]
    rig.step(C)
    rig.transport.finish_load()
    assert rig.step(C) == [Residency.NO_ROOM]
    rig.cache.release(leases[1])
    assert rig.step(C) == [Residency.LOADING]
    assert rig.cache.state("a") == "hot"
    assert rig.cache.state("b") == "warm"
    rig.cache.release(leases[0])


def test_earlier_adapter_of_a_pass_is_not_evicted_for_a_later_one() -> None:
    rig = CacheRig(num_pages=2)
    rig.bring(A, B)
    rig.step(C)
    rig.transport.finish_load()
    assert rig.step(A, B, C) == [Residency.READY, Residency.READY, Residency.NO_ROOM]
    assert rig.step(C, A, B)[0] is Residency.LOADING


def test_adapter_is_not_evicted_in_the_pass_after_its_arrival() -> None:
    """Else two that alternate in one place could evict each other again and again before either was used."""
    rig = CacheRig(num_pages=1)
    rig.step(A, B)
    rig.transport.finish_load()
    rig.transport.finish_load()
    assert rig.step(A, B) == [Residency.LOADING, Residency.NO_ROOM]
    rig.transport.finish_copy()
    assert rig.step(B, A) == [Residency.NO_ROOM, Residency.READY]
    assert rig.step(B, A) == [Residency.LOADING, Residency.NO_ROOM]


def test_nothing_is_evicted_where_room_would_still_not_suffice() -> None:
    rig = CacheRig(sizes={"d": 3})
    rig.bring(A, B, C)
    lease = rig.cache.acquire("a"), rig.cache.acquire("b")
    rig.step(D)
    rig.transport.finish_load()
    assert rig.step(D) == [Residency.NO_ROOM], "one free page and one of c are not three"
    assert rig.cache.state("c") == "hot"
    for each in lease:
        rig.cache.release(each)


def test_several_small_ones_make_room_for_a_large_one() -> None:
    rig = CacheRig(sizes={"d": 4})
    rig.bring(A, B, C, D)
    assert [rig.cache.state(d) for d in "abcd"] == ["warm", "warm", "warm", "hot"]
    assert rig.transport.read(rig.cache.acquire("d").slot, (0, 1, 2, 3)) == {"d"}


def test_slots_can_run_out_before_pages_do() -> None:
    rig = CacheRig(num_pages=9, num_slots=2)
    rig.bring(A, B, C)
    assert [rig.cache.state(d) for d in "abc"] == ["warm", "hot", "hot"]


def test_an_adapter_larger_than_the_device_fails_with_a_clear_message() -> None:
    rig = CacheRig(sizes={"a": 5})
    rig.step(A)
    rig.transport.finish_load()
    assert rig.step(A) == [Residency.FAILED]
    assert (
        rig.failed("a")
        == "it does not fit: it needs 5 pages of device memory; the device memory for adapters has 4"
    )
    assert rig.cache.usage().host_bytes_used == 0


def test_leases_are_given_back_exactly_once() -> None:
    rig = CacheRig()
    with pytest.raises(LeaseError, match="not on the device"):
        rig.cache.acquire("a")
    rig.bring(A)
    lease, other = rig.cache.acquire("a"), rig.cache.acquire("a")
    rig.cache.release(lease)
    with pytest.raises(LeaseError, match="already"):
        rig.cache.release(lease)
    with pytest.raises(LeaseError):
        rig.cache.release(Lease("a", other.slot))
    rig.cache.release(other)
    check_cache(rig.cache)
    assert rig.cache.usage().num_leases == 0


def test_a_failed_load_is_remembered_for_a_while_then_tried_again() -> None:
    rig = CacheRig()
    for wait in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert rig.step(A) == [Residency.LOADING]
        rig.transport.finish_load(error="the disk is on fire")
        assert rig.step(A) == [Residency.FAILED]
        assert rig.failed("a") == "the disk is on fire"
        (entry,) = rig.cache.entries()
        assert (entry.state, entry.error) == ("cold", "the disk is on fire")
        rig.clock.now += wait - 0.1
        assert rig.step(A) == [Residency.FAILED]
        rig.clock.now += 0.1
    rig.bring(A)
    assert rig.failed("a") == ""


def test_a_load_that_hangs_is_given_up_and_its_late_result_dropped() -> None:
    rig = CacheRig()
    rig.step(A)
    assert rig.cache.next_timeout_s() == pytest.approx(60.0)
    rig.clock.now += 60
    assert rig.step(A) == [Residency.FAILED]
    assert "took longer than 60 s" in rig.failed("a")
    (late,) = rig.transport.loads
    assert late.cancelled
    rig.clock.now += 5
    assert rig.step(A) == [Residency.LOADING]
    rig.transport.finish_load("a")  # the late one
    assert rig.step(A) == [Residency.LOADING]
    assert rig.cache.usage().host_bytes_used == 0
    rig.transport.finish_load("a")
    rig.step(A)
    assert rig.cache.usage().host_bytes_used == PAGE_BYTES


def test_a_copy_that_hangs_keeps_its_pages_until_it_ends() -> None:
    rig = CacheRig(num_pages=2)
    rig.step(A)
    rig.transport.finish_load()
    rig.step(A)
    rig.clock.now += 60
    assert rig.step(A) == [Residency.FAILED]
    assert rig.cache.usage().num_arena_pages_used == 1
    rig.bring(B)
    lease = rig.cache.acquire("b")
    rig.clock.now += 5
    rig.step(A)
    rig.transport.finish_load()
    assert rig.step(A) == [Residency.NO_ROOM], "the page that a hung copy may write to was given away"
    rig.transport.finish_copy("a")
    assert rig.step(A) == [Residency.LOADING]
    rig.transport.finish_copy("a")
    assert rig.step(A) == [Residency.READY]
    rig.cache.release(lease)


def test_a_quick_copy_can_be_leased_in_the_same_pass() -> None:
    rig = CacheRig(num_pages=1)
    rig.bring(A)
    rig.step(B)
    rig.transport.finish_load()
    rig.transport.quick = True
    assert rig.step(B) == [Residency.LOADING]
    assert rig.cache.state("a") == "warm"
    lease = rig.cache.acquire("b")
    assert rig.transport.read(lease.slot, (0,)) == {"b"}
    rig.cache.release(lease)
    assert rig.cache.entries(["b"])[0].load_seconds["copy"] == 0.0
    assert rig.step(A) == [Residency.NO_ROOM]  # what has only just arrived has its pass
    assert rig.step(A) == [Residency.LOADING]
    assert rig.cache.on_device == {"a"}


def test_a_failed_copy_gives_its_pages_back() -> None:
    rig = CacheRig()
    rig.step(A)
    rig.transport.finish_load()
    rig.step(A)
    rig.transport.finish_copy(error="the device is on fire")
    assert rig.step(A) == [Residency.FAILED]
    assert rig.cache.usage().num_arena_pages_used == 0


def test_concurrent_loads_are_limited() -> None:
    rig = CacheRig(max_loads=2)
    assert rig.step(A, B, C) == [Residency.LOADING, Residency.LOADING, Residency.NO_ROOM]
    rig.transport.finish_load()
    assert rig.step(A, B, C) == [Residency.LOADING] * 3


def test_host_memory_keeps_the_most_recently_used_images() -> None:
    rig = CacheRig(num_pages=1, host_pages=2)
    rig.bring(A, B, C)
    assert [rig.cache.state(d) for d in "abc"] == ["cold", "warm", "hot"]
    rig.bring(B, D)
    assert [rig.cache.state(d) for d in "abcd"] == ["cold", "warm", "cold", "hot"]
    assert rig.cache.usage().host_bytes_used == 2 * PAGE_BYTES


def test_without_host_memory_adapters_only_pass_through() -> None:
    rig = CacheRig(num_pages=2, host_pages=0)
    rig.bring(A, B)
    assert [rig.cache.state(d) for d in "ab"] == ["hot", "hot"]
    assert rig.cache.usage().host_bytes_used == 0
    rig.bring(C)
    assert [rig.cache.state(d) for d in "abc"] == ["cold", "hot", "hot"]


def test_adapters_waiting_for_the_device_do_not_evict_each_other_from_host_memory() -> None:
    """Six adapters wait for one leased page, the host holds two: they must not be read over and over."""
    rig = CacheRig(num_pages=1, host_pages=2)
    rig.bring(A)
    lease = rig.cache.acquire("a")
    waiting = [make_ref(f"w{i}") for i in range(6)]
    for _ in range(50):
        rig.step(*waiting)
        while rig.transport.loads:
            rig.transport.finish_load()
    assert rig.transport.num_loads <= 4
    assert rig.cache.usage().host_bytes_used <= 3 * PAGE_BYTES
    rig.cache.release(lease)
    assert rig.step(*waiting)[0] is Residency.LOADING


def test_a_load_that_waits_for_host_memory_is_given_it() -> None:
    """The oldest image goes at once, though the limit is not reached; none goes once nothing waits."""
    rig = CacheRig(num_pages=2, num_slots=2, host_pages=10, sizes={"a": 2, "b": 2, "c": 2})
    a, b, c = map(make_ref, "abc")
    rig.bring(a, b)
    rig.step(c)
    assert [move.digest for move in rig.transport.loads] == ["c"]
    rig.transport.shortage = PAGE_BYTES
    image = rig.cache._entries.by_digest["a"].image
    assert image is not None
    release = image.release
    image.release = lambda: (release(), setattr(rig.transport, "shortage", 0))
    rig.step(c)
    assert rig.cache.state("a") == "cold"
    assert rig.cache.state("b") == "hot"
    assert rig.cache.usage().host_evictions == 1
    assert not image.is_live


def use(rig: CacheRig, ref: AdapterRef) -> None:
    """One sequence runs on it, from its start to its end."""
    assert rig.step(ref) == [Residency.READY]
    rig.cache.release(rig.cache.acquire(ref.digest))


def test_an_adapter_that_is_used_often_outlives_a_scan_of_others() -> None:
    rig = CacheRig(num_pages=3, num_slots=3)
    often, *others = (make_ref(name) for name in "abcdefgh")
    rig.bring(often)
    for _ in range(8):
        use(rig, often)
    for other in others:
        rig.bring(other)
        use(rig, other)
    assert rig.cache.state("a") == "hot"
    assert rig.cache.state("h") == "hot", "the last that came was used last"


def test_former_popularity_is_forgotten_however_large_it_was() -> None:
    rig = CacheRig(num_pages=2, num_slots=2)
    rig.bring(make_ref("once-loved"))
    for _ in range(1000):
        use(rig, make_ref("once-loved"))
    for number in range(40):
        rig.bring(make_ref(f"new-{number}"))
        use(rig, make_ref(f"new-{number}"))
    assert rig.cache.state("once-loved") != "hot"


def test_who_came_again_and_again_within_the_hour() -> None:
    """Two take turns on a device with room for one, and stay in host memory."""
    rig = CacheRig(num_pages=1)
    for _ in range(11):
        rig.bring(A)
        rig.bring(B)
    assert rig.cache.usage().reloads == {}, "fewer than 12 are nothing"
    rig.bring(A)
    assert rig.cache.usage().reloads == {"copy": {"a": 12}}
    rig.clock.now += 3000.0
    rig.bring(B)
    assert rig.cache.usage().reloads == {"copy": {"a": 12, "b": 12}}
    rig.clock.now += 700.0
    assert rig.cache.usage().reloads == {}


def test_loads_from_the_disk_are_told_apart_and_forgotten_with_the_time() -> None:
    recent = RecentLoads()
    for number in range(12):
        recent.note("disk", "a", 300.0 * number)
        for other in range(MOST_COUNTED + 1):
            recent.note("copy", str(other), 300.0 * number)
    assert recent.most(3599.0)["disk"] == {"a": 12}
    told = recent.most(3599.0)["copy"]
    assert len(told) == MOST_TOLD
    assert str(MOST_COUNTED) not in told, "the others came first"
    assert recent.most(3600.0) == {}, "the first ten minutes have gone"
