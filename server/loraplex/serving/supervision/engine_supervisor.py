"""An engine process and its successors: when one dies the next is started, after a delay that grows with each death."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.loop import Log
from loraplex.engine.reports import EngineInfo
from loraplex.serving.errors import EngineStartError
from loraplex.serving.supervision.child import Child
from loraplex.serving.supervision.supervisor import (
    KILL_WAIT_S,
    EngineProcess,
    OnPayload,
    RestartPolicy,
    spawn_spare,
    take_no_payload,
)
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
"""Wait that a client is given where the engine stays down until an operator acts."""
RESTARTING = "the engine process failed and is being restarted"

Phase = Literal["new", "starting", "ready", "restarting", "failed", "closing", "closed"]


class EngineUser(Protocol):
    """The owner of a supervised engine. Its methods are called on the event loop's thread."""

    @property
    def num_served(self) -> int:
        """Requests that came to a proper end, of all engines so far."""
        ...

    def on_event(self, event: wire.Event) -> None: ...

    async def on_ready(self, info: EngineInfo, process: EngineProcess, *, warm: bool) -> None:
        """A process is ready; it takes requests when this returns. `warm`: it may load more than the pins. Raises
        EngineStartError where the process dies meanwhile."""
        ...

    def on_lost(self, code: Literal["draining", "engine_restarting"], reason: str, *, early: bool) -> int:
        """The process is gone: end what it ran, with this code and reason. `early`: it lived too short to have brought
        back what its predecessor had. Returns the number of requests that were ended."""
        ...


@dataclass(frozen=True, slots=True)
class Supervision:
    """How engine processes are started and watched. `start_timeout_s` bounds a start, the loading of the model
    included; `on_progress(stage, seconds)` is called about once a second during it. With `keep_spare`, a second
    process stands by, without a model, from which the next engine begins."""

    command: Sequence[str] = ENGINE_COMMAND
    start_timeout_s: float = 900.0
    keep_spare: bool = False
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    watchdog: WatchdogPolicy = field(default_factory=WatchdogPolicy)
    on_progress: Callable[[str, float], None] = lambda stage, seconds: None
    log: Log = lambda event, **fields: None
    clock: Callable[[], float] = time.monotonic


DEFAULT_RULES = Supervision()


class EngineSupervisor:
    """One engine at a time, for one user. `on_payload` as `EngineProcess` has it. All methods belong to one event
    loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        user: EngineUser,
        rules: Supervision,
        on_payload: OnPayload = take_no_payload,
    ) -> None:
        self._config = config
        self._user = user
        self._rules = rules
        self._on_payload = on_payload
        self._process: EngineProcess | None = None
        self._spare: Child | None = None
        self.phase: Phase = "new"
        self.reason: str | None = "the engine has not been started"
        """Why the engine takes no requests; None while it does."""
        self.num_restarts = 0
        self._deaths: list[float] = []
        self._served_before = 0  # requests that were served when the last death was counted
        self._start_s = FIRST_START_S  # what a start took, the last time
        self._ready_at = 0.0
        self._back_at: float | None = None  # when a restart should be done
        self._restarter: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self.phase == "ready"

    @property
    def closing(self) -> bool:
        return self.phase in ("closing", "closed")

    @property
    def retry_after_s(self) -> float:
        """Seconds until a restart that goes on should be done, by what the last start took; long where none does."""
        if self._back_at is None:
            return DOWN_RETRY_S
        return max(1.0, self._back_at - self._rules.clock())

    @property
    def pid(self) -> int | None:
        """The engine process, while there is one."""
        return self._process.pid if self._process is not None and self.healthy else None

    def send(self, command: wire.Command) -> None:
        """Raises FrameTooLarge. A command that no engine can take goes nowhere."""
        if self._process is not None:
            self._process.send(command)

    def send_payload(self, payload: bytes) -> None:
        """Pass on a command that is encoded already, as `send` does."""
        if self._process is not None:
            self._process.send_payload(payload)

    async def start(self) -> None:
        """Returns when the engine can take requests. Raises EngineStartError with one clear line."""
        self.phase, self.reason = "starting", "the engine is starting"
        try:
            await self._start_process()
        except EngineStartError as error:
            if self.phase == "starting":
                self.phase, self.reason = "failed", error.message
            raise

    async def close(self, *, drain_s: float = 0) -> None:
        """Take nothing new, let what runs finish within `drain_s` seconds, stop the engine and its spare."""
        if self.phase == "closed":
            return
        was_ready = self.healthy
        self.phase, self.reason = "closing", "the server is shutting down"
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
            self._end("draining")
            self.phase = "closed"

    def _on_stage(self, stage: str, seconds: float) -> None:
        if self.phase == "starting":
            self.reason = f"the engine is starting: {stage}"
        self._rules.on_progress(stage, seconds)

    async def _start_process(self) -> None:
        rules = self._rules
        spare, self._spare = self._spare, None
        process = EngineProcess(
            rules.command,
            self._config,
            on_event=self._user.on_event,
            on_lost=self._on_lost,
            on_progress=self._on_stage,
            watchdog=rules.watchdog,
            spare=spare,
            on_payload=self._on_payload,
        )
        self._process = process
        started = rules.clock()
        info = await process.start(rules.start_timeout_s)
        self._start_s = rules.clock() - started
        rules.log("engine_started", pid=process.pid, seconds=round(self._start_s, 3))
        await self._user.on_ready(info, process, warm=len(self._deaths) <= MAX_WARMED_DEATHS)
        self.phase, self.reason = "ready", None
        self._ready_at = rules.clock()
        if rules.keep_spare:
            try:
                self._spare = spawn_spare(rules.command, info.decoder)
            except OSError as error:
                rules.log("engine_spare_failed", error=str(error))

    def _end(self, code: Literal["draining", "engine_restarting"], *, early: bool = False) -> int:
        reason = RESTARTING if code == "engine_restarting" else "the server shut down before it ended"
        return self._user.on_lost(code, reason, early=early)

    def _on_lost(self) -> None:
        """The process is gone: end its requests at once, then start a new one."""
        if self.closing:
            self._end("draining")
            return
        now = self._rules.clock()
        self.phase, self.reason = "restarting", RESTARTING
        self._back_at = now + self._rules.restart.first_delay_s + self._start_s
        failed = self._end("engine_restarting", early=now - self._ready_at < RESTORE_S)
        self._rules.log("engine_lost", failed_requests=failed)
        if self._restarter is not None and not self._restarter.done():
            return  # it waited for the user to be ready, and hears of it
        self._restarter = asyncio.get_running_loop().create_task(self._restart())
        self._restarter.add_done_callback(self._on_restarter_end)

    def _on_restarter_end(self, restarter: asyncio.Task[None]) -> None:
        """Report a restarter that failed by a bug of ours: nothing else starts the engine again."""
        if restarter.cancelled() or (error := restarter.exception()) is None:
            return
        reason = f"the engine stays down: its restart failed: {type(error).__name__}: {error}"
        self._rules.log("engine_gave_up", reason=reason, error="".join(traceback.format_exception(error)))
        if self.phase == "restarting":
            self.phase, self.reason, self._back_at = "failed", reason, None

    async def _restart(self) -> None:
        assert self._process is not None
        cause = await self._process.kill()
        while True:
            delay = self._next_delay(cause)
            if delay is None:
                return
            self._rules.log("engine_restart", cause=cause, delay_s=delay)
            self._back_at = self._rules.clock() + delay + self._start_s
            await asyncio.sleep(delay)
            self.num_restarts += 1
            try:
                await self._start_process()
            except EngineStartError as error:
                cause = error.message
            except Exception as error:  # our own bug: nothing else would start again
                cause = f"the start failed: {type(error).__name__}: {error}"
                self._rules.log("engine_restart_failed", error="".join(traceback.format_exception(error)))
                if self.healthy:  # it failed when the engine ran again
                    return
            else:
                return

    def _next_delay(self, cause: str) -> float | None:
        """Seconds until the start that follows a death; None where the engine stays down."""
        now, policy = self._rules.clock(), self._rules.restart
        if self._user.num_served > self._served_before:
            self._deaths.clear()  # whatever it was, the engine can do its work
        self._served_before = self._user.num_served
        self._deaths.append(now)
        del self._deaths[: -policy.max_deaths]
        delay = policy.delay(self._deaths, now)
        if delay is None:
            self.phase, self._back_at = "failed", None
            self.reason = (
                f"the engine died {len(self._deaths)} times within {policy.window_s:g} s, with nothing "
                f"served between, and stays down; the last time: {cause}"
            )
            self._rules.log("engine_gave_up", reason=self.reason)
        return delay
