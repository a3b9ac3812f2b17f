"""The cache's state machine, move by move. `test_cache_random.py` makes the moves at random."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache import AdapterCache, Lease, LeaseError, PinRefused, Residency
from support.cache_fakes import PAGE_BYTES, FakeClock, FakeImage, HandTransport, make_ref

A, B, C, D = (make_ref(name) for name in "abcd")


class Rig:
    def __init__(
        self,
        *,
        num_pages: int = 4,
        num_slots: int = 4,
        host_pages: int = 100,
        sizes: dict[str, int] | None = None,
        max_loads: int = 2,
    ) -> None:
        self.clock = FakeClock()
        self.transport = HandTransport(num_pages, sizes)
        self.cache: AdapterCache[FakeImage] = AdapterCache(
            transport=self.transport,
            num_pages=num_pages,
            num_slots=num_slots,
            host_bytes=host_pages * PAGE_BYTES,
            load_timeout_s=60.0,
            clock=self.clock,
            max_loads=max_loads,
        )

    def step(self, *refs: object) -> list[Residency]:
        """One step of the engine: poll, then a pass that asks for these in order."""
        self.clock.now += 0.01
        self.cache.poll()
        self.cache.check_integrity()
        self.cache.begin_pass()
        answers = [self.cache.request(ref) for ref in refs]  # type: ignore[arg-type]
        self.cache.check_integrity()
        return answers

    def bring(self, *refs: object) -> None:
        """All of them to the device, one after the other."""
        for ref in refs:
            assert self.step(ref) == [Residency.LOADING]
            if self.transport.loads:
                self.transport.finish_load()
                assert self.step(ref) == [Residency.LOADING]
            self.transport.finish_copy(ref.digest)  # type: ignore[attr-defined]
            assert self.step(ref) == [Residency.READY]
        self.step()

    def failed(self, digest: str) -> str:
        return self.cache.failure(digest)


def test_the_way_from_disk_to_device_and_its_states() -> None:
    rig = Rig()
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
    assert (usage.num_pages_used, usage.num_slots_used, usage.host_bytes_used, usage.loads) == (
        1,
        1,
        PAGE_BYTES,
        1,
    )


def test_one_residency_for_one_content_whoever_names_it() -> None:
    rig = Rig()
    same = make_ref("a", tenant="other", version=7)
    rig.bring(A)
    assert rig.step(A, same) == [Residency.READY] * 2
    assert rig.transport.num_loads == 1
    leases = [rig.cache.acquire("a"), rig.cache.acquire("a")]
    assert leases[0].slot == leases[1].slot
    for lease in leases:
        rig.cache.release(lease)


def test_the_least_recently_used_goes_first_and_stays_warm() -> None:
    rig = Rig()
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
    rig = Rig(num_pages=2)
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


def test_what_was_asked_for_earlier_in_a_pass_is_not_evicted_for_a_later_one() -> None:
    rig = Rig(num_pages=2)
    rig.bring(A, B)
    rig.step(C)
    rig.transport.finish_load()
    assert rig.step(A, B, C) == [Residency.READY, Residency.READY, Residency.NO_ROOM]
    assert rig.step(C, A, B)[0] is Residency.LOADING


def test_what_has_just_arrived_has_one_pass_in_which_nobody_pushes_it_out() -> None:
    """Else two that alternate in one place could push each other out for ever before either was used."""
    rig = Rig(num_pages=1)
    rig.step(A, B)
    rig.transport.finish_load()
    rig.transport.finish_load()
    assert rig.step(A, B) == [Residency.LOADING, Residency.NO_ROOM]
    rig.transport.finish_copy()
    assert rig.step(B, A) == [Residency.NO_ROOM, Residency.READY]
    assert rig.step(B, A) == [Residency.LOADING, Residency.NO_ROOM]


def test_nothing_is_evicted_in_vain() -> None:
    rig = Rig(sizes={"d": 3})
    rig.bring(A, B, C)
    lease = rig.cache.acquire("a"), rig.cache.acquire("b")
    rig.step(D)
    rig.transport.finish_load()
    assert rig.step(D) == [Residency.NO_ROOM], "one free page and one of c are not three"
    assert rig.cache.state("c") == "hot"
    for each in lease:
        rig.cache.release(each)


def test_several_small_ones_make_room_for_a_large_one() -> None:
    rig = Rig(sizes={"d": 4})
    rig.bring(A, B, C, D)
    assert [rig.cache.state(d) for d in "abcd"] == ["warm", "warm", "warm", "hot"]
    assert rig.transport.read(rig.cache.acquire("d").slot, (0, 1, 2, 3)) == {"d"}


def test_slots_can_run_out_before_pages_do() -> None:
    rig = Rig(num_pages=9, num_slots=2)
    rig.bring(A, B, C)
    assert [rig.cache.state(d) for d in "abc"] == ["warm", "hot", "hot"]


def test_an_adapter_larger_than_the_device_fails_with_a_clear_message() -> None:
    rig = Rig(sizes={"a": 5})
    rig.step(A)
    rig.transport.finish_load()
    assert rig.step(A) == [Residency.FAILED]
    assert (
        rig.failed("a")
        == "it does not fit: it needs 5 pages of device memory; the device memory for adapters has 4"
    )
    assert rig.cache.usage().host_bytes_used == 0


def test_leases_are_given_back_exactly_once() -> None:
    rig = Rig()
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
    rig.cache.check_integrity()
    assert rig.cache.usage().num_leases == 0


def test_a_failed_load_is_remembered_for_a_while_then_tried_again() -> None:
    rig = Rig()
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
    rig = Rig()
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
    rig = Rig(num_pages=2)
    rig.step(A)
    rig.transport.finish_load()
    rig.step(A)
    rig.clock.now += 60
    assert rig.step(A) == [Residency.FAILED]
    assert rig.cache.usage().num_pages_used == 1
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


def test_a_failed_copy_gives_its_pages_back() -> None:
    rig = Rig()
    rig.step(A)
    rig.transport.finish_load()
    rig.step(A)
    rig.transport.finish_copy(error="the device is on fire")
    assert rig.step(A) == [Residency.FAILED]
    assert rig.cache.usage().num_pages_used == 0


def test_only_so_many_loads_at_a_time() -> None:
    rig = Rig(max_loads=2)
    assert rig.step(A, B, C) == [Residency.LOADING, Residency.LOADING, Residency.NO_ROOM]
    rig.transport.finish_load()
    assert rig.step(A, B, C) == [Residency.LOADING] * 3


def test_host_memory_keeps_the_most_recently_used_images() -> None:
    rig = Rig(num_pages=1, host_pages=2)
    rig.bring(A, B, C)
    assert [rig.cache.state(d) for d in "abc"] == ["cold", "warm", "hot"]
    rig.bring(B, D)
    assert [rig.cache.state(d) for d in "abcd"] == ["cold", "warm", "cold", "hot"]
    assert rig.cache.usage().host_bytes_used == 2 * PAGE_BYTES


def test_without_host_memory_adapters_only_pass_through() -> None:
    rig = Rig(num_pages=2, host_pages=0)
    rig.bring(A, B)
    assert [rig.cache.state(d) for d in "ab"] == ["hot", "hot"]
    assert rig.cache.usage().host_bytes_used == 0
    rig.bring(C)
    assert [rig.cache.state(d) for d in "abc"] == ["cold", "hot", "hot"]


def test_those_that_wait_for_the_device_do_not_push_each_other_out_of_host_memory() -> None:
    """Six adapters wait for one leased page, the host holds two: they must not be read over and over."""
    rig = Rig(num_pages=1, host_pages=2)
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


def test_pinned_adapters_come_by_themselves_and_stay() -> None:
    rig = Rig(num_pages=2)
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
    rig = Rig()
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
    rig = Rig(num_pages=16, num_slots=12, sizes={"a": 3, "b": 2, "c": 3, "d": 3, "big": 9, "huge": 16})
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
    # Whatever is pinned, the other half is everybody's.
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
    rig = Rig(num_pages=40, num_slots=4)
    rig.bring(A)
    rig.bring(B)
    rig.cache.pin(A)
    with pytest.raises(PinRefused, match="one tenant's pins may hold 1 of the 4 places"):
        rig.cache.pin(B)
    rig.cache.unpin("a")
    rig.cache.pin(B)


def test_a_pin_whose_adapter_turns_out_too_large_holds_nothing_and_the_adapter_is_served() -> None:
    rig = Rig(num_pages=16, num_slots=12, sizes={"a": 3, "b": 3})
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
    rig = Rig()
    for pinned in (A, B, C):
        rig.cache.pin(pinned)
    rig.step()
    assert [move.digest for move in rig.transport.loads] == ["a"]
    assert rig.step(D) == [Residency.LOADING]
    rig.transport.finish_load("a")
    rig.step(D)
    assert [move.digest for move in rig.transport.loads] == ["d", "b"]


def test_what_has_no_room_is_not_read_again_to_learn_it() -> None:
    """Hundreds of requests for what has no room would keep the loaders busy for ever."""
    rig = Rig(num_pages=16, sizes={"b": 3, "c": 14})
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
    rig = Rig()
    rig.bring(A)
    lease = rig.cache.acquire("a")
    rig.cache.pin(A)
    rig.cache.drop("a")
    assert rig.cache.state("a") == "hot"
    assert rig.transport.read(lease.slot, (rig.transport.pages.index("a"),)) == {"a"}
    rig.cache.release(lease)
    rig.cache.check_integrity()
    assert rig.cache.entries() == ()
    assert rig.cache.usage().num_pages_used == 0
    assert rig.cache.usage().host_bytes_used == 0


def test_dropping_on_the_way_cancels_the_load_and_waits_for_the_copy() -> None:
    rig = Rig()
    rig.step(A, B)
    rig.transport.finish_load("b")
    rig.step(B)
    rig.cache.drop("a")
    rig.cache.drop("b")
    assert rig.transport.loads[0].cancelled
    assert rig.cache.usage().num_pages_used == 1
    rig.transport.finish_copy()
    rig.step()
    assert rig.cache.usage().num_pages_used == 0
    assert rig.cache.entries() == ()


def test_asked_for_again_a_dropped_version_stays() -> None:
    rig = Rig()
    rig.bring(A)
    lease = rig.cache.acquire("a")
    rig.cache.drop("a")
    assert rig.step(A) == [Residency.READY]
    rig.cache.release(lease)
    assert rig.cache.state("a") == "hot"


def test_prefetch_takes_free_room_only() -> None:
    rig = Rig(num_pages=1)
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
    rig = Rig(num_pages=1, host_pages=2)
    rig.bring(A, B)  # A was evicted for B, and kept its image
    rig.cache.prefetch(C)
    rig.step()
    assert not rig.transport.loads
    assert rig.cache.residency() == {"a": "warm", "b": "hot"}


def test_what_nobody_asked_for_is_evicted_before_all_that_was_used() -> None:
    rig = Rig(num_pages=2, host_pages=0)
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


def test_a_prefetch_never_stands_in_the_way_of_a_request() -> None:
    rig = Rig(max_loads=2)
    for ref in (A, B, C):
        rig.cache.prefetch(ref)
    assert rig.step(D) == [Residency.LOADING]
