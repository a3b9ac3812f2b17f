"""A client of the engine goes and another one comes: nothing of the first one's stays, except adapters in memory."""

from __future__ import annotations

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.engine.tenant_terms import TenantTerms
from support.adapters.cache_fakes import PAGE_BYTES
from support.engine.core_engine import CoreEngine, adapter, expected


def test_requests_end_and_the_next_client_may_use_their_names() -> None:
    engine = CoreEngine(num_pages=1, num_slots=1)
    engine.add("running", adapter(1), max_tokens=400, ignore_eos=True)
    engine.step(0.1)
    engine.step(0.1)
    engine.add("waiting", adapter(2))
    engine.add("background", background=True)
    engine.core.reset()
    engine.step(0.1)
    ends = {event.request_id: event.finish_reason for event in engine.events if event.finish_reason}
    assert ends == {"running": "abort", "waiting": "abort", "background": "abort"}
    engine.events.clear()
    again = engine.add("running", adapter(1))
    engine.run()
    assert engine.tokens("running") == expected(again, 5)


def test_pins_end_and_adapters_stay() -> None:
    engine = CoreEngine(num_pages=2, num_slots=2)
    engine.core.pin(adapter(1))
    for _ in range(4):
        engine.step(0.1)
    engine.core.reset()
    engine.step(0.1)
    assert engine.core.residency() == {adapter(1).digest: "hot"}
    assert not any(entry.pinned for entry in engine.core.cache_entries())
    engine.core.pin(adapter(2))  # pins may hold one page of these two


def test_terms_are_the_default_again() -> None:
    engine = CoreEngine(num_pages=2, num_slots=2)
    engine.core.set_terms("acme", TenantTerms(3.0, MemoryLimits(device_bytes_max=PAGE_BYTES)))
    engine.core.reset()
    for number in range(2):
        engine.add(f"capped {number}", adapter(number))
    engine.run()
    assert engine.core.stats().tenant_bytes["acme"].device == 2 * PAGE_BYTES
    engine.add("acme", ignore_eos=True, max_tokens=40)
    engine.add("other", ignore_eos=True, max_tokens=40, tenant_id="other")
    for _ in range(20):
        engine.step(0.01)
    served = [engine.core.stats().tenants[tenant].counter for tenant in ("acme", "other")]
    assert abs(served[0] - served[1]) < 0.1 * max(served), "a weight of 3 counts a third"


def test_what_lived_elsewhere_is_evicted_as_any_other() -> None:
    engine = CoreEngine(num_pages=2, num_slots=2)
    for number in (1, 2):
        engine.add(f"r{number}", adapter(number))
        engine.run()
        engine.now += 1.0
    engine.core.set_elsewhere((adapter(2).digest,))
    engine.core.reset()
    engine.add("r3", adapter(3))
    engine.run()
    assert engine.core.residency()[adapter(2).digest] == "hot", "it was used last"
