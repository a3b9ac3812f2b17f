"""Both ports while they listen: what answers behind each of them may change without a connection being lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.app.ports.connections import (
    ADMIN_CONNECTIONS,
    ConnectionTable,
    bounded_protocol,
    raise_open_files,
)
from loraplex.app.ports.sockets import Ports

KEEP_ALIVE_S = 75
BACKLOG = 2048


class SwappableApp:
    """An ASGI app that hands every request to `app`, whichever that is then."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class Listening:
    """Serves `data` and `admin` on `ports` from now on; `tasks` end only if a port breaks or after `close`."""

    def __init__(self, ports: Ports, *, data: ASGIApp, admin: ASGIApp) -> None:
        self._data, self._admin = SwappableApp(data), SwappableApp(admin)
        self._servers = [
            _Server(_config(self._data, ConnectionTable(raise_open_files()))),
            _Server(_config(self._admin, ConnectionTable(ADMIN_CONNECTIONS))),
        ]
        self.tasks = [
            asyncio.create_task(server.serve(sockets=sockets))
            for server, sockets in zip(self._servers, (ports.data, ports.admin), strict=True)
        ]

    @property
    def started(self) -> bool:
        """Whether both ports take connections."""
        return all(server.started for server in self._servers)

    def switch(self, *, data: ASGIApp, admin: ASGIApp) -> None:
        """Requests from now on go to these apps."""
        self._data.app, self._admin.app = data, admin

    @property
    def failure(self) -> str:
        """Why a port does not serve any more."""
        broken = [
            str(task.exception()) for task in self.tasks if task.done() and task.exception() is not None
        ]
        return "; ".join(broken) or "the server of a port ended"

    async def close(self) -> bool:
        """Cuts what is still open. False where a server broke."""
        for server in self._servers:
            server.should_exit = server.force_exit = True
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        return not any(isinstance(result, BaseException) for result in results)


class _Server(uvicorn.Server):
    """Without uvicorn's own signal handlers: the end of a server is ours to order."""

    # Private: uvicorn has no option to leave signals alone, but in a thread other than the main one.
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, table: ConnectionTable) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=bounded_protocol(table),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
