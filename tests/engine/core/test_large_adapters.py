"""One tenant's adapter that takes much of the device, beside many small ones of others, through the core."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache.tenant_memory import MemoryLimits, TenantBytes
from loraplex.adapters.ref import AdapterRef
from support.adapters.cache_fakes import PAGE_BYTES
from support.engine.core_engine import CoreEngine, adapter
from support.engine.fake_transport import Fate

LARGE, SMALL = 40, 1
NUM_PAGES = 48
COPY_S, LOAD_S = 0.8, 3.0
MANY = 30


def huge(number: int) -> AdapterRef:
    return adapter(1000 + number, "huge")


def small(number: int) -> AdapterRef:
    return adapter(number, "small")


def started(num_pages: int = NUM_PAGES, *, large: int = LARGE, num_slots: int = 64) -> CoreEngine:
    """An engine on which the adapters of tenant "huge" take `large` pages, and seconds to load and to copy."""
    engine = CoreEngine(num_pages=num_pages, num_slots=num_slots, host_pages=4 * NUM_PAGES, num_blocks=400)

    def is_large(digest: str) -> bool:
        return int(digest, 16) >= 1000

    engine.transport.num_pages_of = lambda digest: large if is_large(digest) else SMALL
    engine.transport.load_fate = lambda digest: Fate(LOAD_S if is_large(digest) else 0.02)
    engine.transport.copy_fate = lambda digest: Fate(COPY_S if is_large(digest) else 0.0)
    return engine


def step_until(engine: CoreEngine, name: str, *, most_s: float = 100.0) -> float:
    """Seconds until a request ends."""
    began = engine.now
    while not any(event.request_id == name and event.finish_reason for event in engine.events):
        assert engine.now - began < most_s, f"{name} starves"
        engine.step(0.02)
    return engine.now - began


def warm_up(engine: CoreEngine, count: int = MANY) -> None:
    for number in range(count):
        engine.add(f"first-{number}", small(number), tenant_id="small", max_tokens=1)
    engine.run()


def test_steps_and_loads_of_others_go_on_during_a_large_load() -> None:
    engine = started()
    warm_up(engine, 4)
    engine.add("huge", huge(0), tenant_id="huge", max_tokens=1)
    engine.step(0.02)
    longest = 0.0
    for number in range(8):  # half of them cold
        engine.add(f"small-{number}", small(number), tenant_id="small", max_tokens=3)
        longest = max(longest, step_until(engine, f"small-{number}"))
    assert longest < LOAD_S / 5
    assert engine.now < LOAD_S, "it is still being loaded"
    step_until(engine, "huge")
    assert not any(event.error for event in engine.events)


def test_a_large_adapter_evicts_small_ones_but_none_that_are_reserved() -> None:
    engine = started()
    reserved = MemoryLimits(device_bytes_reserved=6 * PAGE_BYTES)
    for number in range(6):
        engine.add(
            f"kept-{number}", adapter(500 + number, "kept"), tenant_id="kept", memory=reserved, max_tokens=1
        )
    engine.run()
    warm_up(engine)
    engine.add("huge", huge(0), tenant_id="huge", max_tokens=1)
    step_until(engine, "huge")
    states = engine.core.residency()
    assert all(states[adapter(500 + number, "kept").digest] == "hot" for number in range(6))
    assert sum(states.get(small(number).digest) == "hot" for number in range(MANY)) <= NUM_PAGES - LARGE - 6
    loads = engine.core.stats().adapter_loads
    # Evicted to host memory: they come back without a load.
    for number in range(MANY):
        engine.add(f"back-{number}", small(number), tenant_id="small", max_tokens=1)
    engine.run()
    assert engine.core.stats().adapter_loads == loads
    assert not any(event.error for event in engine.events)


def test_a_cap_keeps_a_tenants_large_adapters_to_one_and_others_on_the_device() -> None:
    engine = started(num_pages=2 * LARGE + MANY)
    capped = MemoryLimits(device_bytes_max=LARGE * PAGE_BYTES)
    warm_up(engine)
    for number in range(6):
        engine.add(f"huge-{number}", huge(number % 2), tenant_id="huge", memory=capped, max_tokens=2)
    while engine.core.has_work:
        engine.step(0.05)
        held = engine.core.stats().tenant_bytes
        assert held.get("huge", TenantBytes()).device <= LARGE * PAGE_BYTES
        assert held["small"].device == MANY * SMALL * PAGE_BYTES, "the cap evicts its own adapters alone"
    assert not any(event.error for event in engine.events)


@pytest.mark.parametrize("num_pages", [NUM_PAGES, LARGE])
def test_small_adapters_do_not_starve_beside_large_ones_that_take_turns(num_pages: int) -> None:
    """Two large ones that do not fit together are asked for all the time, and small ones now and then."""
    engine = started(num_pages)
    waits: list[float] = []
    for turn in range(12):
        for number in range(2):
            engine.add(
                f"huge-{turn}-{number}", huge(number), tenant_id="huge", max_tokens=40, ignore_eos=True
            )
        engine.add(f"small-{turn}", small(turn % 5), tenant_id="small", max_tokens=3)
        waits.append(step_until(engine, f"small-{turn}"))
    for turn in range(12):
        for number in range(2):
            step_until(engine, f"huge-{turn}-{number}")
    assert max(waits) < 2 * (LOAD_S + COPY_S) + 5, waits
    assert not any(event.error for event in engine.events)
