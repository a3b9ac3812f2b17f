"""From a tenant's changed weight and limits to the engine that serves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.control.db.database import Database
from loraplex.control.errors import DatabaseUnavailable
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.lifecycle.tenant_terms import INTERVAL_S, TermsSender
from support.control.plane import ControlPlane
from support.engine.fake_engine import FakeEngineClient, Reply


class Rig:
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.engine = FakeEngineClient()

    def serve(self, tenant: str, weight: float) -> None:
        self.engine.script(Reply(hold=True))
        request = EngineRequest(f"of-{tenant}", tenant, (1,), SamplingParams(5))
        self.engine.set_tenants({tenant: TenantTerms(weight)})
        self.engine.submit(request)

    async def until(self, weights: dict[str, float]) -> None:
        async with asyncio.timeout(10):
            while {tenant: its.weight for tenant, its in self.engine.terms.items()} != weights:
                await asyncio.sleep(0.005)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    plane = ControlPlane(tmp_path)
    for tenant in ("acme", "rival", "idle"):
        plane.tenants.create(tenant)
    rig = Rig(plane)
    await rig.engine.start()
    watch = TermsSender(plane.database, plane.tenants)
    task = asyncio.create_task(watch.run(rig.engine, interval_s=0.01))
    yield rig
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await rig.engine.close()
    plane.close()


async def test_a_change_reaches_what_is_being_served_and_nothing_else(rig: Rig) -> None:
    rig.serve("acme", 1.0)
    rig.serve("rival", 1.0)
    rig.plane.tenants.update("acme", {"weight": 4.0})
    rig.plane.tenants.update("idle", {"weight": 2.0})
    await rig.until({"acme": 4.0, "rival": 1.0})
    assert "idle" not in rig.engine.terms
    assert INTERVAL_S < 5, "a change is in force within five seconds"


async def test_a_request_that_brings_an_old_weight_is_put_right(rig: Rig) -> None:
    rig.plane.tenants.update("acme", {"weight": 4.0})
    rig.serve("acme", 1.0)
    await rig.until({"acme": 4.0})


async def test_a_changed_limit_of_memory_reaches_what_is_being_served(rig: Rig) -> None:
    rig.serve("acme", 1.0)
    rig.plane.tenants.update("acme", {"limits": {"host_bytes_max": 1 << 30}})
    wanted = {"acme": TenantTerms(1.0, MemoryLimits(host_bytes_max=1 << 30))}
    async with asyncio.timeout(10):
        while rig.engine.terms != wanted:
            await asyncio.sleep(0.005)


async def test_a_database_that_is_away_changes_no_weight(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    async def away(*_: object) -> None:
        asked.set()
        raise DatabaseUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(Database, "look_up", away)
        rig.serve("acme", 1.0)
        rig.plane.tenants.update("acme", {"weight": 4.0})
        await asyncio.wait_for(asked.wait(), 10)
        assert rig.engine.terms == {"acme": TenantTerms(1.0)}
    await rig.until({"acme": 4.0})
