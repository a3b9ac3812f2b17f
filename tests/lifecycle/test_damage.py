"""From the engine's word that bytes are damaged to the catalog's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.control.db.database import Database
from loraplex.control.errors import DatabaseUnavailable
from loraplex.lifecycle.damage_reports import DamageReports
from support.control.plane import ControlPlane
from support.engine.fake_engine import FakeEngineClient
from support.faults.damage import flip_a_bit


class Rig:
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.engine = FakeEngineClient()
        self.reports = DamageReports(plane.database, plane.catalog)

    def state(self, tenant: str, name: str) -> str:
        return self.plane.catalog.get_version(tenant, name, "v1").state

    async def until(self, tenant: str, name: str, state: str) -> None:
        async with asyncio.timeout(10):
            while self.state(tenant, name) != state:
                await asyncio.sleep(0.005)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme")
    plane.tenants.create("rival")
    rig = Rig(plane)
    await rig.engine.start()
    task = asyncio.create_task(rig.reports.run(rig.engine))
    yield rig
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    plane.close()


async def test_a_report_marks_what_is_damaged_and_lets_the_engine_forget_it(rig: Rig) -> None:
    good, bad = rig.plane.add("acme", "good", seed=1), rig.plane.add("acme", "bad", seed=2)
    rig.plane.add("rival", "same", seed=2)
    await rig.engine.pin(bad.ref())
    flip_a_bit(rig.plane.store.path(bad.digest))
    rig.reports.put([good.digest, bad.digest, "0" * 64])
    await rig.until("acme", "bad", "corrupt")
    assert rig.state("rival", "same") == "corrupt"
    assert rig.state("acme", "good") == "ready"
    async with asyncio.timeout(10):
        while bad.digest in rig.engine.pins:
            await asyncio.sleep(0.005)


async def test_a_database_that_is_away_ends_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    info = rig.plane.add("acme", "bad", seed=1)
    flip_a_bit(rig.plane.store.path(info.digest))
    asked = asyncio.Event()

    async def away(*_: object) -> None:
        asked.set()
        raise DatabaseUnavailable

    with monkeypatch.context() as patch:
        patch.setattr(Database, "run", away)
        rig.reports.put([info.digest])
        await asyncio.wait_for(asked.wait(), 10)
    assert rig.state("acme", "bad") == "ready"
    rig.reports.put([info.digest])  # the next load that fails
    await rig.until("acme", "bad", "corrupt")
