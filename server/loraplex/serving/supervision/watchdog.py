"""When an engine process that has not died must be taken for dead.

Two clocks run. The process's main thread, which computes nothing, sends a sign of life every second: if nothing at all
comes, the process is stopped, swapped out, or deadlocked. And it reports for how long its step thread and forward
worker have made no progress although there is something to do: then a forward pass is stuck, on the device or in a
lock, while the main thread goes on answering.

A layer that takes long is no failure. What is slow here has been slow before, so a step may pause for four times as
long as steps did lately, however short the time-out is. A step larger than any before, for example the first, has no
precedent and may compile: it gets minutes. So does the start, where weights are read in long calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.ipc.protocol import HEARTBEAT_INTERVAL_S, Heartbeat

TICK_S = 0.25
MARGIN_S = HEARTBEAT_INTERVAL_S + 2 * TICK_S
"""The longest time between the last heartbeat and the stop, and between the time-out and the notice."""
PATIENCE = 4.0


@dataclass(frozen=True, slots=True)
class WatchdogPolicy:
    """`hang_timeout_s`: the time within which a hang is noticed. `new_step_timeout_s`: for a step larger than any
    before. `start_silence_s`: between two signs of life during the start."""

    hang_timeout_s: float = 10.0
    new_step_timeout_s: float = 300.0
    start_silence_s: float = 60.0


class Watchdog:
    """Watches one life of an engine process. Report each message to it, and ask for its verdict every `TICK_S`; times
    are by one clock of the caller's."""

    def __init__(self, policy: WatchdogPolicy, now: float) -> None:
        self._policy = policy
        self._heard_at = now
        self._ticked_at = now
        self._last: Heartbeat | None = None

    def heard(self, now: float) -> None:
        """Anything has come from the process."""
        self._heard_at = now

    def ready(self) -> None:
        """The start is over: from now on it is watched in earnest."""
        self._last = Heartbeat(0.0, 0.0, unusual=False)

    def beat(self, heartbeat: Heartbeat) -> None:
        self._last = heartbeat

    def verdict(self, now: float) -> str | None:
        """Why the process must be ended; None while it need not."""
        # While this process was itself held up, it could not read any message.
        self._heard_at += max(0.0, now - self._ticked_at - 2 * TICK_S)
        self._ticked_at = now
        policy = self._policy
        silence = now - self._heard_at
        limit = policy.start_silence_s if self._last is None else policy.hang_timeout_s - MARGIN_S
        if silence > limit:
            return f"the engine process gave no sign of life for {silence:.1f} s"
        if self._last is not None:
            stalled = self._last.stalled_s
            limit = policy.hang_timeout_s - MARGIN_S
            if self._last.unusual:
                limit = max(limit, policy.new_step_timeout_s)
            if stalled > max(limit, PATIENCE * self._last.longest_s):
                return f"a step of the engine made no progress for {stalled:.1f} s"
        return None
