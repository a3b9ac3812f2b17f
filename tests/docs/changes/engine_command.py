"""`CountWaiting`, a new engine command, from the API's engines over the wire to the core."""

import asyncio
from types import SimpleNamespace

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineStats, TenantStats
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from support.cluster.inprocess import InProcessEngineClient
from support.engine.fake_core import FakeCore, build_fake_engine

STATS = EngineStats(tenants={"acme": TenantStats(waiting=3)})
FakeCore.count_waiting = lambda self, tenant: EngineCore.count_waiting(
    SimpleNamespace(stats=lambda: STATS), tenant
)
sent = wire.CountWaiting(7, "acme")
assert wire.decode_command(msgspec.msgpack.encode(sent)) == sent
assert wire.decode_event(msgspec.msgpack.encode(wire.Waiting(7, 3))) == wire.Waiting(7, 3)


async def ask() -> None:
    config = EngineConfig("ok", "/nowhere")
    sessions = [InProcessEngineClient(lambda wake: build_fake_engine(config, wake)) for _ in range(2)]
    engines = Engines(Replica(f"replica-{number}", session) for number, session in enumerate(sessions))
    await engines.start()
    assert await engines.count_waiting("acme") == 6
    assert await engines.count_waiting("globex") == 0
    await engines.close()


asyncio.run(ask())
