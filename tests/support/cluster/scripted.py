"""An engine of a cluster in virtual time: it answers as the fake core does; it dies, hangs and comes back when told."""

from __future__ import annotations

import asyncio
import os

from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo
from loraplex.serving.demand import Demand
from loraplex.serving.engines.session import EngineSession
from support.engine.fake_core import FakeCore

STEP_S = 0.01
WATCHDOG_S = 1.0
"""Time without a step after which a hung engine is taken for dead."""
RESTART_S = 0.5


class ScriptedSession(EngineSession):
    """`info` is that of every life. `restarts`: whether it comes back by itself."""

    num_restarts = 0

    def __init__(self, info: EngineInfo, *, restarts: bool = True, demand: Demand | None = None) -> None:
        super().__init__(lambda digests: None, demand)
        self._info = info
        self._restarts = restarts
        self._core = FakeCore(max_waiting=info.max_waiting + info.max_num_seqs)
        self._state: str = "new"
        self._hung_since: float | None = None
        self._runs: asyncio.Task[None] | None = None
        self.num_crashes = 0
        """Deaths by a request."""

    @property
    def healthy(self) -> bool:
        return self._state == "ready"

    @property
    def unhealthy_reason(self) -> str | None:
        return None if self.healthy else self._state

    @property
    def retry_after_s(self) -> float:
        return RESTART_S

    @property
    def is_coming_back(self) -> bool:
        return self._state == "restarting"

    @property
    def life(self) -> str:
        return str(self.num_restarts)

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def start(self) -> None:
        self._state = "ready"
        self._runs = asyncio.create_task(self._run())

    async def close(self, *, drain_s: float = 0) -> None:
        self._draining = True
        if self._runs is not None:
            self._runs.cancel()
        self._state = "closed"
        self._fail("draining", "the server is shutting down")

    def kill(self) -> None:
        """Die, as by SIGKILL."""
        if self.healthy:
            self._state = "restarting" if self._restarts else "gone"
            self._hung_since = None
            self._core = FakeCore(max_waiting=self.info.max_waiting + self.info.max_num_seqs)
            self._fail("engine_restarting", "the engine process failed")
            if self._restarts:
                asyncio.get_running_loop().call_later(RESTART_S, self._come_back)

    def cut(self, request_id: str) -> None:
        """End a request, as an engine does that is stopped from outside."""
        self._core.abort(request_id)

    def hang(self) -> None:
        """Take no more steps; the watchdog ends it."""
        self._hung_since = asyncio.get_running_loop().time()

    def _come_back(self) -> None:
        if self._state == "restarting":
            self.num_restarts += 1
            self._state = "ready"

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            now = asyncio.get_running_loop().time()
            if self._hung_since is not None:
                if now - self._hung_since > WATCHDOG_S:
                    self.kill()
            elif self.healthy:
                self._step()

    def _step(self) -> None:
        try:
            events = tuple(self._core.step())
        except RuntimeError:
            self.num_crashes += 1
            self.kill()
            return
        if events:
            self._dispatch(wire.Events(events))

    def _send(self, command: wire.Command) -> None:
        if not self.healthy:
            return
        match command:
            case wire.Add(request):
                self._core.add_request(request)
            case wire.Abort(request_ids):
                for request_id in request_ids:
                    self._core.abort(request_id)
            case wire.Call() | wire.Notification():
                pass  # no test of this one asks
