"""A server's engines on Ray: its manager process, the next one when it dies, and the change from one to the other when
Ray's head is lost.

Each manager's replicas have a prefix of their own. Without a head the engines of the old one serve on: on CPUs it is
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
from loraplex.app.cluster.process import MANAGER_COMMAND, ManagerProcess
from loraplex.app.cluster.spec import ClusterSpec, Event
from loraplex.serving.cluster.client import ClusterEngineClient
from loraplex.serving.cluster.replica import Replica

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
MAX_FAILED_STARTS = 3
"""Managers in a row that ended before any engine has ever joined: the settings are wrong, or the machine."""
LOOK_S = 0.25


class RayUnusable(LoraplexError):
    """Ray cannot start the engines; the message says why, in one line."""

    code = "ray_unusable"


@dataclass(eq=False)
class _Life:
    """A manager from its start to its end. `changed` is set with each event and at the end."""

    prefix: str
    process: ManagerProcess | None = None
    task: asyncio.Task[int] | None = None
    is_headless: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RayReplicas:
    """`run` keeps a manager alive until it is cancelled. Where Ray has never started an engine after several tries,
    `on_unusable` hears why. `drain_s`: time for what an old manager's engines still run. Belongs to one event loop's
    thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        client: ClusterEngineClient,
        drain_s: float,
        *,
        on_unusable: Callable[[RayUnusable], None],
        write: Callable[[str], None] | None = None,
        command: Sequence[str] = MANAGER_COMMAND,
    ) -> None:
        self._spec = spec
        self._client = client
        self._drain_s = drain_s
        self._on_unusable = on_unusable
        self._write = write or _write_line
        self._command = command
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
                assert life.task is not None
                try:
                    is_ready = await self._watch(life)
                except asyncio.CancelledError:
                    await _end(life)
                    raise
                self._client.num_managers_lost += 1
                if life.is_headless:
                    self._log.error("ray_head_lost", prefix=life.prefix)
                    if self._holds_gpus(life):
                        await _end(life)
                    else:
                        self._retire(life)
                    continue
                failed = 0 if is_ready else failed + 1
                if failed == MAX_FAILED_STARTS and not self._has_joined:
                    self._on_unusable(RayUnusable(f"Ray cannot start the engines: {self._reason(life)}"))
                delay = FIRST_DELAY_S if is_ready else min(2 * delay, MOST_DELAY_S)
                self._log.error("ray_manager_lost", reason=self._reason(life), delay_s=delay)
                await asyncio.sleep(delay)
        finally:
            for task in self._retiring:
                task.cancel()
            await asyncio.gather(*self._retiring, return_exceptions=True)

    def _begin(self) -> _Life:
        life = _Life(f"{self._spec.prefix}{next(self._numbers)}-")

        def on_event(event: Event) -> None:
            if event.name == "ready":
                assert life.process is not None
                self._log.info("ray_ready", pid=life.process.pid, prefix=life.prefix, seconds=event.seconds)
                self._has_joined = True
            life.is_headless |= event.name == "head_lost"
            life.changed.set()

        spec = msgspec.structs.replace(self._spec, prefix=life.prefix)
        life.process = ManagerProcess(spec, on_event=on_event, write=self._write, command=self._command)
        life.task = asyncio.create_task(life.process.run())
        life.task.add_done_callback(lambda _: life.changed.set())
        return life

    async def _watch(self, life: _Life) -> bool:
        """Return when the manager has ended or has lost its head; whether its engines have ever been ready."""
        assert life.task is not None
        while not life.task.done() and not life.is_headless:
            life.changed.clear()
            await life.changed.wait()
        return life.process is not None and life.process.was_ready

    def _reason(self, life: _Life) -> str:
        assert life.process is not None
        assert life.task is not None
        if life.process.reason:
            return life.process.reason
        error = None if life.task.cancelled() else life.task.exception()
        if error is not None:
            return f"{type(error).__name__}: {error}"
        *_, last = ["", *life.process.last_lines]
        return f"its manager ended with status {life.task.result()}: {last}".rstrip(": ")

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
            await _until(lambda: _has_ended(life) or self._others_serve(life))
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


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(LOOK_S)


def _has_ended(life: _Life) -> bool:
    return life.task is None or life.task.done()


async def _end(life: _Life) -> None:
    assert life.task is not None
    life.task.cancel()
    await asyncio.gather(life.task, return_exceptions=True)


def _write_line(line: str) -> None:
    """A log line of an engine, as it wrote it itself."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
