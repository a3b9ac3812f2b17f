"""The engine process: `python -m loraplex.engine.ipc.process --socket PATH`, an EngineConfig as JSON on stdin. With
`--spare DECODER` instead, it imports what an engine with that decoder (as `EngineInfo` names it) needs and waits, until
a line with PATH, and the EngineConfig behind it, come on stdin.

The main thread does the socket and the signals, one step thread runs `EngineLoop` and sends its events. The process
lives for its one client: when the client's end of the socket closes, it exits. SIGINT is ignored (a Ctrl-C at the
terminal reaches the parent, which drains), SIGTERM ends it cleanly. Log lines are JSON on stderr and hold no prompts.
Exit status: 0 after a clean end, 1 after a failure in a step, 2 for a bad start, 3 where the engine could not
be built.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.ipc import framing
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.ipc.log_lines import JsonLogs, log, report
from loraplex.engine.ipc.loop import BuiltEngineLike, EngineLoop, Log, Outbox
from loraplex.engine.ipc.quick_imports import quick_imports
from loraplex.engine.log_hooks import install_log_hooks
from loraplex.engine.types import TokenEvent

FLUSH_S = 2.0
"""Time for the last events to reach the client after the loop has ended."""
ORPHAN_GRACE_S = 1.0
"""Time for a step to end after the client has gone; then the process ends in the middle of it."""
MAX_EVENTS_PER_FRAME = 4096
MAX_TOKENS_PER_FRAME = 1 << 20
OPENMP_SPINS = "10000"
"""About 0.1 ms."""
GPU_SWITCH_INTERVAL_S = 2e-4
"""How long a thread may keep Python's lock while another waits for it. By itself that is 5 ms, about a decoding step on
a GPU: the thread that plans the next step, the worker that launches this one, the socket's and the loaders' would wait
for each other that long. On a CPU a step takes longer, and its kernels run without the lock."""
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15

BuildEngine = Callable[[EngineConfig, Callable[[], None], Callable[[str], None]], BuiltEngineLike]
"""build(config, wake, on_stage)"""


class EngineServer:
    """One connection's IO, on the main thread: frames in to the loop, the outbox out to the client, and a sign of
    life once a second. What the socket takes at once the step thread sends itself: to wake the main thread for each
    step takes longer.

    Nothing is encoded before the socket has taken what was encoded last, so a client that does not read makes
    the outbox merge, and neither memory nor the step thread waits for it.
    """

    def __init__(
        self,
        connection: socket.socket,
        build: Callable[[Callable[[], None]], BuiltEngineLike],
        log: Log,
    ) -> None:
        connection.setblocking(False)
        self._log = log
        self._connection = connection
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._outbox = Outbox(self._put)
        self._loop = EngineLoop(build, self._emit, log)
        self._reader = framing.FrameReader()
        self._sending = memoryview(b"")
        self._sends = threading.Lock()
        self._starting = True
        self._stage = "loading libraries"
        self._started_at = self._next_beat = time.monotonic()
        self._status: int | None = None
        self._thread = threading.Thread(target=self._step_thread, name="step", daemon=True)

    def serve(self) -> int:
        """Until the loop has ended and its last events are sent, or the client has gone. Returns the status."""
        self._install_signals()
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()
        flush_until: float | None = None
        while True:
            now = time.monotonic()
            if now >= self._next_beat:
                if self._starting:
                    self._outbox.put(wire.Starting(self._stage, now - self._started_at))
                elif not self._sending:  # else it has enough to read
                    self._outbox.put(self._loop.heartbeat())
                self._next_beat = now + wire.HEARTBEAT_INTERVAL_S
            if self._status is not None and flush_until is None:
                flush_until = now + FLUSH_S
            self._send()
            if flush_until is not None and (not self._sending or now >= flush_until):
                return self._status or 0
            timeout = self._next_beat - now
            if flush_until is not None:
                timeout = min(timeout, flush_until - now)
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                elif not self._receive():
                    return self._abandon()

    def close(self) -> None:
        self._selector.close()
        for endpoint in (self._connection, self._wake_read, self._wake_write):
            endpoint.close()

    # The step thread.

    def show_stage(self, stage: str) -> None:
        """The current stage of the start."""
        self._stage = stage
        self._outbox.put(wire.Starting(stage, time.monotonic() - self._started_at))

    def _step_thread(self) -> None:
        status = 1
        try:
            status = self._loop.run()
        finally:
            self._starting = False
            self._status = status
            self._notify()

    def _emit(self, event: wire.Event) -> None:
        if isinstance(event, wire.Ready | wire.Fatal):
            self._starting = False
        self._outbox.put(event)

    def _put(self) -> None:
        """Something was put into the outbox."""
        # Not past a main thread that hangs: the client would take the process for healthy.
        is_sender = threading.current_thread() is self._thread and not self._beat_is_late
        if is_sender and self._sends.acquire(blocking=False):
            try:
                if not self._sending and self._flush():
                    return
            finally:
                self._sends.release()
        self._notify()

    @property
    def _beat_is_late(self) -> bool:
        return time.monotonic() > self._next_beat

    def _notify(self) -> None:
        # A full pipe has a wake-up in it already.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    # The main thread.

    def _install_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._loop.stop())
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def _receive(self) -> bool:
        """False once the client has gone."""
        try:
            data = self._connection.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            for payload in self._reader.feed(data):
                self._loop.post(wire.decode_command(payload))
        except framing.ProtocolError as error:
            self._log("protocol_error", level="error", error=str(error))
            return False
        return True

    def _send(self) -> None:
        with self._sends:
            all_sent = self._flush()
        wanted = selectors.EVENT_READ if all_sent else selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(self._connection, wanted)

    def _flush(self) -> bool:
        """Send what waits, as far as the socket takes it; whether it took all. Call with the lock held."""
        while True:
            if not self._sending:
                self._sending = memoryview(b"".join(map(_frames, self._outbox.take_events())))
                if not self._sending:
                    return True
            try:
                sent = self._connection.send(self._sending)
            except BlockingIOError:
                return False
            except OSError:
                self._sending = memoryview(b"")  # the next read finds that the client is gone
                return True
            self._sending = self._sending[sent:]

    def _abandon(self) -> int:
        """The client is gone: there is no work left."""
        self._log("client_gone")
        self._loop.stop()
        self._thread.join(ORPHAN_GRACE_S)
        if self._thread.is_alive():
            os._exit(0)  # in the middle of a step or of a load, which cannot be interrupted otherwise
        return 0


def _frames(event: wire.Event) -> bytes:
    if isinstance(event, wire.Events):
        return b"".join(framing.encode_frame(wire.Events(part)) for part in _split(event.events))
    try:
        return framing.encode_frame(event)
    except framing.FrameTooLarge as error:
        if isinstance(event, wire.CallAnswer):
            return framing.encode_frame(wire.Done(event.call, str(error)))
        raise


def _split(events: Sequence[TokenEvent]) -> Iterator[tuple[TokenEvent, ...]]:
    """Parts that stay far below the limit of a frame, however long the client did not read."""
    part: list[TokenEvent] = []
    num_tokens = 0
    for event in events:
        part.append(event)
        num_tokens += len(event.token_ids)
        if event.scores is not None:
            num_tokens += event.scores.num_values
        if len(part) >= MAX_EVENTS_PER_FRAME or num_tokens >= MAX_TOKENS_PER_FRAME:
            yield tuple(part)
            part, num_tokens = [], 0
    if part:
        yield tuple(part)


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent dies. Elsewhere the socket's end does."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def show_as(name: str) -> None:
    """On Linux, what `ps -o comm` and `top` call this process."""
    _prctl(PR_SET_NAME, name.encode())


def set_switch_interval(device: str) -> None:
    """Set the switch interval of an engine on this device, as torch names it."""
    if device.startswith("cuda"):
        sys.setswitchinterval(GPU_SWITCH_INTERVAL_S)


def _prctl(option: int, value: int | bytes) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def run(
    build: BuildEngine,
    argv: list[str] | None = None,
    prepare: Callable[[str], None] = lambda decoder: None,
) -> int:
    """The whole process with the given way to build an engine, and what a spare does ahead. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="loraplex-engine")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--socket", help="the Unix socket that the client listens on")
    which.add_argument(
        "--spare",
        metavar="DECODER",
        help="get ready for that decoder, and wait for the socket's path on stdin",
    )
    parser.add_argument("--replica", metavar="NAME", help="its name among several, for its log lines")
    arguments = parser.parse_args(argv)
    always = {} if arguments.replica is None else {"replica": arguments.replica}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(handlers=[JsonLogs(**always)], level=logging.WARNING)
    install_log_hooks(partial(report, **always))
    die_with_parent()
    path = arguments.socket
    if arguments.spare is not None:
        prepare(arguments.spare)
        show_as("engine-spare")
        path = os.fsdecode(sys.stdin.buffer.readline(4096).removesuffix(b"\n"))
        if not path:
            return 0  # it was not needed
        show_as("engine")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(1 << 20), type=EngineConfig)
        connection.connect(path)
    except (OSError, msgspec.MsgspecError) as error:
        log("engine_start_failed", level="error", error=str(error), **always)
        connection.close()
        return 2

    def start(wake: Callable[[], None]) -> BuiltEngineLike:
        engine = build(config, wake, server.show_stage)
        set_switch_interval(engine.info.device)
        return engine

    server = EngineServer(connection, start, partial(log, **always))
    try:
        return server.serve()
    finally:
        server.close()


def main() -> None:
    # Read when torch is loaded. By itself a thread of OpenMP's waits three milliseconds in a loop for torch's next
    # operation, on a core that the kernels' threads and the server's process want.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)

    def build(
        config: EngineConfig, wake: Callable[[], None], on_stage: Callable[[str], None]
    ) -> BuiltEngineLike:
        with quick_imports():
            from loraplex.engine.build import build_engine

        return build_engine(config, wake, on_stage)

    def prepare(decoder: str) -> None:
        with quick_imports():
            importlib.import_module("loraplex.engine.build")
            with contextlib.suppress(ImportError):  # its absence is reported where it is needed
                importlib.import_module("loraplex.kernels.numba_warm_up")
            if decoder == "transformers":
                # The config of any family brings most of what transformers needs; of the fused ones the plan is kept.
                importlib.import_module("transformers").LlamaConfig  # noqa: B018 - imported when it is looked up

    # Threads of numerical libraries may outlive the loop; nothing of theirs is worth waiting for.
    status = run(build, prepare=prepare)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
