"""A server's engines on Ray: one life of Ray, the next one when it ends, and the change from one to the other when its
head is lost.

Each life's replicas have a prefix of their own. Without a head the engines of the old one serve on: on CPUs it is
kept until as many of the new one serve, and its engines are drained. A GPU has no room for both, so there it ends
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.app.cluster.ray_life import HEAD_COMMAND, MANAGER_COMMAND, RayLife
from loraplex.app.cluster.spec import ClusterSpec, Event
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
MAX_FAILED_STARTS = 3
"""Lives in a row that ended before any engine has ever joined: the settings are wrong, or the machine."""
LOOK_S = 0.25


class RayUnusable(LoraplexError):
    """Ray cannot start the engines; the message says why, in one line."""

    code = "ray_unusable"


@dataclass(eq=False)
class _Life:
    """`changed` is set with each event and at the end."""

    ray: RayLife
    task: asyncio.Task[None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def prefix(self) -> str:
        return self.ray.prefix


class RayReplicas:
    """`run` keeps Ray and its manager alive until it is cancelled. Where Ray has never started an engine after several
    tries, `on_unusable` hears why. `drain_s`: time for what an old Ray's engines still run. Belongs to one event loop's
    thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        client: Engines,
        drain_s: float,
        *,
        on_unusable: Callable[[RayUnusable], None],
        write: Callable[[str], None] | None = None,
        head: Sequence[str] = HEAD_COMMAND,
        manager: Sequence[str] = MANAGER_COMMAND,
    ) -> None:
        self._spec = spec
        self._client = client
        self._drain_s = drain_s
        self._on_unusable = on_unusable
        self._write = write or _write_line
        self._head, self._manager = head, manager
        self._numbers = itertools.count(1)
        self._retiring: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("loraplex")
        self._has_joined = False

    async def run(self) -> None:
        """Without end."""
        failed, delay = 0, FIRST_DELAY_S
        try:
            while True:
                life = self._begin()
                try:
                    while not life.task.done() and not life.ray.is_headless:
                        life.changed.clear()
                        await life.changed.wait()
                except asyncio.CancelledError:
                    await _end(life)
                    raise
                self._client.num_managers_lost += 1
                if life.ray.is_headless:
                    self._log.error("ray_head_lost", prefix=life.prefix)
                    if self._holds_gpus(life):
                        await _end(life)
                    else:
                        self._retire(life)
                    continue
                failed = 0 if life.ray.was_ready else failed + 1
                if failed == MAX_FAILED_STARTS and not self._has_joined:
                    self._on_unusable(RayUnusable(f"Ray cannot start the engines: {_reason(life)}"))
                delay = FIRST_DELAY_S if life.ray.was_ready else min(2 * delay, MOST_DELAY_S)
                self._log.error("ray_lost", reason=_reason(life), delay_s=delay)
                await asyncio.sleep(delay)
        finally:
            for task in self._retiring:
                task.cancel()
            await asyncio.gather(*self._retiring, return_exceptions=True)

    def _begin(self) -> _Life:
        changed = asyncio.Event()

        def on_event(event: Event) -> None:
            if event.name == "ready":
                self._has_joined = True
                self._log.info("ray_ready", pid=ray.manager_pid, prefix=ray.prefix, seconds=event.seconds)
            changed.set()

        ray = RayLife(
            msgspec.structs.replace(self._spec, prefix=f"{self._spec.prefix}{next(self._numbers)}-"),
            on_event=on_event,
            on_manager_lost=self._on_manager_lost,
            write=self._write,
            head=self._head,
            manager=self._manager,
        )
        life = _Life(ray, asyncio.create_task(ray.run()), changed)
        life.task.add_done_callback(lambda _: changed.set())
        return life

    def _on_manager_lost(self, reason: str, delay_s: float) -> None:
        """Count and log the end of a manager; its engines serve on."""
        self._client.num_managers_lost += 1
        self._log.error("ray_manager_lost", reason=reason, delay_s=delay_s)

    def _holds_gpus(self, life: _Life) -> bool:
        return any(
            replica.session.info.device.startswith("cuda")
            for replica in self._of(life)
            if replica.state != "away"
        )

    def _of(self, life: _Life) -> list[Replica]:
        return [replica for replica in self._client.replicas if replica.id.startswith(life.prefix)]

    # The change from one to the next.

    def _retire(self, life: _Life) -> None:
        task = asyncio.create_task(self._replace(life))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _replace(self, life: _Life) -> None:
        """Return when as many others serve as are wanted and the old manager has ended, its engines idle."""
        try:
            await _until(lambda: life.task.done() or self._others_serve(life))
            old = self._of(life)
            for replica in old:
                self._client.drain(replica.id)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await _until(lambda: not any(replica.session.num_live for replica in self._of(life)))
            self._log.info("ray_replaced", prefix=life.prefix, engines=len(old))
        finally:
            await _end(life)

    def _others_serve(self, life: _Life) -> bool:
        ready = [replica for replica in self._client.replicas if replica.state == "ready"]
        return sum(not replica.id.startswith(life.prefix) for replica in ready) >= self._spec.min_replicas


def _reason(life: _Life) -> str:
    error = None if life.task.cancelled() else life.task.exception()
    return f"{type(error).__name__}: {error}" if error else life.ray.reason


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(LOOK_S)


async def _end(life: _Life) -> None:
    life.task.cancel()
    await asyncio.gather(life.task, return_exceptions=True)


def _write_line(line: str) -> None:
    """A log line of an engine, as it wrote it itself."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
