"""The core while adapters are on their way, have no room, or are moved by an operator; with the fake runner and
transport."""

from __future__ import annotations

import pytest

from loraplex.adapters.cache.recent_loads import RecentLoads
from loraplex.adapters.cache.residency import PinRefused
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_transport import Fate


def test_a_loading_adapter_holds_nobody_up() -> None:
    engine = CoreEngine()
    engine.transport.load_fate = lambda digest: Fate(3.0)
    engine.add("cold", adapter(1), tenant_id="acme")
    engine.add("same-tenant")
    engine.add("other", tenant_id="umbrella")
    engine.step()
    assert {e.request_id for e in engine.events} == {"same-tenant", "other"}
    assert engine.core.num_waiting_for_adapter == 1
    assert engine.core.stats().waiting_adapters == (adapter(1).digest,)
    engine.step(3.0)
    engine.run()
    assert engine.end("cold").finish_reason == "length"


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_alone() -> None:
    engine = CoreEngine()
    engine.transport.load_fate = lambda digest: Fate(0.1, "its bytes are not those that its digest names")
    for name in "ab":
        engine.add(name, adapter(1))
    engine.add("base")
    engine.run()
    assert engine.error("a") == engine.error("b") == "adapter_unavailable"
    assert "its bytes" in engine.end("a").error.message  # type: ignore[union-attr]
    assert engine.end("base").finish_reason == "length"


def test_a_load_that_hangs_is_given_up_in_time_and_the_core_says_when_to_look() -> None:
    engine = CoreEngine()
    engine.transport.load_fate = lambda digest: Fate(None)
    engine.add("r", adapter(1))
    engine.step()
    engine.step()
    assert engine.core.idle_s() == pytest.approx(10.0)
    engine.step(10.0)
    assert engine.error("r") == "adapter_unavailable"
    assert engine.core.idle_s() is None


def test_a_deadline_bounds_the_sleep_of_an_engine_that_waits_for_a_load() -> None:
    engine = CoreEngine()
    engine.transport.load_fate = lambda digest: Fate(8.0)
    engine.add("r", adapter(1), deadline=2.0)
    engine.step()
    engine.step()
    assert engine.core.idle_s() == pytest.approx(2.0)


def test_an_aged_request_gets_room_though_others_keep_theirs_in_use() -> None:
    engine = CoreEngine(num_pages=1)
    popular, rare = adapter(1), adapter(2)
    engine.add("p0", popular, max_tokens=20)
    engine.step()
    engine.step()
    engine.step()
    engine.add("rare", rare)
    count = 1
    while not any(event.request_id == "rare" for event in engine.events):
        # The popular adapter's tenant always has the next request in before the last one ends.
        engine.add(f"p{count}", popular, max_tokens=20)
        count += 1
        for _ in range(10):
            engine.step(0.1)
        assert count < 30, "the rare adapter starves"
    assert engine.now >= engine.config.adapter_wait_aging_s, "it was the ageing that let it in"
    engine.run()
    assert engine.end("rare").finish_reason == "length"


def test_a_flood_of_cold_adapters_delays_another_tenants_one_by_loads_not_by_all_of_them() -> None:
    engine = CoreEngine(num_pages=4)
    engine.transport.load_fate = lambda digest: Fate(1.0)
    for number in range(1, 31):
        engine.add(f"flood{number}", adapter(number), max_tokens=1)
    engine.step()
    for number in (101, 102, 103):
        engine.add(f"other{number}", adapter(number), tenant_id="globex", max_tokens=1)
        while not any(event.request_id == f"other{number}" for event in engine.events):
            engine.step(0.1)
    ended = [event.request_id for event in engine.events if event.request_id.startswith("flood")]
    assert len(ended) <= 12, "each of the other's loads waits for at most the two that are under way"
    engine.transport.load_fate = lambda digest: Fate()
    engine.run()
    assert all(engine.end(f"flood{number}").finish_reason == "length" for number in range(1, 31))


def test_a_tenants_loads_follow_the_order_in_which_its_requests_would_run() -> None:
    engine = CoreEngine(num_pages=4)
    engine.transport.load_fate = lambda digest: Fate(1.0)
    for number in range(1, 9):
        engine.add(f"r{number}", adapter(number), max_tokens=1)
    engine.step()  # two loads begin
    engine.add("late", adapter(9), max_tokens=1, priority=2)
    engine.add("later", adapter(8), max_tokens=1, priority=1)  # r8 has asked for it before
    engine.run()
    ended = [event.request_id for event in engine.events if event.finish_reason]
    assert set(ended[:2]) == {"r1", "r2"}
    assert set(ended[2:5]) == {"late", "later", "r8"}
    assert ended[5:] == [f"r{number}" for number in range(3, 8)]


def test_tenants_take_turns_in_the_precedence_of_aged_requests() -> None:
    engine = CoreEngine(num_pages=1)
    for number in range(1, 11):
        engine.add(f"flood{number}", adapter(number), max_tokens=80)
        engine.step()
    engine.add("other", adapter(100), tenant_id="globex", max_tokens=1)
    while not any(event.request_id == "other" for event in engine.events):
        engine.step(0.1)
    begun = {event.request_id for event in engine.events if event.request_id.startswith("flood")}
    assert len(begun) <= 2, "what was there, and what had come before the other's request had aged"
    engine.run()
    assert all(engine.end(f"flood{number}").finish_reason == "length" for number in range(1, 11))


def test_one_adapter_at_a_time_is_kept_back_for_one_that_has_precedence() -> None:
    engine = CoreEngine(num_pages=2)
    engine.add("long", adapter(1), max_tokens=200)
    engine.add("short", adapter(2), max_tokens=60)
    engine.step()
    engine.step()
    engine.add("aged", adapter(3), tenant_id="globex")
    engine.step()
    engine.step(6.0)
    for number in (1, 2):
        engine.add(f"later{number}", adapter(number), max_tokens=1)
    while not any(event.request_id == "aged" for event in engine.events):
        engine.step()
    assert engine.end("later1").finish_reason == "length", "its adapter would be in use for longer anyway"
    assert engine.tokens("later2") == [], "its adapter had to leave"
    engine.run()
    assert engine.end("later2").finish_reason == "length"


def test_a_pinned_adapter_is_not_kept_back_for_one_that_has_precedence() -> None:
    engine = CoreEngine(num_pages=4, num_slots=4)
    engine.core.pin(adapter(1))
    for number in (1, 2, 4, 5):
        engine.add(f"first{number}", adapter(number), max_tokens=60 if number == 1 else 80 * number)
    for _ in range(4):
        engine.step()
    assert len(engine.cache.on_device) == 4
    engine.add("aged", adapter(3), tenant_id="globex")
    engine.step()
    engine.step(6.0)
    for number in (1, 2):
        engine.add(f"later{number}", adapter(number), max_tokens=1)
    while not any(event.request_id == "aged" for event in engine.events):
        engine.step()
    assert engine.end("later1").finish_reason == "length", "it would not leave, whether it is in use or not"
    assert engine.tokens("later2") == [], "its adapter had to leave"
    engine.run()
    assert engine.end("later2").finish_reason == "length"


def test_adapter_held_back_for_precedence_is_scheduled_next_time() -> None:
    """The line that has precedence is the same both times: it always has a waiting request."""
    engine = CoreEngine(num_pages=2, max_num_seqs=3)
    engine.add("short", adapter(1), max_tokens=20)
    engine.add("long", adapter(2), max_tokens=300)
    engine.add("filler", max_tokens=480)
    engine.step()
    engine.step()
    engine.add("aged", adapter(3), tenant_id="globex", max_tokens=30)
    engine.add("next", adapter(3), tenant_id="globex", max_tokens=30)
    engine.step(6.0)
    while not engine.tokens("aged"):
        engine.step(0.01)
    assert engine.end("short").finish_reason == "length", "its adapter had to leave"
    engine.core.drop(adapter(3).digest)
    engine.add("again", adapter(1), max_tokens=480)
    while not engine.tokens("again"):
        engine.step(0.01)
    engine.core.abort("filler")
    engine.step(6.0)
    for number in (1, 2):
        engine.add(f"later{number}", adapter(number), max_tokens=1)
    while not engine.tokens("next"):
        engine.step(0.01)
    assert engine.end("later1").finish_reason == "length", "the other adapter is in use for less long"
    assert engine.tokens("later2") == []


def test_base_requests_pass_one_that_has_precedence() -> None:
    engine = CoreEngine(num_pages=1)
    engine.add("long", adapter(1), max_tokens=200)
    engine.step()
    engine.step()
    engine.add("aged", adapter(2))
    engine.step()
    engine.step(6.0)
    engine.add("base")
    engine.add("later", adapter(1))
    for _ in range(6):
        engine.step()
    assert engine.end("base").finish_reason == "length"
    assert engine.tokens("later") == [], "its adapter is there, but lending it would keep the aged one out"
    engine.run()
    assert engine.end("aged").finish_reason == engine.end("later").finish_reason == "length"


def test_pages_of_an_ended_request_stay_until_its_step_in_flight_is_collected() -> None:
    engine = CoreEngine(num_pages=1, lookahead=1)
    engine.add("r", adapter(1), max_tokens=50)
    engine.step()
    while not engine.runner.num_in_flight:
        engine.step()
    copies = engine.transport.num_copies
    engine.core.abort("r")
    engine.add("other", adapter(2))
    assert engine.core.stats().num_leases == 1, "the step's own"
    engine.core.step()
    assert engine.transport.num_copies == copies
    engine.run()
    assert engine.end("other").finish_reason == "length"


def test_two_tenants_with_the_same_bytes_share_the_adapter_but_no_kv() -> None:
    engine = CoreEngine()
    ours, theirs = adapter(1, "acme"), adapter(1, "umbrella")
    one = engine.add("one", ours)
    engine.run()
    two = engine.add("two", theirs, tenant_id="umbrella")
    engine.run()
    assert engine.transport.num_loads == 1
    assert engine.tokens("one") == engine.tokens("two") == expected(one, 5) == expected(two, 5)
    assert engine.end("two").usage.cached_tokens == 0  # type: ignore[union-attr]


def test_an_operator_sees_and_moves_adapters_through_the_core() -> None:
    engine = CoreEngine(num_pages=2, num_slots=2)
    engine.core.pin(adapter(1))
    engine.core.prefetch(adapter(2))
    for _ in range(8):
        engine.step(0.1)
    assert engine.core.residency() == {adapter(1).digest: "hot", adapter(2).digest: "hot"}
    pinned = next(entry for entry in engine.core.cache_entries() if entry.pinned)
    assert (pinned.ref, pinned.state) == (adapter(1), "hot")
    with pytest.raises(PinRefused, match="pins may hold 1 of the device's 2 pages"):
        engine.core.pin(adapter(2))
    engine.core.unpin(adapter(1).digest)
    engine.core.drop(adapter(1).digest)
    assert adapter(1).digest not in engine.core.residency()


def test_an_adapter_that_a_request_waits_for_is_told_as_in_use_to_who_asks_for_it() -> None:
    engine = CoreEngine()
    engine.add("one", adapter(1))
    engine.step()
    (entry,) = engine.core.cache_entries([adapter(1).digest])
    assert (entry.loading, entry.leases) == (True, 1)
    engine.run()
    (entry,) = engine.core.cache_entries([adapter(1).digest])
    assert entry.leases == 0


def test_a_step_does_not_sum_up_the_loads_of_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums take milliseconds where thousands of adapters came, as long as a step."""
    engine = CoreEngine()
    sums: list[float] = []
    most = RecentLoads.most
    monkeypatch.setattr(RecentLoads, "most", lambda self, now: sums.append(now) or most(self, now))
    engine.add("r", adapter(1))
    for _ in range(20):
        engine.now += 1.0
        engine.transport.settle()
        engine.core.step()
    assert engine.cache.state(adapter(1).digest) == "hot"
    assert not sums
    engine.core.stats()
    assert len(sums) == 1
