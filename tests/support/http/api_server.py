"""An ASGI app on a real loopback uvicorn, in a thread of its own.

Streaming, disconnects and drains are only real over a socket: in-memory transports buffer whole answers.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn

T = TypeVar("T")


@dataclass(frozen=True)
class RunningServer:
    """`url` has no trailing slash. `call` runs an async function on the server's own event loop and returns
    what it returned, for tests that look at state which only that loop may touch."""

    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    server: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def connect(self, timeout: float = 60.0, receive_buffer: int | None = None) -> socket.socket:
        """A raw TCP connection; a small `receive_buffer` makes the peer feel a reader that does not read."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(timeout)
        sock.connect((self.host, self.port))
        return sock

    def call(self, function: Callable[[], Awaitable[T]], timeout: float = 60.0) -> T:
        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout)


@contextmanager
def serve_app(
    app: Any,
    *,
    stop_timeout: float = 20.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """Serve `app` on a free loopback port until the block ends; fails if it does not start or stop in time.

    `loop_factory` makes the event loop (asyncio's own by default); `options` go to `uvicorn.Config`. On leaving,
    open connections get `stop_timeout` seconds, then are cut.
    """
    # With its protocol named: asyncio turns Nagle's algorithm off only for sockets that say that they are TCP.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    host, port = listener.getsockname()
    settings = {
        "log_level": "warning",
        "access_log": False,
        "ws": "none",
        "server_header": False,
        "timeout_graceful_shutdown": 1,
    }
    server = uvicorn.Server(uvicorn.Config(app, **{**settings, **options}))
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    failures: list[BaseException] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        started.set()
        await serving

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="api-server", daemon=True)
    thread.start()
    try:
        if not started.wait(60) or failures or not server.started:
            raise RuntimeError(f"the server did not start: {failures or 'see its log'}")
        yield RunningServer(host, port, loops[0], server)
    finally:
        server.should_exit = True
        thread.join(stop_timeout)
        if thread.is_alive():
            server.force_exit = True
            thread.join(stop_timeout)
        listener.close()
        if thread.is_alive():
            raise RuntimeError("the server did not stop")
