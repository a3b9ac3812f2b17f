"""The guard of one step of a release: ended and running requests of two arms in, a verdict out.

**Windows.** The first window lasts as long as the guard: each sticky key counts once in it (`window`). From `WINDOW_S`
on a second window runs beside it, and begins again every `WINDOW_S`, so that a version which becomes worse later is
found by users who were counted before. The same keys come back in each, so their evidence must not be multiplied across
windows: each has its own, and its own part of the allowed false alarms, `window_share`; the parts add up to 1 (union
bound).

**Metrics** are compared by one e-process each (`evidence`). Their weighted mean is an e-process too, whatever depends
on what (Vovk, Wang, arXiv 1912.06116). A window breaches where it reaches 1 / (max_false_alarm * window_share).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard.comparison import Reading
from loraplex.lifecycle.release_guard.rules import Rules
from loraplex.lifecycle.release_guard.window import Arms, RunningArm, Window, WindowState, problem_of

WINDOW_S = 600.0
MAX_STATE_BYTES = 192 << 10
_FIRST_WINDOW = 0.75
_LATEST = 2.0**37
"""A time that no clock shows, thousands of years ahead."""


class GuardStateInvalid(ValueError):
    """The JSON is not a guard's state, or one of another form."""


class Verdict(msgspec.Struct, frozen=True):
    """`hold`: too few requests to say. `pass`: enough, and no metric is worse so far. `breach`: the candidate is worse
    in this metric by more than its margin; final for this guard. `e_value` and `threshold` are of all metrics, in the
    window that is nearer to its threshold."""

    kind: Literal["hold", "pass", "breach"]
    e_value: float
    threshold: float
    num_requests: int
    breach: Reading | None = None

    @property
    def reason(self) -> str:
        """Why the candidate is worse, for people; for a verdict `breach`."""
        return "guard" if self.breach is None else f"guard: {self.breach.shown}"


class _State(msgspec.Struct, forbid_unknown_fields=True):
    rules: Rules
    arms: Arms
    since: float
    whole: WindowState
    latest: WindowState | None
    index: int
    num_requests: int
    breach: Verdict | None


class Guard:
    """Compares two arms from `since` on, in seconds since the epoch, as is every time here. `num_requests` counts those
    of the candidate that have ended."""

    def __init__(self, rules: Rules, arms: Arms, *, since: float) -> None:
        self._rules = rules
        self._arms = arms
        self.since = since
        self.num_requests = 0
        self._whole = Window.start(rules, arms, since)
        self._latest: Window | None = None
        self._index = 0
        self._breach: Verdict | None = None

    def is_of(self, other: Guard) -> bool:
        """Whether both compare the same arms by the same rules from the same time on."""
        mine, others = (self._rules, self._arms, self.since), (other._rules, other._arms, other.since)
        return mine == others

    def observe(self, outcomes: Iterable[Outcome], running: Iterable[RunningArm], now: float) -> Verdict:
        """Take requests that have ended since the last look, each once, and all servers' rows of running ones. A
        breach is final: nothing is counted after it."""
        if self._breach is not None:
            return self._breach
        ended = [outcome for outcome in outcomes if self._arms.has(outcome.version)]
        rows = [row for row in running if self._arms.has(row.version)]
        for outcome in ended:
            if outcome.version == self._arms.candidate and outcome.started_at >= self.since:
                self.num_requests += 1
        self._turn(now)
        for _, window in self._windows():
            window.observe(ended, rows, now)
        return self.verdict()

    def verdict(self) -> Verdict:
        """The verdict of what was observed."""
        if self._breach is not None:
            return self._breach
        nearest = Verdict("hold", 0.0, 1.0, self.num_requests)
        for index, window in self._windows():
            e_value = window.e_value
            threshold = 1 / (self._rules.max_false_alarm * window_share(index))
            if e_value >= threshold:
                worst = max(window.readings(), key=lambda reading: reading.share * reading.e_value)
                self._breach = Verdict("breach", e_value, threshold, self.num_requests, worst)
                return self._breach
            if e_value / threshold > nearest.e_value / nearest.threshold:
                nearest = Verdict("hold", e_value, threshold, self.num_requests)
        enough = self.num_requests >= self._rules.min_requests and any(
            r.num_candidate for r in self.readings()
        )
        return msgspec.structs.replace(nearest, kind="pass" if enough else "hold")

    def readings(self) -> list[Reading]:
        """The metrics since the guard began."""
        return self._whole.readings()

    def to_json(self) -> bytes:
        """All state, at most `MAX_STATE_BYTES`."""
        latest = None if self._latest is None else self._latest.state()
        return msgspec.json.encode(
            _State(
                self._rules,
                self._arms,
                self.since,
                self._whole.state(),
                latest,
                self._index,
                self.num_requests,
                self._breach,
            )
        )

    @classmethod
    def from_json(cls, data: bytes) -> Guard:
        """The guard that wrote this. Raises GuardStateInvalid."""
        if len(data) > MAX_STATE_BYTES:
            raise GuardStateInvalid(f"The state has {len(data)} bytes; at most {MAX_STATE_BYTES} are read.")
        try:
            state = msgspec.json.decode(data, type=_State)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise GuardStateInvalid(f"The state cannot be read: {error}. Restart the step.") from error
        if (problem := _problem_of(state)) is not None:
            raise GuardStateInvalid(f"The state cannot be used: {problem}. Restart the step.")
        for window in (state.whole, state.latest):
            if window is not None and (problem := problem_of(window, state.rules)) is not None:
                raise GuardStateInvalid(f"The state cannot be used: {problem}. Restart the step.")
        guard = cls(state.rules, state.arms, since=state.since)
        guard.num_requests, guard._index, guard._breach = state.num_requests, state.index, state.breach
        guard._whole = Window(state.rules, state.arms, state.whole)
        guard._latest = None if state.latest is None else Window(state.rules, state.arms, state.latest)
        return guard

    def _windows(self) -> list[tuple[int, Window]]:
        windows = [(0, self._whole)]
        return windows if self._latest is None else [*windows, (self._index, self._latest)]

    def _turn(self, now: float) -> None:
        index = int(max(0.0, now - self.since) // WINDOW_S)
        if index > self._index:  # less where another server's clock is behind
            self._index = index
            self._latest = Window.start(self._rules, self._arms, self.since + index * WINDOW_S)


def _problem_of(state: _State) -> str | None:
    """Say what is wrong with a state whose types are right; None if nothing is. Windows have their own `problem_of`."""
    rules, arms = state.rules, state.arms
    if not rules.margins or not 0 < rules.max_false_alarm < 1:
        return "its rules are out of range"
    if arms.control_weight <= 0 or arms.candidate_weight <= 0:
        return "its weights are not above 0"
    return None if 0 <= state.since < _LATEST and state.index >= 0 else "its times are out of range"


def window_share(index: int) -> float:
    """The part of the allowed false alarms of the whole window, 0, and of those that begin again, 1, 2, …; they add up
    to 1."""
    return _FIRST_WINDOW if index == 0 else (1 - _FIRST_WINDOW) / (index * (index + 1))
