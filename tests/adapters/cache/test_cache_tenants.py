"""Reservations and caps of tenants on device and host memory."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache.adapter_cache import PinRefused, Residency
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_fakes import PAGE_BYTES, CacheRig, make_ref


def refs_of(tenant: str, count: int) -> list[AdapterRef]:
    return [make_ref(f"{tenant}-{number}", tenant) for number in range(count)]


def test_a_reservation_keeps_the_recently_used_from_others() -> None:
    rig = CacheRig(num_pages=6, num_slots=6)
    rig.limit("acme", reserved=2)
    acme, other = refs_of("acme", 4), refs_of("other", 6)
    rig.bring(*acme)
    rig.bring(*other)
    assert rig.on_device(*acme) == ["acme-2", "acme-3"]
    assert rig.on_device(*other) == ["other-2", "other-3", "other-4", "other-5"]


def test_a_tenant_evicts_what_it_has_reserved_itself() -> None:
    rig = CacheRig(num_pages=4, num_slots=4)
    rig.limit("acme", reserved=2)
    acme = refs_of("acme", 6)
    rig.bring(*acme)
    assert rig.on_device(*acme) == ["acme-2", "acme-3", "acme-4", "acme-5"]


def test_what_is_in_use_counts_for_the_reservation() -> None:
    rig = CacheRig(num_pages=6, num_slots=6)
    rig.limit("acme", reserved=1)
    acme, other = refs_of("acme", 2), refs_of("other", 6)
    rig.bring(*acme)
    lease = rig.cache.acquire("acme-0")
    rig.bring(*other)
    assert rig.on_device(*acme) == ["acme-0"]
    rig.cache.release(lease)
    rig.bring(*refs_of("third", 6))
    assert rig.on_device(*acme) == ["acme-0"]


@pytest.mark.parametrize(("num_pages", "num_slots", "kept"), [(8, 8, 4), (8, 4, 2)])
def test_reservations_hold_half_of_the_device_at_most(num_pages: int, num_slots: int, kept: int) -> None:
    """However much was reserved: the others would have nothing."""
    rig = CacheRig(num_pages=num_pages, num_slots=num_slots)
    for tenant in ("a", "b"):
        rig.limit(tenant, reserved=6)
        rig.bring(*refs_of(tenant, 4))
    rig.bring(*refs_of("other", 12))
    assert len(rig.on_device(*refs_of("a", 4), *refs_of("b", 4))) == kept


def test_a_reservation_yields_to_what_would_not_fit_beside_it() -> None:
    rig = CacheRig(num_pages=4, num_slots=4, sizes={"large": 3})
    rig.limit("acme", reserved=2)
    acme = refs_of("acme", 2)
    rig.bring(*acme)
    rig.bring(make_ref("large", "other"))
    assert rig.on_device(*acme) == ["acme-1"]


def test_adapters_on_experts_ten_times_as_large_leave_what_others_reserved() -> None:
    """A gigabyte beside adapters of a tenth: they evict each other, and what nobody reserved."""
    large = ["mixture-0", "mixture-1", "mixture-2"]
    rig = CacheRig(num_pages=24, num_slots=24, sizes=dict.fromkeys(large, 10))
    rig.limit("acme", reserved=4)
    acme, other = refs_of("acme", 6), refs_of("other", 8)
    rig.bring(*other)
    rig.bring(*acme)
    rig.bring(*(mixture := refs_of("mixture", 3)))
    assert rig.on_device(*acme) == ["acme-2", "acme-3", "acme-4", "acme-5"]
    assert rig.on_device(*mixture) == ["mixture-1", "mixture-2"]
    assert rig.on_device(*other) == []
    rig.limit("mixture", most=12)
    rig.bring(mixture[0])
    assert rig.on_device(*mixture) == ["mixture-0"]
    assert rig.on_device(*acme) == ["acme-2", "acme-3", "acme-4", "acme-5"]


def test_a_tenant_at_its_cap_evicts_its_own_alone() -> None:
    rig = CacheRig(num_pages=6, num_slots=6)
    other, acme = refs_of("other", 3), refs_of("acme", 4)
    rig.limit("acme", most=2)
    rig.bring(*other)
    rig.bring(*acme)
    assert rig.on_device(*acme) == ["acme-2", "acme-3"]
    assert rig.on_device(*other) == [ref.digest for ref in other]
    assert rig.cache.usage().num_arena_pages_used == 5


def test_at_its_cap_with_all_in_use_it_waits() -> None:
    rig = CacheRig(num_pages=6, num_slots=6)
    rig.limit("acme", most=1)
    one, two = refs_of("acme", 2)
    rig.bring(one)
    lease = rig.cache.acquire(one.digest)
    rig.step(two)
    rig.transport.finish_load()
    assert rig.step(two) == [Residency.NO_ROOM]
    assert rig.cache.tenants.is_at_cap(two)
    assert rig.cache.tenants.that_make_way(two) == {one.digest}
    rig.cache.release(lease)
    assert rig.step(two) == [Residency.LOADING]


def test_an_adapter_above_the_cap_is_refused_to_its_tenant_and_not_to_others() -> None:
    rig = CacheRig(num_pages=6, num_slots=6, sizes={"large": 3})
    rig.limit("acme", most=2)
    large = make_ref("large", "acme")
    rig.step(large)
    rig.transport.finish_load()
    assert rig.step(large) == [Residency.NO_ROOM]
    assert "device_bytes_max is 200" in rig.cache.tenants.refusal(large)
    assert rig.cache.tenants.refusal(make_ref("large", "other")) == ""
    with pytest.raises(PinRefused, match="device_bytes_max"):
        rig.cache.pin(large)
    rig.bring(make_ref("large", "other"))
    assert rig.step(large) == [Residency.READY], "it is there already, and costs this tenant nothing"


def test_a_prefetch_keeps_to_the_cap() -> None:
    rig = CacheRig(num_pages=6, num_slots=6)
    rig.limit("acme", most=1)
    for ref in refs_of("acme", 2):
        rig.cache.prefetch(ref)
        rig.step()
        rig.transport.finish_load()
        rig.step()
        if rig.transport.copies:
            rig.transport.finish_copy()
        rig.step()
    assert rig.cache.tenants.tenant_bytes()["acme"].device == PAGE_BYTES


def test_images_above_the_cap_on_host_memory_are_dropped() -> None:
    rig = CacheRig(num_pages=4, num_slots=4)
    rig.limit("acme", host=1)
    rig.bring(*refs_of("other", 2), *refs_of("acme", 3))
    rig.step()
    held = rig.cache.tenants.tenant_bytes()
    assert (held["acme"].host, held["other"].host) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert {entry.ref.digest for entry in rig.cache.entries() if entry.host_bytes} == {
        "acme-2", "other-0", "other-1",
    }  # fmt: skip


def test_a_limit_that_is_taken_away_holds_no_more() -> None:
    rig = CacheRig(num_pages=4, num_slots=4)
    rig.limit("acme", reserved=2, most=2)
    rig.bring(*refs_of("acme", 2))
    rig.limit("acme")
    rig.bring(*refs_of("acme", 4)[2:])
    assert len(rig.on_device(*refs_of("acme", 4))) == 4
    rig.bring(*refs_of("other", 4))
    assert rig.on_device(*refs_of("acme", 4)) == []
    assert rig.cache.tenants.reserved_bytes == 0


def test_more_adapters_than_a_cap_holds_take_turns() -> None:
    """A schedule, and never an error."""
    rig = CacheRig(num_pages=4, num_slots=4)
    rig.limit("acme", most=2)
    wanted, seen = refs_of("acme", 5), set()
    for _ in range(200):
        for ref, residency in zip(wanted, rig.step(*wanted), strict=True):
            if residency is Residency.READY:
                rig.cache.release(rig.cache.acquire(ref.digest))
                seen.add(ref.digest)
        wanted = [*wanted[1:], wanted[0]]
        if rig.transport.loads:
            rig.transport.finish_load()
        if rig.transport.copies:
            rig.transport.finish_copy()
        assert rig.cache.tenants.tenant_bytes().get("acme") is None or (
            rig.cache.tenants.tenant_bytes()["acme"].device <= 2 * PAGE_BYTES
        )
    assert len(seen) == 5
