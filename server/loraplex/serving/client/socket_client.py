"""The engine in a process of its own, supervised: when it dies its requests fail with an error, it is started
again, and the adapters that were on the device come back."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Literal

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import Log
from loraplex.engine.types import EngineRequest
from loraplex.serving.client.engine_client import RequestStream
from loraplex.serving.client.session import EngineSession
from loraplex.serving.demand import Demand
from loraplex.serving.errors import EngineDraining, EngineStartError, EngineUnavailable, TextTooLong
from loraplex.serving.supervision.child import Child
from loraplex.serving.supervision.supervisor import KILL_WAIT_S, EngineProcess, RestartPolicy, spawn_spare
from loraplex.serving.supervision.watchdog import WatchdogPolicy

ENGINE_COMMAND = (sys.executable, "-m", "loraplex.engine.ipc.process")
STOP_GRACE_S = 5.0
"""Beyond the drain, for the process to end by itself before it is killed."""
RESTORE_S = 60.0
"""Time for the adapters that were on the device to come back after a restart."""
MAX_WARMED_DEATHS = 2
"""After more deaths with nothing served between them, only the pins are loaded: a load may be what ends the engine."""
FIRST_START_S = 5.0
"""The assumed duration of a start before one was measured."""
DOWN_RETRY_S = 60.0
"""Called where the engine stays down until an operator acts."""

Phase = Literal["new", "starting", "ready", "restarting", "failed", "closing", "closed"]


class SocketEngineClient(EngineSession):
    """An `EngineClient` over an engine process. `start_timeout_s` bounds a start, the loading of the model
    included; `on_progress(stage, seconds)` is called about once a second during it. `on_damaged(digests)` is called
    when loads found the stored bytes of versions damaged or lost. With `keep_spare`, a second process stands by,
    without a model, from which the next engine begins."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        start_timeout_s: float = 900.0,
        keep_spare: bool = False,
        restart: RestartPolicy | None = None,
        watchdog: WatchdogPolicy | None = None,
        on_progress: Callable[[str, float], None] = lambda stage, seconds: None,
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
        demand: Demand | None = None,
        log: Log = lambda event, **fields: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(on_damaged, demand)
        self._config = config
        self._command = command
        self._start_timeout_s = start_timeout_s
        self._policy = restart or RestartPolicy()
        self._watchdog = watchdog or WatchdogPolicy()
        self._on_progress = on_progress
        self._log = log
        self._clock = clock
        self._process: EngineProcess | None = None
        self._keep_spare = keep_spare
        self._spare: Child | None = None
        self._phase: Phase = "new"
        self._reason: str | None = "the engine has not been started"
        self._num_restarts = 0
        self._deaths: list[float] = []
        self._served_before = 0  # requests that were served when the last death was counted
        self._start_s = FIRST_START_S  # what a start took, the last time
        self._ready_at = 0.0
        self._back_at: float | None = None  # when a restart should be done
        self._was_hot: frozenset[str] = frozenset()
        self._restarter: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._phase == "ready"

    @property
    def unhealthy_reason(self) -> str | None:
        return None if self.healthy else self._reason

    @property
    def num_restarts(self) -> int:
        return self._num_restarts

    @property
    def retry_after_s(self) -> float:
        """When a restart that goes on should be done, by what the last start took; long where none does."""
        if self._back_at is None:
            return DOWN_RETRY_S
        return max(1.0, self._back_at - self._clock())

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._process.pid if self._process is not None and self.healthy else None

    async def start(self) -> None:
        self._phase, self._reason = "starting", "the engine is starting"
        try:
            await self._start_process()
        except EngineStartError as error:
            if self._phase == "starting":
                self._phase, self._reason = "failed", error.message
            raise

    async def close(self, *, drain_s: float = 0) -> None:
        if self._phase == "closed":
            return
        was_ready = self.healthy
        self._phase, self._reason = "closing", "the server is shutting down"
        self._draining = True
        process = self._process
        try:
            if self._restarter is not None:
                self._restarter.cancel()
                await asyncio.gather(self._restarter, return_exceptions=True)
            if process is not None and was_ready:
                process.send(wire.Shutdown(drain_s))
                if not await process.wait_exit(drain_s + STOP_GRACE_S):
                    process.signal(signal.SIGTERM)
                    await process.wait_exit(1.0)
        finally:
            if process is not None:
                await process.kill()
            if self._spare is not None:
                await self._spare.kill(KILL_WAIT_S)
            self._fail("draining", "the server shut down before it ended")
            self._phase = "closed"

    def submit(self, *requests: EngineRequest) -> list[RequestStream]:
        if self._phase in ("closing", "closed"):
            raise EngineDraining("the server is shutting down")
        try:
            return self._submit(requests)
        except framing.FrameTooLarge as error:
            raise TextTooLong(f"the request is too large for the engine: {error}") from error

    def _unavailable(self) -> EngineUnavailable:
        error = EngineUnavailable(self._reason or "the engine is not ready")
        error.retry_after_s = self.retry_after_s
        return error

    def _send(self, command: wire.Command) -> None:
        if self._process is not None:
            self._process.send(command)

    # Supervision.

    def _on_stage(self, stage: str, seconds: float) -> None:
        if self._phase == "starting":
            self._reason = f"the engine is starting: {stage}"
        self._on_progress(stage, seconds)

    async def _start_process(self) -> None:
        spare, self._spare = self._spare, None
        process = EngineProcess(
            self._command,
            self._config,
            on_event=self._dispatch,
            on_lost=self._on_lost,
            on_progress=self._on_stage,
            watchdog=self._watchdog,
            spare=spare,
        )
        self._process = process
        started = self._clock()
        self._info = await process.start(self._start_timeout_s)
        self._start_s = self._clock() - started
        self._log("engine_started", pid=process.pid, seconds=round(self._start_s, 3))
        await self._bring_back(process)
        self._phase, self._reason = "ready", None
        self._ready_at = self._clock()
        if self._keep_spare:
            try:
                self._spare = spawn_spare(self._command, self._info.decoder)
            except OSError as error:
                self._log("engine_spare_failed", error=str(error))

    async def _bring_back(self, process: EngineProcess) -> None:
        """Have a new engine load what its predecessor had; returns when the pins are there, or time is up. Raises
        EngineStartError where it dies meanwhile."""
        pinned = list(self._pins.values())
        self._restore(self._was_hot, warm=len(self._deaths) <= MAX_WARMED_DEATHS)
        if not pinned:
            return
        waiting = asyncio.create_task(self.wait_pins(pinned))
        try:
            await asyncio.wait((waiting, process.gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        # It may have died right behind its last answer: nothing else starts another one.
        broken = waiting.done() and isinstance(waiting.exception(), EngineUnavailable)
        if broken or process.gone.done():
            raise EngineStartError(await process.kill())
        for entry in waiting.result():
            reason = entry.error or "it is not loaded yet, or waits for memory"
            self._log("pin_not_loaded", adapter=f"{entry.ref.name}@v{entry.ref.version}", reason=reason)

    def _on_lost(self) -> None:
        """The process is gone: end its requests at once, then start a new one."""
        if self._phase in ("closing", "closed"):
            self._fail("draining", "the server shut down before it ended")
            return
        self._phase, self._reason = "restarting", "the engine process failed and is being restarted"
        self._back_at = self._clock() + self._policy.first_delay_s + self._start_s
        # What a short life had not brought back yet is brought back by the next.
        short = self._clock() - self._ready_at < RESTORE_S
        self._was_hot = self._hot() | (self._was_hot if short else frozenset())
        failed = self._fail("engine_restarting", self._reason, self.retry_after_s)
        self._log("engine_lost", failed_requests=failed)
        if self._restarter is not None and not self._restarter.done():
            return  # it waited for the pins, and hears of it
        self._restarter = asyncio.get_running_loop().create_task(self._restart())
        self._restarter.add_done_callback(self._on_restarter_end)

    def _on_restarter_end(self, restarter: asyncio.Task[None]) -> None:
        """Report a restarter that failed by a bug of ours: nothing else starts the engine again."""
        if restarter.cancelled() or (error := restarter.exception()) is None:
            return
        reason = f"the engine stays down: its restart failed: {type(error).__name__}: {error}"
        self._log("engine_gave_up", reason=reason, error="".join(traceback.format_exception(error)))
        if self._phase == "restarting":
            self._phase, self._reason, self._back_at = "failed", reason, None

    async def _restart(self) -> None:
        assert self._process is not None
        cause = await self._process.kill()
        while True:
            now = self._clock()
            if self._num_served > self._served_before:
                self._deaths.clear()  # whatever it was, the engine can do its work
            self._served_before = self._num_served
            self._deaths.append(now)
            del self._deaths[: -self._policy.max_deaths]
            delay = self._policy.delay(self._deaths, now)
            if delay is None:
                self._phase, self._back_at = "failed", None
                self._reason = (
                    f"the engine died {len(self._deaths)} times within {self._policy.window_s:g} s, with nothing "
                    f"served between, and stays down; the last time: {cause}"
                )
                self._log("engine_gave_up", reason=self._reason)
                return
            self._log("engine_restart", cause=cause, delay_s=delay)
            self._back_at = now + delay + self._start_s
            await asyncio.sleep(delay)
            self._num_restarts += 1
            try:
                await self._start_process()
            except EngineStartError as error:
                cause = error.message
            except Exception as error:  # our own bug: nothing else would start again
                cause = f"the start failed: {type(error).__name__}: {error}"
                self._log("engine_restart_failed", error="".join(traceback.format_exception(error)))
                if self.healthy:  # it failed when the engine ran again
                    return
            else:
                return
