"""Both ports of the product over a scripted engine: the real apps, control plane, database, store and connections.

    with whole_server(tmp_path) as server:
        server.http.get(server.data_url + "/v1/models", headers=bearer(server.plane.make_key("acme", "inference")))

Everything but the engine is what `loraplex serve` puts together, down to how connections are bounded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.app.installation import Installation
from loraplex.app.planes import Apps, create_apps
from loraplex.app.ports.sockets import open_ports, url
from loraplex.app.ports.swappable_app import Listening
from loraplex.app.settings import Settings
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.db.outage import DatabaseHealth
from loraplex.control.tenancy.key_use import KeyUse
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.writer import UsageWriter
from loraplex.serving.engines.engines import Engines
from support.http.admin_plane import SERVED_NAME, AdminPlane
from support.models.byte_tokenizer import write_byte_tokenizer
from support.waiting import eventually

T = TypeVar("T")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@dataclass(frozen=True)
class WholeServer:
    """URLs have no trailing slash. `plane` has the rules behind both ports; `call` runs something on their loop."""

    plane: AdminPlane
    installation: Installation
    apps: Apps
    data_url: str
    admin_url: str
    http: httpx.Client
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Awaitable[T]], timeout: float = 60.0) -> T:
        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout)

    def settle(self) -> None:
        """Nothing is being answered any more, and nothing of it is left."""

        async def settled() -> None:
            """All in one turn of the loop: the server may yet find a request whose client has gone."""
            while self.apps.shared.drain.in_flight:
                assert await self.apps.shared.drain.wait_idle(60), "a request is still being answered"
            assert self.plane.engine.live == []

        self.call(settled, 120)
        eventually(lambda: self.plane.leftovers() == [])


@contextmanager
def whole_server(
    root: Path, *, budget_answer_s: float = 60.0, engine: Engines | None = None, **settings: Any
) -> Iterator[WholeServer]:
    """On free ports of the loopback address. `settings` are fields of Settings; `budget_answer_s` is how long a request
    waits for the database: by default longer than a busy machine holds up a thread. `engine` serves in place of the
    plane's, and ends with its owner."""
    # A test of all routes makes more changes in a minute than a tenant may.
    plane = AdminPlane(root, change_limit=ChangeRateLimit(max_changes=60_000))
    services = plane.services
    chosen = Settings(**({"port": 0, "admin_port": 0} | settings), data_dir=root, model=str(root))
    with open(root / "lock", "w") as lock, open_ports(chosen) as ports, httpx.Client(timeout=60) as http:
        journal = UsageJournal(root / "usage", capacity=chosen.usage_journal_size)
        installation = Installation(
            settings=chosen,
            model_dir=write_byte_tokenizer(root / "model"),
            served_name=SERVED_NAME,
            store=services.artifacts.store,
            artifacts=services.artifacts,
            database=plane.database,
            tenants=services.tenants,
            keys=services.keys,
            key_cache=services.key_cache,
            key_use=KeyUse(plane.database),
            catalog=services.catalog,
            validation=plane.validation,
            releases=services.releases,
            resolver=Resolver(plane.database, served_name=SERVED_NAME, started_at=1_700_000_000),
            database_health=DatabaseHealth(plane.database.outage, chosen.database_staleness),
            usage_journal=journal,
            usage_writer=UsageWriter(plane.database, root / "usage", journal),
            new_admin_token=None,
            lock=lock,
            store_lock=lock,
        )
        apps = create_apps(installation, engine or plane.engine)
        apps.shared.limits._budgets._answer_timeout_s = budget_answer_s
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        started = threading.Event()
        failures: list[BaseException] = []

        async def serve() -> None:
            listening = Listening(ports, data=apps.data, admin=apps.admin)
            await apps.shared.limits.start()
            try:
                while not listening.started:
                    await asyncio.sleep(0.005)
                started.set()
                await stop.wait()
            finally:
                assert await listening.close(), listening.failure
                await apps.shared.templates.close()
                await apps.shared.grammars.close()
                await apps.shared.limits.close()
                if apps.shared.tracing is not None:
                    await apps.shared.tracing.close()
                await installation.background.close()

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    runner.run(serve())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="both-ports", daemon=True)
        thread.start()
        try:
            if not started.wait(60):
                raise RuntimeError(f"the server did not start: {failures}")
            yield WholeServer(plane, installation, apps, url(ports.data), url(ports.admin), http, loop)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(60)
            journal.close()
            installation.usage_writer.close()
            plane.close()
            if failures or thread.is_alive():
                raise RuntimeError(f"the server did not stop: {failures}")
