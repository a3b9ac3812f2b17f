"""The step thread's loop, the same in an engine process and in a test's own process. No torch.

    commands (any thread) → inbox → [ step thread: apply, core.step() ] → outbox → (IO thread or event loop)

Only the step thread touches the core. The outbox never blocks it: while no client reads, the events of a request
are merged into one, so that the outbox holds at most `max_tokens` ids for each request that the core admitted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.event_buffer import EventBuffer
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.ipc import protocol as wire
from loraplex.engine.reports import EngineInfo
from loraplex.engine.types import AdapterState, EngineError, TokenEvent

if TYPE_CHECKING:  # a server that talks to an engine needs no core
    from loraplex.engine.core.engine_core import EngineCore

RESIDENCY_INTERVAL_S = 0.05
"""How stale a client's view of residency may be while steps pass."""
ABORT_GRACE_S = 2.0
"""Time for the aborts at the end of a drain to take effect."""
POLL_WHILE_WAITING_S = 1.0
"""Upper bound on a sleep with work at hand, should a wake-up be lost."""


class BuiltEngineLike(Protocol):
    """The result of `build_engine`."""

    @property
    def core(self) -> EngineCore:
        """Called by the step thread alone."""
        ...

    @property
    def info(self) -> EngineInfo: ...
    @property
    def heartbeat(self) -> StepHeartbeat:
        """Where the core and its runner leave signs of life; the loop adds its own."""
        ...

    def close(self) -> None: ...


Build = Callable[[Callable[[], None]], BuiltEngineLike]
"""Builds the engine; gets the function by which loader threads wake the step thread."""
Log = Callable[..., None]
"""log(event, level="info", **fields): one structured line."""


class Outbox:
    """Events on their way out, merged by request until they are taken. Thread-safe; `put` never blocks."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._control: deque[wire.Event] = deque()
        self._states: dict[str, AdapterState] = {}
        self._tokens: dict[str, EventBuffer] = {}

    def put(self, event: wire.Event) -> None:
        with self._lock:
            if isinstance(event, wire.Events):
                for item in event.events:
                    buffer = self._tokens.get(item.request_id)
                    if buffer is None:
                        buffer = self._tokens[item.request_id] = EventBuffer()
                    buffer.add(item)
            elif isinstance(event, wire.ResidencyChanged):
                self._states.update(event.states)
            else:
                self._control.append(event)
        self._notify()

    def take_events(self) -> list[wire.Event]:
        """Everything that waits, oldest control message first."""
        with self._lock:
            taken: list[wire.Event] = list(self._control)
            self._control.clear()
            states, self._states = self._states, {}
            tokens, self._tokens = self._tokens, {}
        if states:
            taken.append(wire.ResidencyChanged(states))
        if tokens:
            taken.append(wire.Events(tuple(buffer.take() for buffer in tokens.values())))
        return taken

    @property
    def num_tokens(self) -> int:
        """Tokens that wait."""
        with self._lock:
            return sum(buffer.num_tokens for buffer in self._tokens.values())


class EngineLoop:
    """Builds an engine and steps it in the thread that calls `run`, until it is shut down or fails.

    `post`, `wake` and `stop` may be called from any thread. `run` returns the exit status: 0 after a clean
    shutdown, 1 after a failure in a step, 3 where the engine could not be built; `Fatal` has said why.
    """

    def __init__(
        self,
        build: Build,
        emit: Callable[[wire.Event], None],
        log: Log,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._emit = emit
        self._log = log
        self._clock = clock
        self._condition = threading.Condition()
        self._inbox: deque[wire.Command] = deque()
        self._woken = False
        self._draining = False
        self._drain_until: float | None = None
        self._aborted_rest = False
        self._live: set[str] = set()
        self._states: dict[str, AdapterState] = {}
        self._states_at = float("-inf")
        self._is_warming = False
        self._heartbeat: StepHeartbeat | None = None

    # From any thread.

    def heartbeat(self) -> wire.Heartbeat:
        """How the threads that compute are. Nothing stalls that has not been built yet."""
        if self._heartbeat is None:
            return wire.Heartbeat(0.0, 0.0, unusual=False)
        vitals = self._heartbeat.vitals()
        return wire.Heartbeat(vitals.stalled_s, vitals.longest_s, vitals.unusual)

    def post(self, command: wire.Command) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    def wake(self) -> None:
        """Something happened that the next step should see, for example a finished load."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def stop(self) -> None:
        """End at once: abort what runs, and return from `run`."""
        self.post(wire.Shutdown(0.0))

    # The step thread.

    def run(self) -> int:
        started = self._clock()
        try:
            engine = self._build(self.wake)
        except Exception as error:
            expected = isinstance(error, LoraplexError)
            self._log("engine_start_failed", level="error", error=_one_line(error), exc_info=not expected)
            self._emit(wire.Fatal(_one_line(error)))
            return 3
        try:
            self._log("engine_ready", seconds=round(self._clock() - started, 3))
            self._emit(wire.Ready(engine.info))
            self._heartbeat = engine.heartbeat
            return self._run(engine.core, engine.heartbeat)
        except Exception as error:
            self._log("engine_failed", level="error", error=_one_line(error), exc_info=True)
            self._emit(wire.Fatal(f"the engine failed in a step: {_one_line(error)}"))
            return 1
        finally:
            engine.heartbeat.rest()
            try:
                engine.close()
            except Exception as error:
                self._log("engine_close_failed", level="error", error=_one_line(error), exc_info=True)

    def _run(self, core: EngineCore, heartbeat: StepHeartbeat) -> int:
        while True:
            heartbeat.work()
            for command in self._drain_inbox():
                self._apply(core, command)
            if self._draining and self._drain(core):
                return 0
            self._publish(core.step())
            if damaged := core.take_damaged():
                self._emit(wire.Damaged(damaged))
            self._publish_residency(core)
            self._sleep(core, heartbeat)

    def _drain_inbox(self) -> list[wire.Command]:
        with self._condition:
            commands = list(self._inbox)
            self._inbox.clear()
            self._woken = False
        return commands

    def _sleep(self, core: EngineCore, heartbeat: StepHeartbeat) -> None:
        """Sleep until the core, a command or a wake-up has work for the next step."""
        timeout = core.idle_s()
        if timeout is not None and timeout <= 0:
            return
        if core.has_work:
            timeout = POLL_WHILE_WAITING_S if timeout is None else min(timeout, POLL_WHILE_WAITING_S)
        elif self._draining:
            return
        if self._drain_until is not None:
            left = max(0.0, self._drain_until - self._clock())
            timeout = left if timeout is None else min(timeout, left)
        with self._condition:
            if not self._inbox and not self._woken:
                heartbeat.rest()
                self._condition.wait(timeout)

    def _apply(self, core: EngineCore, command: wire.Command) -> None:
        match command:
            case wire.Add(request):
                self._add(request.request_id, lambda: core.add_request(request))
            case wire.Measure(asked):
                self._add(asked.request_id, lambda: core.measure(asked))
            case wire.Shutdown(drain_s):
                until = self._clock() + drain_s
                self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
                self._draining = True
                core.end_background()
            case wire.Notification():
                command.run(core)
            case wire.Call():
                if isinstance(command, wire.Reset):
                    self._states, self._states_at, self._is_warming = {}, float("-inf"), False
                try:
                    answer: wire.Event = command.run(core)
                except LoraplexError as error:
                    answer = wire.Done(command.call, error.message)
                self._emit(answer)
            case _:
                assert_never(command)

    def _add(self, request_id: str, add: Callable[[], None]) -> None:
        if self._draining:
            error = EngineError("draining", "the engine is shutting down")
            self._publish([TokenEvent(request_id, finish_reason="error", error=error)])
            return
        if request_id in self._live:
            self._log("duplicate_request_id", level="warning", request_id=request_id)
            return
        self._live.add(request_id)
        add()

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        if not events:
            return
        for event in events:
            if event.finish_reason is not None:
                self._live.discard(event.request_id)
        self._emit(wire.Events(tuple(events)))

    def _publish_residency(self, core: EngineCore) -> None:
        now = self._clock()
        if now - self._states_at < RESIDENCY_INTERVAL_S and core.has_work:
            return
        self._states_at = now
        is_warming = core.is_warming
        if is_warming != self._is_warming:
            self._is_warming = is_warming
            self._emit(wire.WarmingChanged(is_warming))
        states = core.residency()
        if states == self._states:
            return
        changed: dict[str, AdapterState] = {
            digest: state for digest, state in states.items() if self._states.get(digest) != state
        }
        changed.update(dict.fromkeys(self._states.keys() - states.keys(), "cold"))
        self._states = dict(states)
        self._emit(wire.ResidencyChanged(changed))

    def _drain(self, core: EngineCore) -> bool:
        """True once nothing is left. What the drain's end finds running is aborted."""
        if not core.has_work:
            return True
        if self._drain_until is not None and self._clock() >= self._drain_until:
            if self._aborted_rest:
                return True  # a step that does not end what was aborted: the client ends its streams itself
            self._aborted_rest = True
            self._drain_until = self._clock() + ABORT_GRACE_S
            for request_id in sorted(self._live):
                core.abort(request_id)
        return False


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, LoraplexError):
        text = f"{type(error).__name__}: {text}" if str(error) else text
    return text[:2000]
