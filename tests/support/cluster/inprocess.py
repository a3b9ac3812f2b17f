"""The engine in a thread of this process. It is handed in as a function that builds it, so that no import leads from
here to torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import Build, EngineLoop, Log, Outbox
from loraplex.engine.reports import EngineInfo
from loraplex.serving.demand import Demand
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import EngineStartError, EngineUnavailable

STOP_GRACE_S = 5.0


class InProcessEngineClient(EngineSession):
    """The session of an `EngineLoop` in a thread. There is no restart: an engine that fails leaves the
    client unhealthy, with the reason. Values are not copied on their way; they are frozen."""

    def __init__(
        self,
        build: Build,
        *,
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
        demand: Demand | None = None,
        log: Log = lambda event, **fields: None,
    ) -> None:
        self._outbox = Outbox(self._notify)
        self._engine = EngineLoop(build, self._outbox.put, log)
        super().__init__(on_damaged, demand)
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._ended = asyncio.Event()
        self._failure: str | None = None
        self._closing = False

    @property
    def healthy(self) -> bool:
        return self._info is not None and self._failure is None and not self._closing

    @property
    def unhealthy_reason(self) -> str | None:
        if self._closing:
            return "the engine is shutting down"
        if self._info is None and self._failure is None:
            return "the engine has not been started"
        return self._failure

    @property
    def num_restarts(self) -> int:
        return 0

    @property
    def retry_after_s(self) -> float:
        """Seconds as `EngineUnavailable` has them: nothing starts it again."""
        return EngineUnavailable.retry_after_s or 0.0

    @property
    def is_coming_back(self) -> bool:
        return False

    @property
    def life(self) -> str:
        """A name for the engine process; another one for each."""
        return "only"

    @property
    def pid(self) -> int | None:
        """This process."""
        return os.getpid()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        self._info = await self._ready

    async def close(self, *, drain_s: float = 0) -> None:
        if not self._closing:
            self._closing = self._draining = True
            if self._thread.ident is not None:
                self._engine.post(wire.Shutdown(drain_s))
        if self._thread.ident is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), drain_s + STOP_GRACE_S)
        self._fail("draining", "the server is shutting down")

    def _send(self, command: wire.Command) -> None:
        self._engine.post(command)

    # The step thread.

    def _run(self) -> None:
        try:
            self._engine.run()
        finally:
            self._call_soon(self._on_end)

    def _notify(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._read_outbox)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        # A closed loop has no reader left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    # The event loop.

    def _read_outbox(self) -> None:
        self._scheduled = False  # before taking: events that are put from here on schedule a new call
        for event in self._outbox.take_events():
            if isinstance(event, wire.Ready):
                self._set_ready(event.info, None)
            elif isinstance(event, wire.Fatal):
                self._failure = event.message
                self._set_ready(None, event.message)
            self._dispatch(event)

    def _set_ready(self, info: EngineInfo | None, error: str | None) -> None:
        if self._ready is None or self._ready.done():
            return
        if info is not None:
            self._ready.set_result(info)
        else:
            self._ready.set_exception(EngineStartError(error or "the engine did not start"))

    def _on_end(self) -> None:
        self._read_outbox()
        if self._closing:
            self._fail("draining", "the server is shutting down")
        else:
            self._failure = self._failure or "the engine ended"
            self._fail("engine_restarting", self._failure)
        self._set_ready(None, self._failure)
        self._ended.set()
