"""Tenants' limits on memory for adapters, through the core: what is waited for, and who waits."""

from __future__ import annotations

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from support.adapters.cache_fakes import PAGE_BYTES
from support.engine.core_engine import CoreEngine, adapter, expected

ONE_PAGE = MemoryLimits(device_bytes_max=PAGE_BYTES)


def test_more_adapters_than_a_cap_holds_are_a_schedule() -> None:
    engine = CoreEngine()
    requests = [engine.add(f"r{number}", adapter(number), memory=ONE_PAGE) for number in range(6)]
    engine.run()
    for request in requests:
        assert engine.tokens(request.request_id) == expected(request, 5)
    assert engine.core.stats().tenant_bytes["acme"].device == PAGE_BYTES


def test_a_tenant_at_its_cap_holds_up_nobody_else() -> None:
    """Its adapter waits for its own to come out of use, long enough to get precedence. Those of others are loaded
    meanwhile, and none of theirs is drained."""
    engine = CoreEngine(num_pages=6, num_slots=6, num_blocks=200)
    engine.add("long", adapter(1), memory=ONE_PAGE, max_tokens=400, ignore_eos=True)
    engine.step(0.01)
    engine.add("waits", adapter(2), memory=ONE_PAGE)
    for number in range(40):
        engine.add(f"other-{number}", adapter(10 + number % 8, "rival"), tenant_id="rival")
        for _ in range(8):
            engine.step(0.05)
    ended = [event.request_id for event in engine.events if event.finish_reason]
    assert "waits" not in ended[:30]
    assert len(ended) >= 30, "others wait for a tenant at its cap"
    engine.run()
    assert not engine.end("waits").error
    assert not engine.end("long").error


def test_an_adapter_above_its_tenants_cap_is_refused_and_served_to_others() -> None:
    engine = CoreEngine()
    engine.transport.num_pages_of = lambda digest: 2
    engine.add("mine", adapter(1), memory=ONE_PAGE)
    theirs = engine.add("theirs", adapter(1, "rival"), tenant_id="rival")
    engine.run()
    assert engine.error("mine") == "adapter_unavailable"
    assert engine.tokens("theirs") == expected(theirs, 5)
