"""One window of a guard: each unit gives one number to each metric, whatever it sends.

The number is that of the unit's first request which began in the window and has ended, or is overdue. A user of a
thousand requests counts as much as one of a single request: one draw of an arm is one piece of evidence. Where each
request draws its arm, each is a unit.

**Requests that do not end** are censored observations. One that still runs after more than twice the time in which
three of four requests of the control ended is overdue: it counts as an answer that is longer than all others, and as
one that would end at its limit of tokens. Both arms are treated so, and the candidate's time is longer by as much as
the margins of its lengths and times allow; where one of these is not watched, nothing is overdue. A request that has
ended counts as it ended, however long it took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard.comparison import MAX_RECENT, OVERDUE
from loraplex.lifecycle.release_guard.groups import Arms, Groups, GroupsState, Row
from loraplex.lifecycle.release_guard.rules import MetricName, Rules

MAX_KEYS = 8192
"""Units that are counted in a window. Above 13 a second, a fault that begins later waits for the next ten minutes."""
MAX_OLDEST = 64
"""Oldest running requests of an arm that a row of one server names."""
_OVERDUE_FACTOR = 2.0
_MIN_DURATIONS = 16
_BOUND_TIME: tuple[MetricName, ...] = ("output_length", "ttft", "itl")
_KEY_BYTES = 4
_KEY_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class RunningArm:
    """An arm's running requests on one server, as of a look. `oldest`: key hash and start, in seconds since the epoch,
    of at most `MAX_OLDEST` of them, the longest running first."""

    version: int
    count: int
    oldest: tuple[tuple[int, float], ...]


class WindowState(msgspec.Struct, forbid_unknown_fields=True):
    """A window's state as JSON. `seen`: the low 32 bits of each counted key's hash. `durations`: of the control's last
    requests, in seconds."""

    begins_at: float
    groups: GroupsState
    seen: bytes = b""
    durations: list[float] = []
    control_ended: int = 0


class Window:
    """Requests that began from `begins_at` on, in seconds since the epoch. `part` is its part of the allowed false
    alarms."""

    def __init__(self, rules: Rules, arms: Arms, state: WindowState, part: float) -> None:
        self._arms = arms
        self._state = state
        self._allowance = _allowance(rules)
        self.groups = Groups(rules, arms, state.groups, part)
        seen = state.seen
        self._seen = {
            int.from_bytes(seen[at : at + _KEY_BYTES], "big") for at in range(0, len(seen), _KEY_BYTES)
        }

    @classmethod
    def start(cls, rules: Rules, arms: Arms, begins_at: float, part: float) -> Window:
        """A window without evidence."""
        return cls(rules, arms, WindowState(begins_at, GroupsState.start(rules)), part)

    def state(self) -> WindowState:
        seen = b"".join(key.to_bytes(_KEY_BYTES, "big") for key in sorted(self._seen))
        return msgspec.structs.replace(self._state, seen=seen)

    def observe(self, outcomes: Sequence[Outcome], running: Sequence[RunningArm], now: float) -> None:
        """Take requests of the two arms; see `Guard.observe`."""
        control_running = sum(row.count for row in running if row.version == self._arms.control)
        overdue_s = self._overdue_s(control_running)
        for outcome in outcomes:
            # What began before would be long answers of the control alone, where its weight has just changed.
            if outcome.started_at >= self._state.begins_at:
                self._ended(outcome)
        for row in running:
            self._still_running(row, now, overdue_s)
        self.groups.settle()

    def _ended(self, outcome: Outcome) -> None:
        state = self._state
        is_candidate = outcome.version == self._arms.candidate
        state.control_ended += not is_candidate
        if not self._is_new(outcome.key_hash, is_candidate=is_candidate):
            return
        numbers = numbers_of(outcome)
        if not numbers:
            return
        self._add(outcome.key_hash, numbers, outcome.ended_at, is_candidate=is_candidate)
        if not is_candidate:
            state.durations.append(outcome.ended_at - outcome.started_at)
            del state.durations[:-MAX_RECENT]

    def _still_running(self, row: RunningArm, now: float, overdue_s: float) -> None:
        is_candidate = row.version == self._arms.candidate
        if is_candidate:
            overdue_s *= self._allowance
        for key_hash, started_at in row.oldest[:MAX_OLDEST]:
            is_overdue = started_at >= self._state.begins_at and now - started_at >= overdue_s
            if is_overdue and self._is_new(key_hash, is_candidate=is_candidate):
                self._add(key_hash, _OVERDUE_NUMBERS, now, is_candidate=is_candidate)

    def _overdue_s(self, control_running: int) -> float:
        """Age at which a request of the control is overdue; infinite until so much of the control has ended that its
        third quartile is known whatever becomes of those that run."""
        state = self._state
        is_known = len(state.durations) >= _MIN_DURATIONS and state.control_ended >= 3 * control_running
        if not is_known or math.isinf(self._allowance):
            return math.inf
        return _OVERDUE_FACTOR * sorted(state.durations)[len(state.durations) * 3 // 4]

    def _is_new(self, key_hash: int, *, is_candidate: bool) -> bool:
        """Whether the key would count: its first number in this window. Of a large control, a part of the keys does."""
        if (key_hash & _KEY_MASK) in self._seen or len(self._seen) >= MAX_KEYS:
            return False
        return is_candidate or (key_hash >> 32) / 2**32 < self._arms.control_sample

    def _add(self, key_hash: int, numbers: dict[MetricName, float], at: float, *, is_candidate: bool) -> None:
        key = key_hash & _KEY_MASK
        self._seen.add(key)
        self.groups.add(Row(key, is_candidate, at, numbers))


_OVERDUE_NUMBERS: dict[MetricName, float] = {"output_length": OVERDUE, "length_share": 1.0}


def _allowance(rules: Rules) -> float:
    """How many times as long a candidate's request may run that is within its margins; infinite where they bound no
    time."""
    length, ttft, itl = (rules.margins.get(name, math.inf) for name in _BOUND_TIME)
    return (1 + length) * (1 + max(ttft, itl))


def numbers_of(outcome: Outcome) -> dict[MetricName, float]:
    """A request's number for each metric that its end says something of."""
    failed, cut = outcome.failed, outcome.cut_at_length
    found: dict[MetricName, float | None] = {
        "error_rate": None if failed is None else float(failed),
        "ttft": _time(outcome.first_token_s),
        "itl": _time(outcome.inter_token_s),
        "output_length": None if cut is None else outcome.output_tokens,
        "length_share": None if cut is None else float(cut),
    }
    return {name: number for name, number in found.items() if number is not None}


def _time(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None


def problem_of(state: WindowState) -> str | None:
    """Say what is wrong with a window's state whose types are right; None if nothing is."""
    if len(state.seen) % _KEY_BYTES or len(state.seen) > _KEY_BYTES * MAX_KEYS:
        return "its keys are out of range"
    return None
