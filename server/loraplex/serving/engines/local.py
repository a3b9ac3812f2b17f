"""The engine in a process of its own, supervised: when it dies its requests fail with an error, it is started
again, and the adapters that were on the device come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo
from loraplex.serving.demand import Demand
from loraplex.serving.engines.session import EngineSession
from loraplex.serving.errors import EngineStartError, EngineUnavailable
from loraplex.serving.supervision.engine_supervisor import DEFAULT_RULES, EngineSupervisor, Supervision
from loraplex.serving.supervision.supervisor import EngineProcess


class LocalEngine(EngineSession):
    """The session of an engine process that `EngineSupervisor` keeps alive by `rules`. `on_damaged(digests)` is
    called when loads found the stored bytes of versions damaged or lost."""

    def __init__(
        self,
        config: EngineConfig,
        rules: Supervision = DEFAULT_RULES,
        *,
        on_damaged: Callable[[tuple[str, ...]], None] = lambda digests: None,
        demand: Demand | None = None,
    ) -> None:
        super().__init__(on_damaged, demand)
        self._log = rules.log
        self._supervisor = EngineSupervisor(config, self, rules)
        self._was_hot: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        return self._supervisor.healthy

    @property
    def unhealthy_reason(self) -> str | None:
        return None if self.healthy else self._supervisor.reason

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def retry_after_s(self) -> float:
        """Seconds as `EngineSupervisor.retry_after_s` gives them."""
        return self._supervisor.retry_after_s

    @property
    def is_coming_back(self) -> bool:
        return self._supervisor.phase in ("starting", "restarting")

    @property
    def life(self) -> str:
        return str(self.num_restarts)

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    async def start(self) -> None:
        await self._supervisor.start()

    async def close(self, *, drain_s: float = 0) -> None:
        self._draining = True
        await self._supervisor.close(drain_s=drain_s)

    def _send(self, command: wire.Command) -> None:
        self._supervisor.send(command)

    # The supervisor's user.

    @property
    def num_served(self) -> int:
        return self._num_served

    def on_event(self, event: wire.Event) -> None:
        self._dispatch(event)

    def on_lost(self, code: Literal["draining", "engine_restarting"], reason: str, *, early: bool) -> int:
        # What a short life had not brought back yet is brought back by the next.
        self._was_hot = self.hot | (self._was_hot if early else frozenset())
        return self._fail(code, reason, None if code == "draining" else self.retry_after_s)

    async def on_ready(self, info: EngineInfo, process: EngineProcess, *, warm: bool) -> None:
        """Have a new engine load what its predecessor had; returns when the pins are there, or time is up."""
        self._info = info
        pinned = list(self._pins.values())
        self._restore(self._was_hot, warm=warm)
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
