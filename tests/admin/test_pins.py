"""Pins over a real engine process that dies: what was deleted or unpinned meanwhile is not pinned afterwards."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest

from loraplex.admin.app import create_admin_app, create_tenant_app
from loraplex.engine.config import EngineConfig
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.supervision.engine_supervisor import Supervision
from loraplex.serving.supervision.supervisor import RestartPolicy
from support.engine.fake_processes import FAKE_ENGINE, until
from support.http.admin_plane import AdminPlane, admin_client

VERSION = "/tenants/acme/adapters/support/versions/v1"


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    client = LocalEngine(
        EngineConfig("ok", "/nowhere"),
        Supervision(command=FAKE_ENGINE, restart=RestartPolicy(first_delay_s=0.3)),
    )
    await client.start()
    yield client
    await client.close()


async def pinned(engine: LocalEngine) -> list[str]:
    return [entry.ref.digest for entry in await engine.cache() if entry.pinned]


async def die(engine: LocalEngine) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: not engine.healthy)


@pytest.mark.parametrize("path", [VERSION, f"{VERSION}/pin"], ids=["deleted", "unpinned"])
@pytest.mark.parametrize("port", ["operators", "tenants"])
@pytest.mark.parametrize("away", [False, True], ids=["before", "while away"])
async def test_a_restart_does_not_bring_a_pin_back(
    plane: AdminPlane, engine: LocalEngine, port: str, path: str, away: bool
) -> None:
    """The bytes are also those of another tenant, who has pinned nothing."""
    services = dataclasses.replace(plane.services, engine=engine)
    for tenant, name in (("acme", "support"), ("acme", "other"), ("rival", "parrot")):
        if tenant not in {info.id for info in plane.services.tenants.list().items}:
            plane.make_tenant(tenant)
        plane.make_adapter(name, tenant, seed=2 if name == "other" else 1)
    app = create_admin_app(services)
    on_tenants_port = port == "tenants"
    if on_tenants_port:
        app = create_tenant_app(services)
    async with admin_client(app, *([plane.make_key("acme")] if on_tenants_port else [])) as http:
        if on_tenants_port:
            http.base_url = "http://data"
        assert (await http.put(f"{VERSION}/pin")).status_code == 200
        assert (await http.put("/tenants/acme/adapters/other/versions/v1/pin")).status_code == 200
        await until_pinned(engine, 2)
        if away:
            await die(engine)
        assert (await http.delete(path)).status_code in (200, 204)
        if not away:
            assert len(await pinned(engine)) == 1
            await die(engine)
    await until(lambda: engine.healthy)
    kept = plane.services.catalog.get_version("acme", "other", "v1").digest
    assert await pinned(engine) == [kept]


async def until_pinned(engine: LocalEngine, number: int) -> None:
    while len(await pinned(engine)) != number:
        pass
