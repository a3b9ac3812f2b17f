"""`max_load`: a request that does not wait for its adapter longer than it says."""

from __future__ import annotations

import math

from loraplex.engine.types import EngineError
from support.engine.core_engine import CoreEngine, adapter, expected
from support.engine.fake_transport import Fate

LOAD_S = 2.0
COPY_S = 0.5


def engine_with_slow_loads(**options: int) -> CoreEngine:
    """Its first adapter, number 100, has been loaded, so that it knows what a load takes."""
    engine = CoreEngine(**options)
    engine.transport.load_fate = lambda digest: Fate(LOAD_S)
    engine.transport.copy_fate = lambda digest: Fate(COPY_S)
    engine.add("first", adapter(100))
    finish(engine)
    return engine


def finish(engine: CoreEngine) -> None:
    """Time passes until everything has ended, loads too."""
    for _ in range(400):
        engine.step(0.05)
        if not engine.core.has_work and engine.transport.next_due is None:
            return
    raise AssertionError("the core does not come to an end")


def refusal(engine: CoreEngine, name: str) -> EngineError:
    error = engine.end(name).error
    assert error is not None
    assert error.code == "adapter_unavailable"
    assert "it is being loaded" in error.message
    return error


def test_a_load_that_takes_longer_is_refused_at_once_and_goes_on() -> None:
    engine = engine_with_slow_loads()
    engine.add("r", adapter(1), max_load=1.0)
    engine.step()
    retry_s = refusal(engine, "r").retry_after_s
    assert retry_s is not None
    assert LOAD_S + COPY_S <= retry_s <= 1.2 * (LOAD_S + COPY_S) + 0.1
    for _ in range(20 * math.ceil(retry_s)):  # whole seconds, as the client is told
        engine.step(0.05)
    again = engine.add("again", adapter(1), max_load=0.0)
    finish(engine)
    assert engine.tokens("again") == expected(again, 5)
    assert engine.transport.num_loads == 2


def test_no_other_request_is_shed_for_one_that_is_refused() -> None:
    engine = engine_with_slow_loads(max_waiting=4)
    for number in range(4):
        engine.add(f"waits-{number}")
    engine.add("r", adapter(1, tenant="rival"), tenant_id="rival", max_load=0.0)
    finish(engine)
    refusal(engine, "r")
    assert [engine.end(f"waits-{number}").error for number in range(4)] == [None] * 4


def counter(engine: CoreEngine, tenant: str) -> float:
    return engine.core._scheduler.queue.counter(tenant)


def test_a_refused_request_pays_for_the_load_once() -> None:
    engine = engine_with_slow_loads()
    engine.add("competes", tenant_id="other", max_tokens=200)
    engine.step()
    level = counter(engine, "other")
    for name in ("r", "again"):
        engine.add(name, adapter(1, tenant="rival"), tenant_id="rival", max_load=0.0)
        engine.step(0.01)
    once = counter(engine, "rival")
    assert once >= level + engine.core._scheduler.adapters._load_charge * adapter(1).rank
    engine.add("waits", adapter(1, tenant="rival"), tenant_id="rival", max_tokens=1)
    engine.step(0.01)
    assert counter(engine, "rival") == once
    engine.add("r2", adapter(2, tenant="rival"), tenant_id="rival", max_load=0.0)
    engine.step(0.01)
    assert counter(engine, "rival") > once
    finish(engine)


def test_one_that_can_be_there_in_time_is_waited_for() -> None:
    engine = engine_with_slow_loads()
    request = engine.add("r", adapter(1), max_load=4.0)
    finish(engine)
    assert engine.tokens("r") == expected(request, 5)


def test_zero_is_only_if_hot() -> None:
    engine = CoreEngine()  # nothing is known of how long a load takes
    engine.add("cold", adapter(1), max_load=0.0)
    engine.add("base", max_load=0.0)
    engine.step()
    refusal(engine, "cold")
    finish(engine)
    hot, base = engine.add("hot", adapter(1), max_load=0.0), engine.add("base-2", max_load=0.0)
    finish(engine)
    assert engine.tokens("hot") == expected(hot, 5)
    assert engine.tokens("base-2") == expected(base, 5)


def test_the_time_may_pass_while_it_waits() -> None:
    """No estimate foresees it: this load hangs."""
    engine = engine_with_slow_loads()
    engine.transport.load_fate = lambda digest: Fate(8.0)
    begin = engine.now
    engine.add("r", adapter(1), max_load=4.0)
    patient = engine.add("patient", adapter(1))
    while not any(event.request_id == "r" for event in engine.events):
        idle_s = engine.core.idle_s()
        engine.step(0.05 if not idle_s else min(idle_s, 1.0))
        assert engine.now - begin < 4.3, "it is told when its time has passed"
    assert engine.now - begin >= 4.0
    retry_s = refusal(engine, "r").retry_after_s
    assert retry_s is not None
    assert 4.0 <= retry_s <= 4.0 + 1.0, "a load that is late is not about to end"
    finish(engine)
    assert engine.tokens("patient") == expected(patient, 5), "the load goes on"
    assert engine.transport.num_loads == 2


def test_an_engine_with_nothing_else_to_do_wakes_for_it() -> None:
    engine = engine_with_slow_loads()
    engine.transport.load_fate = lambda digest: Fate(None)
    engine.add("r", adapter(1), max_load=4.0)
    for _ in range(3):
        engine.step()
    idle_s = engine.core.idle_s()
    assert idle_s is not None
    assert 0 < idle_s <= 4.0


def test_loads_ahead_count() -> None:
    """Two load at a time; those of other tenants take turns with this one's."""
    engine = engine_with_slow_loads(num_pages=32, num_slots=32)
    for number in range(1, 9):
        engine.add(f"ahead-{number}", adapter(number))
    engine.step()
    engine.add("r", adapter(9), max_load=2 * (LOAD_S + COPY_S))
    patience = 2 * (LOAD_S + COPY_S) + 0.5
    engine.add("other", adapter(10, tenant="rival"), tenant_id="rival", max_load=patience)
    engine.step()
    retry_s = refusal(engine, "r").retry_after_s
    assert retry_s is not None
    assert 4 * LOAD_S < retry_s < 6 * LOAD_S
    finish(engine)
    assert not engine.end("other").error


def test_what_runs_is_not_cut_when_the_time_passes() -> None:
    engine = engine_with_slow_loads()
    request = engine.add("r", adapter(1), max_load=4.0, max_tokens=200)
    for _ in range(150):
        engine.step(0.05)
    finish(engine)
    assert engine.tokens("r") == expected(request, 200)


def test_an_adapter_that_leaves_before_the_requests_turn_is_not_waited_for() -> None:
    engine = engine_with_slow_loads(num_pages=1, num_slots=1, max_num_seqs=1)
    engine.add("base", max_tokens=80)
    engine.step()
    engine.add("r", adapter(100), max_load=0.0)
    engine.step(0.3)
    assert engine.tokens("r") == [], "it waits for the place, and its adapter is there"
    engine.add("other", adapter(1, tenant="rival"), tenant_id="rival", max_tokens=60)
    while engine.cache.state(adapter(100).digest) == "hot":
        engine.step(0.05)
    gone = engine.now
    while not any(event.request_id == "r" for event in engine.events):
        engine.step(0.05)
    assert engine.now - gone <= 0.35
    refusal(engine, "r")
    finish(engine)
    assert len(engine.tokens("other")) == 60


def test_adapters_of_refused_requests_come_behind_those_that_are_waited_for() -> None:
    """And push out none that a request waits for."""
    engine = engine_with_slow_loads(num_pages=2, num_slots=2)
    waits = [engine.add(f"waits-{number}", adapter(number)) for number in (1, 2)]
    engine.add("r", adapter(3), max_load=0.0)
    finish(engine)
    for request in waits:
        assert engine.tokens(request.request_id) == expected(request, 5)
    order = [event.request_id for event in engine.events if event.finish_reason]
    assert order[1] == "r"
    assert engine.transport.num_loads == 4
    assert engine.cache.state(adapter(3).digest) == "hot"


def test_refused_requests_of_one_tenant_load_two_adapters_at_a_time() -> None:
    engine = engine_with_slow_loads(num_pages=32, num_slots=32)
    for number in range(1, 9):
        engine.add(f"r-{number}", adapter(number), max_load=0.0)
    finish(engine)
    assert engine.transport.num_loads == 1 + 2


def test_the_queue_time_owed_to_loads_is_summed_up() -> None:
    engine = engine_with_slow_loads()
    stats = engine.core.stats()
    assert stats.num_adapter_waits == 1
    assert LOAD_S + COPY_S <= stats.adapter_wait_s <= LOAD_S + COPY_S + 0.2
    assert stats.adapter_load_seconds["disk"] >= LOAD_S
    assert stats.adapter_load_seconds["copy"] >= COPY_S
    engine.add("base")
    engine.add("hot", adapter(100))
    finish(engine)
    assert engine.core.stats().num_adapter_waits == 1
    begin = engine.now
    engine.add("left", adapter(1))
    engine.step(0.5)
    engine.core.abort("left")
    engine.step()
    stats, before = engine.core.stats(), stats
    assert stats.num_adapter_waits == 2
    assert stats.adapter_wait_s - before.adapter_wait_s == engine.now - begin


def test_the_load_behind_a_refusal_ends_where_its_version_is_deleted() -> None:
    engine = engine_with_slow_loads()
    engine.add("r", adapter(1), max_load=0.0)
    for _ in range(43):  # it is being copied
        engine.step(0.05)
    assert engine.core.residency()[adapter(1).digest] == "warm"
    engine.core.drop(adapter(1).digest)
    finish(engine)
    assert adapter(1).digest not in engine.core.residency()
