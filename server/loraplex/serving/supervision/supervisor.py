"""Engine processes: one life of one, and how soon the next may begin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo
from loraplex.serving.errors import EngineStartError
from loraplex.serving.supervision.child import Child
from loraplex.serving.supervision.watchdog import TICK_S, Watchdog, WatchdogPolicy

MAX_SOCKET_PATH_BYTES = 100
"""Below what any Unix takes for sun_path (104 on macOS, 108 on Linux)."""
CONNECT_TIMEOUT_S = 60.0
"""Longest time for a process to start up to its connection; the model is loaded after that."""
SPARE_CONNECT_TIMEOUT_S = 15.0
"""Longest time for a spare, which should have done its long imports by now; then a fresh process replaces it."""
LAST_WORDS_S = 0.2
EXIT_WAIT_S = 0.5
"""Longest time for a process that has said that it ends; then it is killed."""
KILL_WAIT_S = 5.0


OnPayload = Callable[[bytes], bool]
"""Is given a message as it came; whether it has dealt with it, so that it need not be decoded."""


def take_no_payload(_: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential back-off, and an end to crash loops: after `max_deaths` deaths within `window_s` seconds, without
    one request served to its end between them, the engine stays down."""

    first_delay_s: float = 0.1
    factor: float = 3.0
    max_delay_s: float = 10.0
    max_deaths: int = 5
    window_s: float = 300.0

    def delay(self, deaths: Sequence[float], now: float) -> float | None:
        """Seconds until the next start after deaths at these times, the last one included; None: give up."""
        recent = sum(1 for at in deaths if now - at <= self.window_s)
        if recent >= self.max_deaths:
            return None
        return float(min(self.first_delay_s * self.factor ** max(0, recent - 1), self.max_delay_s))


class EngineProcess(asyncio.Protocol):
    """One life of an engine process, from its spawn to its death.

    The parent listens on a Unix socket in a fresh directory of mode 0700, which is gone as soon as the child has
    connected. `on_event` gets every event after `Ready`; `on_lost` is called once, when the connection ends, the
    process says that it ends or exits, or the watchdog takes it for hung, whichever is first; nothing comes after it.
    `on_payload` may take messages before they are decoded. `spare` is a process of `spawn_spare` that becomes this one,
    if it can. Call from one event loop's thread only; on Linux the child also dies with the thread that spawned it.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        *,
        on_event: Callable[[wire.Event], None],
        on_lost: Callable[[], None],
        on_progress: Callable[[str, float], None],
        watchdog: WatchdogPolicy,
        spare: Child | None = None,
        on_payload: OnPayload = take_no_payload,
    ) -> None:
        self._command = command
        self._config = config
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_payload = on_payload
        self._on_progress = on_progress
        self._reader = framing.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._child = spare
        self._fatal: str | None = None
        self._broken: str | None = None
        self._started = False
        self._was_lost = False
        self._hung = False
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._watchdog_policy = watchdog
        self._watchdog = Watchdog(watchdog, loop.time())
        self._connected: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done when the process is lost. For `asyncio.wait`, which does not cancel it."""

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self, timeout_s: float) -> EngineInfo:
        """Returns when the engine is ready. Raises EngineStartError with one line; the process is dead then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn()
                info = await self._ready
            if self._was_lost:
                raise EngineStartError(self.cause_of_death())
            self._started = True
            return info
        except TimeoutError:
            raise EngineStartError(f"the engine was not ready after {timeout_s:g} s") from None
        finally:
            if not self._started:
                await self.kill()

    def send(self, command: wire.Command) -> None:
        """Raises FrameTooLarge. A command to a lost process goes nowhere."""
        frame = framing.encode_frame(command)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def send_payload(self, payload: bytes) -> None:
        """Send a command that is encoded already. Raises FrameTooLarge. One to a lost process goes nowhere."""
        frame = framing.frame_payload(payload)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def wait_exit(self, timeout_s: float) -> bool:
        """Whether the process has exited within the time."""
        return self._child is None or await self._child.wait_exit(timeout_s)

    async def kill(self) -> str:
        """End the process, if it has not ended: SIGKILL at once. Returns how it died, in one line."""
        # A process that broke off by itself says more by its own exit status: leave it a moment.
        leave = self._was_lost and not self._hung
        if self._child is not None and not (leave and await self._child.wait_exit(EXIT_WAIT_S)):
            await self._child.kill(KILL_WAIT_S)
        if self._transport is not None:
            self._transport.abort()
        return self.cause_of_death()

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(number)

    def cause_of_death(self) -> str:
        if self._fatal is not None:
            return self._fatal
        if self._broken is not None:
            return self._broken
        if self._child is None or not self._child.exited.done():
            return "the engine process broke its connection"
        status = self._child.exited.result()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"the engine process was killed by {signal.Signals(-status).name}"
        return f"the engine process exited with status {status}; its log says why"

    async def _spawn(self) -> None:
        directory, server = None, None
        try:
            directory = _private_dir()
            path = os.path.join(directory, "s")
            server = await self._loop.create_unix_server(self._accept, path, backlog=1)
            config = msgspec.json.encode(self._config)
            if self._child is not None:
                self._child.tell(os.fsencode(path) + b"\n" + config)
                started = self._loop.time()
                if not await self._connects(self._child, SPARE_CONNECT_TIMEOUT_S):
                    self._on_progress("the spare never connected: a new process", self._loop.time() - started)
                    await self._child.kill(KILL_WAIT_S)
                    self._child = None
            if self._child is None:
                self._child = Child([*self._command, "--socket", path])
                self._child.tell(config)
                if not await self._connects(self._child, CONNECT_TIMEOUT_S):
                    if not self._child.exited.done():
                        self._broken = "the engine process never connected"
                    raise EngineStartError(self.cause_of_death())
            self._child.exited.add_done_callback(self._on_exit)
        except OSError as error:
            raise EngineStartError(f"the engine process could not be started: {error}") from error
        finally:
            if server is not None:
                server.close()
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)

    async def _connects(self, child: Child, timeout_s: float) -> bool:
        """Whether it comes within the time; it does not if it exits first."""
        either: tuple[asyncio.Future[Any], ...] = (self._connected, child.exited)
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return self._connected.done()

    def _accept(self) -> asyncio.BaseProtocol:
        # The directory is ours alone, so only the child comes; it comes once.
        return asyncio.Protocol() if self._connected.done() else self

    def _on_exit(self, _: asyncio.Future[int]) -> None:
        if self._transport is None:
            self._lost()
        else:
            self._end_soon()  # a descendant may never close the socket

    def _end_soon(self) -> None:
        """Its last messages are still to be read."""
        if self._transport is not None:
            self._loop.call_later(LAST_WORDS_S, self._transport.abort)

    def _watch(self) -> None:
        if self._was_lost or (self._child is not None and self._child.exited.done()):
            return
        self._broken = self._watchdog.verdict(self._loop.time())
        if self._broken is None:
            self._loop.call_later(TICK_S, self._watch)
            return
        self._hung = True
        if self._transport is not None:
            self._transport.abort()
        self._lost()

    def _lost(self) -> None:
        if self._was_lost:
            return
        self._was_lost = True
        self.gone.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(self.cause_of_death()))
            self._ready.exception()  # start() may have given up before
        elif self._started:
            self._on_lost()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not every event loop's transports derive from asyncio's classes: uvloop's do not.
        self._transport = cast(asyncio.Transport, transport)
        self._connected.set_result(None)
        self._watchdog = Watchdog(self._watchdog_policy, self._loop.time())
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._was_lost:
            return  # its requests have ended already
        self._watchdog.heard(self._loop.time())
        try:
            for payload in self._reader.feed(data):
                if not self._on_payload(payload):
                    self._on_message(wire.decode_event(payload))
        except framing.ProtocolError as error:
            self._broken = f"the engine process broke the protocol: {error}"
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def _on_message(self, event: wire.Event) -> None:
        match event:
            case wire.Starting(stage, elapsed_s):
                self._on_progress(stage, elapsed_s)
            case wire.Ready(info):
                self._watchdog.ready()
                if not self._ready.done():
                    self._ready.set_result(info)
            case wire.Heartbeat():
                self._watchdog.beat(event)
            case wire.Fatal(message):
                self._fatal = message
                if not self._ready.done():
                    self._ready.set_exception(EngineStartError(message))
                else:
                    self._end_soon()  # it may never get to its exit, for threads that it waits for
            case _:
                self._on_event(event)


def spawn_spare(command: Sequence[str], decoder: str) -> Child:
    """A process that imports what an engine with this decoder needs, which takes most of a small model's start, and
    waits to become one. Raises OSError."""
    return Child([*command, "--spare", decoder])


def _private_dir() -> str:
    """A fresh directory of mode 0700 whose path leaves room for a socket's name."""
    candidates = (None, "/tmp")  # noqa: S108 - mkdtemp makes a directory that is ours alone
    for parent in candidates:
        directory = tempfile.mkdtemp(prefix="loraplex-", dir=parent)
        if len(os.fsencode(directory)) + len("/s") < MAX_SOCKET_PATH_BYTES:
            return directory
        os.rmdir(directory)
    raise EngineStartError("no temporary directory has a path short enough for a Unix socket; set TMPDIR")
