"""Which adapters are in demand: counted as requests come, and what a new engine is asked for by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineStats
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.serving.demand import HALF_LIFE_S, MAX_KNOWN, MAX_RANKED, Demand, Uses
from loraplex.serving.engines import session as session_module
from loraplex.serving.engines.session import TERMS_A_COMMAND
from support.cluster.scripted import ScriptedSession
from support.engine.fake_engine import fake_engine_info


def ref(number: int, tenant: str = "acme") -> AdapterRef:
    return AdapterRef(tenant, f"adapter-{number}", 1, f"{number:064x}", 8)


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def ranked(demand: Demand) -> list[str]:
    return [uses.ref.name for uses in demand.ranked()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def demand(clock: Clock) -> Demand:
    return Demand(clock)


def use(demand: Demand, number: int, times: int = 1) -> None:
    for _ in range(times):
        demand.use(ref(number))
    demand.loaded([ref(number).digest])


def test_the_most_used_come_first_and_uses_decay(demand: Demand, clock: Clock) -> None:
    use(demand, 1, 8)
    clock.now += 2 * HALF_LIFE_S
    use(demand, 2, 3)
    use(demand, 3)
    assert ranked(demand) == ["adapter-2", "adapter-1", "adapter-3"]
    assert [uses.uses for uses in demand.ranked()] == [3, 2, 1]
    use(demand, 1)
    assert [uses.uses for uses in demand.ranked()] == [3, 3, 1], (
        "a use counts beside what is left of older ones"
    )
    clock.now -= 1e9
    assert [uses.uses for uses in demand.ranked()] == [3, 3, 1], "a clock that was set back changes nothing"


def test_what_no_engine_could_load_is_not_ranked(demand: Demand) -> None:
    """An adapter that ends the engine when it is loaded would end the next one too."""
    demand.use(ref(1))
    use(demand, 2)
    assert ranked(demand) == ["adapter-2"]


def test_deleted_and_unused_ones_are_not_ranked(demand: Demand) -> None:
    use(demand, 1)
    use(demand, 2)
    demand.forget(ref(1).digest)
    demand.know(ref(3))
    demand.loaded([ref(3).digest])
    assert ranked(demand) == ["adapter-2"]
    assert [uses.ref for uses in demand.ranked({ref(3).digest})] == [ref(2), ref(3)]


def test_it_is_bounded(demand: Demand) -> None:
    for number in range(MAX_KNOWN + 10):
        use(demand, number)
    assert len(demand.known()) == MAX_KNOWN
    assert ref(0).digest not in demand
    assert len(demand.ranked()) == MAX_RANKED
    assert demand.ranked()[0].ref == ref(MAX_KNOWN + 9), "of equal ones the most recent"


def test_what_was_recorded_is_added_to_what_came_since(demand: Demand) -> None:
    use(demand, 1)
    use(demand, 2, 2)
    demand.restore([Uses(ref(1), 4.0), Uses(ref(3), 2.5)])
    assert [(uses.ref.name, uses.uses) for uses in demand.ranked()] == [
        ("adapter-1", 5),
        ("adapter-3", 2.5),
        ("adapter-2", 2),
    ]


class Session(ScriptedSession):
    """A session whose engine is a list of the commands that were sent."""

    healthy = True

    def __init__(self, demand: Demand) -> None:
        super().__init__(fake_engine_info(), demand=demand)
        self.sent: list[wire.Command] = []
        self.answers: dict[type, Callable[[int], wire.Event]] = {}

    def _send(self, command: wire.Command) -> None:
        self.sent.append(command)
        if type(command) in self.answers:
            event = self.answers[type(command)](command.call)  # type: ignore[union-attr]
            asyncio.get_running_loop().call_soon(self._dispatch, event)

    def ask(self, number: int, times: int = 1) -> None:
        for _ in range(times):
            name = f"r{len(self.sent)}"
            self.submit(EngineRequest(name, "acme", (1,), SamplingParams(1), ref(number)))

    def answer(self, stats: EngineStats, *entries: CacheEntry) -> None:
        """Every call from now on."""
        self.answers = {
            wire.GetStats: lambda call: wire.Stats(call, stats),
            wire.GetCache: lambda call: wire.Cache(call, entries),
        }

    def restored(self, *, warm: bool = True) -> list[wire.Command]:
        self.sent.clear()
        self._restore(self.hot, warm=warm)
        return self.sent


async def test_a_new_engine_gets_limits_pins_and_the_rest_by_demand(demand: Demand) -> None:
    session = Session(demand)
    terms = {"acme": TenantTerms(2.0, MemoryLimits(device_bytes_max=7))}
    session.set_tenants({**terms, "other": TenantTerms()})
    session.ask(1)
    session.ask(2, 3)
    session.ask(9)  # never loaded
    session._pins[ref(4).digest] = ref(4)
    session.prefetch([ref(5), ref(6)])
    states = {ref(1).digest: "warm", ref(2).digest: "hot", ref(4).digest: "hot", ref(5).digest: "hot"}
    session._dispatch(wire.ResidencyChanged(states | {ref(6).digest: "warm"}))  # type: ignore[arg-type]
    expected = [wire.SetTenants(terms), wire.Warm((ref(2), ref(1), ref(5)))]
    session.ask(2, 1)
    told, pin, warm = session.restored()
    assert [told, warm] == expected
    assert isinstance(pin, wire.Pin)
    assert pin.ref == ref(4)
    assert [type(command) for command in session.restored(warm=False)] == [wire.SetTenants, wire.Pin]


async def test_a_new_engine_gets_the_terms_of_all_tenants(demand: Demand) -> None:
    session = Session(demand)
    terms = {f"t{number}": TenantTerms(2.0) for number in range(TERMS_A_COMMAND + 1)}
    session.set_tenants(terms)
    told = [command.terms for command in session.restored() if isinstance(command, wire.SetTenants)]
    assert [len(part) for part in told] == [TERMS_A_COMMAND, 1]
    assert told[0] | told[1] == terms


async def test_a_request_of_many_sequences_is_one_use(demand: Demand) -> None:
    session = Session(demand)
    session.submit(*(EngineRequest(f"r{n}", "acme", (1,), SamplingParams(1), ref(1)) for n in range(5)))
    demand.loaded([ref(1).digest])
    assert [uses.uses for uses in demand.ranked()] == [1]


async def test_a_measurement_is_no_use_and_keeps_the_tenants_terms(demand: Demand) -> None:
    session = Session(demand)
    capped, other = (
        TenantTerms(memory=MemoryLimits(device_bytes_max=7)),
        TenantTerms(memory=MemoryLimits(host_bytes_max=9)),
    )
    session.set_tenants({"other": other})
    session.sent.clear()
    session.set_tenants({"other": other, "acme": capped})
    measuring = asyncio.create_task(session.measure_sites(ref(1)))
    while len(session.sent) < 2:
        await asyncio.sleep(0)
    told, add = session.sent
    assert told == wire.SetTenants({"acme": capped})  # of the others nothing has changed
    assert isinstance(add, wire.Measure)
    measuring.cancel()
    demand.loaded([ref(1).digest])
    assert demand.ranked() == []
    assert ref(1).digest in demand


async def test_pins_are_waited_for_while_they_come(demand: Demand) -> None:
    session = Session(demand)
    session.answer(EngineStats(num_pins=2, num_pins_held=1, num_pins_coming=1))
    waiting = asyncio.create_task(session.wait_pins([ref(1), ref(2)]))
    while len(session.sent) < 3:
        await asyncio.sleep(0.001)
    assert not waiting.done()
    failed = CacheEntry(ref(1), "cold", pinned=True, error="its bytes are away")
    there, other = CacheEntry(ref(2), "hot", pinned=True), CacheEntry(ref(3), "cold", error="too")
    session.answer(EngineStats(num_pins=2, num_pins_held=1), failed, there, other)
    assert await waiting == [failed]
    session.answer(EngineStats(num_pins=2, num_pins_held=2))
    assert await session.wait_pins([ref(1), ref(2)]) == []


async def test_pins_are_not_waited_for_for_ever(demand: Demand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PINS_TIMEOUT_S", 0.05)
    session = Session(demand)
    hangs = CacheEntry(ref(1), "cold", loading=True, pinned=True)
    session.answer(EngineStats(num_pins=1, num_pins_coming=1), hangs)
    async with asyncio.timeout(10):
        assert await session.wait_pins([ref(1)]) == [hangs]


async def test_a_pin_that_damage_took_away_is_missed(demand: Demand) -> None:
    """The server hears of the damage, and takes the pin away, before it looks for the pins."""
    session = Session(demand)
    there = CacheEntry(ref(2), "hot", pinned=True)
    session.answer(EngineStats(num_pins=1, num_pins_held=1), there)
    (lost,) = await session.wait_pins([ref(1), ref(2)])
    assert lost.ref == ref(1)
    assert "damaged" in (lost.error or "")
