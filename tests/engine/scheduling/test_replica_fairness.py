"""Tenants' shares over several engines, which tell each other each second what they served."""

from __future__ import annotations

import math
from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.ipc import protocol as wire
from loraplex.engine.scheduling import fair_queue
from loraplex.engine.scheduling.fair_queue import EXCHANGE_S, LEAD, UNSERVED, FairQueue
from loraplex.engine.types import EngineRequest, SamplingParams, Sequence
from support.engine.core_engine import CoreEngine
from support.simulator.replicas import STEPS_AN_EXCHANGE, Replica, Replicas

BUSY = 12
_orders = count()


def shares(
    *tenants: dict[str, int], weights: dict[str, float] | None = None, exchanges: bool = True
) -> Replicas:
    """Replicas, by what they served in 50 seconds after the first five."""
    replicas = Replicas(tenants, weights)
    replicas.run(5.0, exchanges=exchanges)
    replicas.forget()
    replicas.run(50.0, exchanges=exchanges)
    return replicas


@pytest.mark.parametrize(("exchanges", "share", "within"), [(False, 0.25, 0.01), (True, 0.50, 0.03)])
def test_a_tenant_on_one_of_two_replicas_gets_half(exchanges: bool, share: float, within: float) -> None:
    found = shares({"a": BUSY}, {"a": BUSY, "b": BUSY}, exchanges=exchanges)
    assert found.shares()["b"] == pytest.approx(share, abs=within)


def test_three_tenants_on_two_replicas_get_a_third_each() -> None:
    found = shares({"a": BUSY, "c": BUSY}, {"a": BUSY, "b": BUSY}).shares()
    assert all(share == pytest.approx(1 / 3, abs=0.03) for share in found.values())


def test_weights_count_over_all_replicas() -> None:
    # Half of all is what one engine can give to b, though its weight is three times as large.
    assert shares({"a": BUSY}, {"a": BUSY, "b": BUSY}, weights={"b": 3.0}).shares()["b"] >= 0.47
    # A quarter is due to b, and that is what it gets without an exchange, too, were its weight alike.
    found = shares({"a": BUSY}, {"a": BUSY, "b": BUSY}, weights={"a": 3.0}).shares()
    assert found["b"] == pytest.approx(0.25, abs=0.03)


def test_no_tenant_is_held_back_for_ever_by_what_it_gets_elsewhere() -> None:
    # Over three engines a gets twice what one can give to b.
    found = shares({"a": BUSY}, {"a": BUSY}, {"a": BUSY, "b": BUSY})
    assert found.shares()["b"] == pytest.approx(1 / 3, abs=0.03)
    pause = found.replicas[2].longest_pause["a"]
    assert 5 * STEPS_AN_EXCHANGE < pause <= (UNSERVED + LEAD + 1) * STEPS_AN_EXCHANGE


def test_debts_are_short_once_the_other_engines_are_gone() -> None:
    found = shares({"a": BUSY}, {"a": BUSY}, {"a": BUSY, "b": BUSY})
    replica = found.replicas[2]
    while replica.last_served["a"] > found.steps - 2 * STEPS_AN_EXCHANGE:
        found.run(1.0, exchanges=True)
    found.lose(0)
    found.lose(0)
    found.forget()
    found.run(4.0, exchanges=True)
    assert replica.tokens["a"] > 0


def test_an_exchange_with_nobody_changes_nothing() -> None:
    tenants = {"a": 3, "b": 5, "c": 1}
    alone, told = Replica(tenants, {"b": 2.0}), Replica(tenants, {"b": 2.0})
    for number in range(1000):
        assert alone.step(number) == told.step(number)
        if number % STEPS_AN_EXCHANGE == 0:
            told.exchange({})
        if number % 7 == 0:
            told.exchange({"nobody": 1000.0})


def arrive(queue: FairQueue, tenant: str, number: int) -> None:
    for order in (next(_orders) for _ in range(number)):
        request = EngineRequest(f"{tenant}-{order}", tenant, (1,), SamplingParams(max_tokens=1))
        seq = Sequence(request, 0.0, order, [1])
        queue.enter(seq)
        queue.push(seq)


def busy(**requests: int) -> FairQueue:
    queue = FairQueue()
    for tenant, number in requests.items():
        arrive(queue, tenant, number)
    return queue


def serve(queue: FairQueue, units: float) -> str:
    seq = queue.head()
    assert seq is not None
    queue.remove(seq)
    queue.charge(seq, units)
    queue.leave(seq)
    return seq.request.tenant_id


def test_what_was_served_is_told_from_the_first_exchange_on() -> None:
    queue = busy(a=5, b=5)
    serve(queue, 7.0)
    assert queue.exchange_service({}, 0.0) == {}
    for _ in range(3):
        serve(queue, 10.0)
    queue.charge_tenant("c", 3.0)
    assert queue.exchange_service({}, 1.0) == {"a": 10.0, "b": 20.0, "c": 3.0}
    assert queue.exchange_service({}, 2.0) == {}


def test_without_exchanges_what_was_served_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MOST_SERVED", 100)
    queue = busy(a=5)
    queue.exchange_service({}, 0.0)
    for number in range(100):
        queue.charge_tenant(f"tenant-{number}", 1.0)
    assert len(queue.exchange_service({}, 1.0)) == 100
    for number in range(250):
        queue.charge_tenant(f"tenant-{number}", 1.0)
    assert queue.exchange_service({}, 2.0) == {}
    queue.charge_tenant("a", 3.0)
    assert queue.exchange_service({}, 3.0) == {"a": 3.0}


def test_service_elsewhere_counts_like_service_here() -> None:
    queue = busy(a=9, b=9)
    queue.set_weight("a", 2.0)
    queue.exchange_service({}, 0.0)
    for _ in range(8):
        serve(queue, 10.0)
    before = queue.counter("a")
    queue.exchange_service({"a": 8.0, "b": 0.0}, 1.0)
    assert queue.counter("a") == before + 4.0
    assert queue.exchange_service({}, 2.0) == {}, "what another engine served is not told as this one's"


@pytest.mark.parametrize("units", [0.0, -5.0, math.nan, -math.inf])
def test_what_is_no_service_adds_nothing(units: float) -> None:
    queue = busy(a=20, b=20)
    queue.exchange_service({}, 0.0)
    for _ in range(8):
        serve(queue, 10.0)
    before = queue.counter("a")
    queue.exchange_service({"a": units}, 1.0)
    assert queue.counter("a") == before


def test_nothing_is_added_at_the_first_exchange_and_after_a_pause() -> None:
    queue = busy(a=20, b=20)
    for _ in range(4):
        serve(queue, 10.0)
    for at, adds in ((0.0, False), (1.0, True), (1.1 + EXCHANGE_S, False), (2.0 + EXCHANGE_S, True)):
        for _ in range(6):
            serve(queue, 10.0)
        before = queue.counter("a")
        queue.exchange_service({"a": 5.0}, at)
        assert (queue.counter("a") > before) is adds


def test_a_tenant_that_is_not_here_owes_nothing_when_it_comes() -> None:
    queue = busy(a=20, b=20)
    queue.exchange_service({}, 0.0)
    for _ in range(8):
        serve(queue, 10.0)
    queue.charge_tenant("away", 50.0)
    owed = queue.counter("away")
    queue.exchange_service({"late": 1e6, "away": 5.0}, 1.0)
    assert queue.counter("away") == owed
    arrive(queue, "late", 3)
    assert "late" in {serve(queue, 10.0) for _ in range(3)}


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcd"), st.floats(allow_nan=True, allow_infinity=True)),
            st.integers(0, 9),
            st.floats(0, 2),
        ),
        max_size=12,
    )
)
def test_whatever_is_sent_is_bounded(exchanges: list[tuple[dict[str, float], int, float]]) -> None:
    queue = busy(a=120, b=120, c=120)
    now, level = 0.0, 0.0
    for elsewhere, turns, passed in exchanges:
        for _ in range(turns):
            serve(queue, 10.0)
        now += passed
        before = {tenant: queue.counter(tenant) for tenant in "abc"}
        most = min(before.values()) + LEAD * (min(before.values()) - level)
        level = min(before.values())
        queue.exchange_service(elsewhere, now)
        for tenant in "abc":
            counter = queue.counter(tenant)
            assert math.isfinite(counter)
            assert before[tenant] <= counter <= max(before[tenant], most) + 1e-9
        assert {tenant for tenant, _, _ in queue.tenants()} == set("abc")


def test_the_command_reaches_the_counters_of_an_engine() -> None:
    engine = CoreEngine()

    def exchange(call: int, elsewhere: dict[str, float]) -> wire.CallAnswer:
        command = wire.decode_command(msgspec.msgpack.encode(wire.ExchangeService(call, elsewhere)))
        assert isinstance(command, wire.ExchangeService)
        return command.run(engine.core)

    assert exchange(1, {}) == wire.Served(1, {})
    engine.add("first", prompt_ids=tuple(range(1, 21)), max_tokens=5)
    engine.run()
    prices = engine.config.charges
    engine.now += 1.0
    assert exchange(2, {"nobody": 1.0}) == wire.Served(2, {"acme": 20 * prices.prefill + 5 * prices.decode})
    engine.now += 1.0
    assert exchange(3, {}) == wire.Served(3, {})
