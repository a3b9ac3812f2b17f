"""What a start asks the engine for, and what is recorded for the next one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.types import VersionInfo
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.lifecycle.demand_file import FILE_NAME, Recorded, read_demand, write_demand
from loraplex.lifecycle.warming import Warming, in_order
from loraplex.serving.demand import Demand, Uses
from support.control.plane import ControlPlane
from support.engine.fake_engine import FakeEngineClient
from support.http.quiet import all_levels


class Rig:
    """A server's part of it. `start` is a server that starts again, up to its serving."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plane = ControlPlane(root)
        for tenant in ("acme", "rival"):
            self.plane.tenants.create(tenant)

    async def start(self) -> tuple[FakeEngineClient, Demand, Warming]:
        plane, engine, demand = self.plane, FakeEngineClient(), Demand()
        warming = Warming(
            self.root, demand, database=plane.database, catalog=plane.catalog, releases=plane.releases,
            tenants=plane.tenants,
        )  # fmt: skip
        await engine.start()
        await warming.pin(engine)
        await warming.begin(engine)
        return engine, demand, warming

    async def warmed(self) -> list[str]:
        engine, _, _ = await self.start()
        return [f"{ref.tenant_id}/{ref.name}@v{ref.version}" for ref in engine.warmed]

    def record(self, *versions: VersionInfo) -> None:
        """The first is the most used."""
        write_demand(self.root, [Uses(v.ref(), 100.0 - n) for n, v in enumerate(versions)])


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that was used before keeps the processors of an earlier configuration, which no capture sees."""
    monkeypatch.setattr("loraplex.lifecycle.warming.log", structlog.get_logger())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.plane.close()


async def test_by_demand_and_then_the_latest_releases(rig: Rig) -> None:
    a, b, c = (rig.plane.add("acme", name, seed=seed) for seed, name in enumerate("abc"))
    newer = rig.plane.add("acme", "a", seed=9)  # not released
    rig.record(b, newer)
    assert await rig.warmed() == ["acme/b@v1", "acme/a@v2", "acme/c@v1", "acme/a@v1"]
    assert {a.name, c.name} == {"a", "c"}


async def test_only_ready_versions_that_are_there(rig: Rig) -> None:
    kept, gone, corrupt = (
        rig.plane.add("acme", name, seed=seed) for seed, name in enumerate(("k", "g", "c"))
    )
    rig.record(gone, corrupt, kept)
    rig.plane.catalog.delete_version("acme", "g", "v1")
    rig.plane.store.delete(corrupt.digest)
    rig.plane.catalog.mark_damaged(corrupt.digest)
    assert await rig.warmed() == ["acme/k@v1"]


async def test_the_tenant_that_used_the_bytes_last_is_loaded_for(rig: Rig) -> None:
    mine, theirs = rig.plane.add("acme", "mine", seed=1), rig.plane.add("rival", "theirs", seed=1)
    assert mine.digest == theirs.digest
    for used, other in ((mine, theirs), (theirs, mine)):
        rig.record(used)
        assert await rig.warmed() == [f"{used.tenant_id}/{used.name}@v1"]
        assert other.digest == used.digest
    rig.plane.catalog.delete_version("rival", "theirs", "v1")
    assert await rig.warmed() == ["acme/mine@v1"]


async def test_limits_of_the_tenants_come_before_the_loads(rig: Rig) -> None:
    rig.plane.tenants.update("acme", {"limits": {"device_bytes_max": 1 << 20, "device_bytes_reserved": 5}})
    rig.record(rig.plane.add("acme", "a"))
    engine, _, _ = await rig.start()
    assert engine.terms == {"acme": TenantTerms(1.0, MemoryLimits(5, 1 << 20, None))}


def test_what_fills_a_reservation_comes_first(rig: Rig) -> None:
    other = rig.plane.add("rival", "other", seed=9)
    mine = [rig.plane.add("acme", f"m{seed}", seed=seed) for seed in range(3)]
    versions = {v.digest: v for v in (other, *mine)}
    recorded = [Recorded(v.digest, v.tenant_id, 1.0) for v in (other, *mine)]
    limits = {
        "acme": MemoryLimits(device_bytes_reserved=mine[0].bytes + mine[1].bytes),
        "rival": MemoryLimits(),
    }
    assert [ref.name for ref in in_order(recorded, versions, limits)] == ["m0", "m1", "other", "m2"]


@pytest.mark.parametrize("harm", [b"", b'{"format": 1', b"\x00" * 4096])
async def test_a_damaged_file_is_told_and_stops_nothing(rig: Rig, harm: bytes) -> None:
    rig.plane.add("acme", "a")
    (rig.root / FILE_NAME).write_bytes(harm)
    with all_levels(), capture_logs() as logs:
        assert await rig.warmed() == ["acme/a@v1"]
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["demand_not_read"]


async def test_pins_that_do_not_come_are_told(rig: Rig) -> None:
    pinned = rig.plane.add("acme", "a")
    rig.plane.catalog.set_pin("acme", "a", "v1", pinned=True)
    engine, demand = FakeEngineClient(), Demand()
    engine.entries = [CacheEntry(pinned.ref(), "cold", pinned=True, error="its bytes are away")]
    await engine.start()
    plane = rig.plane
    warming = Warming(
        rig.root, demand, database=plane.database, catalog=plane.catalog, releases=plane.releases,
        tenants=plane.tenants,
    )  # fmt: skip
    with all_levels(), capture_logs() as logs:
        await warming.pin(engine)
    assert list(engine.pins) == [pinned.digest]
    told = [entry for entry in logs if entry["event"] == "pin_not_loaded"]
    assert [(entry["adapter"], entry["reason"]) for entry in told] == [("a@v1", "its bytes are away")]


async def test_demand_is_recorded_every_so_often_and_at_the_end(rig: Rig) -> None:
    a, b = rig.plane.add("acme", "a", seed=1), rig.plane.add("acme", "b", seed=2)
    rig.record(a)
    _, demand, warming = await rig.start()
    task = asyncio.create_task(warming.run(interval_s=0.01))
    for _ in range(200):
        demand.use(b.ref())
    demand.loaded([b.digest])
    async with asyncio.timeout(10):
        while [each.digest for each in read_demand(rig.root)] != [b.digest, a.digest]:
            await asyncio.sleep(0.005)
    demand.forget(b.digest)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert [each.digest for each in read_demand(rig.root)] == [a.digest]


async def test_a_life_that_never_read_the_file_does_not_replace_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = rig.plane.add("acme", "a", seed=1)
    rig.record(a)

    def away(*_: object) -> None:
        raise DatabaseUnavailable()

    monkeypatch.setattr(rig.plane.releases, "newest", away)
    monkeypatch.setattr("loraplex.lifecycle.warming.find_ready", away)
    with all_levels(), capture_logs() as logs:
        engine, demand, warming = await rig.start()
    assert engine.warmed == []
    assert "warming_failed" in [entry["event"] for entry in logs]
    demand.use(rig.plane.add("acme", "b", seed=2).ref())
    task = asyncio.create_task(warming.run())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert [each.digest for each in read_demand(rig.root)] == [a.digest]


async def test_released_targets_are_asked_for_once(rig: Rig) -> None:
    a = rig.plane.add("acme", "a", seed=1)
    rig.plane.releases.put("acme", "a", [ReleaseTarget("v1", 100)])
    rig.record(a)
    assert await rig.warmed() == ["acme/a@v1"]
