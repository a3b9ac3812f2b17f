"""The guard of one step of a release: ended and running requests of two arms in, a verdict out.

**Windows.** The first window lasts as long as the guard: each unit counts once in it (`window`). From `WINDOW_S` on a
second window runs beside it, and begins again every `WINDOW_S`, so that a version which becomes worse later is found by
users who were counted before. What users give beyond their first request is compared too (`repeats`). The same users
are in each of these, so their evidence must not be multiplied across: each has its own, and its own part of the allowed
false alarms; the parts add up to 1 (union bound).

**Metrics** are compared by one e-process each (`evidence`). Their mean is an e-process too, whatever depends on what
(Vovk, Wang, arXiv 1912.06116). A part breaches where it reaches 1 / (max_false_alarm * part).

**A pass** needs more than silence: the guard must have been able to find a gross fault (`power`), and no metric may
look worse than it would by chance in one of `1 / SUSPICIOUS` releases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard import groups, repeats, window
from loraplex.lifecycle.release_guard.comparison import Reading, Unit
from loraplex.lifecycle.release_guard.groups import Arms, Groups
from loraplex.lifecycle.release_guard.repeats import Repeats, RepeatsState
from loraplex.lifecycle.release_guard.rules import Rules
from loraplex.lifecycle.release_guard.window import RunningArm, Window, WindowState

WINDOW_S = 600.0
MAX_STATE_BYTES = 256 << 10
FIRST_PART, REPEATS_PART, LATER_PART = 0.7, 0.22, 0.08
SUSPICIOUS = 20.0
"""Evidence of one metric, by itself, from which on nothing passes."""
_LATEST = 2.0**37
"""A time that no clock shows, thousands of years ahead."""


class GuardStateInvalid(ValueError):
    """The JSON is not a guard's state, or one of another form."""


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a look. `hold`: the guard could not yet have found what it looks for, or a metric looks worse and
    more must be seen. `pass`: it could have, and did not. `breach`: the candidate is worse in this metric by more than
    its margin; final for this guard."""

    kind: Literal["hold", "pass", "breach"]
    e_value: float
    """The evidence of all metrics, in the window that is nearest to its threshold."""
    threshold: float
    num_requests: int
    """Requests of the candidate that have ended."""
    breach: Reading | None = None
    advice: str | None = None
    """The reason of a `hold`, in words."""

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
    repeats: RepeatsState | None
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
        self._whole = Window.start(rules, arms, since, _first_part(arms))
        self._latest: Window | None = None
        # Where each request draws its arm, none comes again.
        self._repeats = Repeats.start(rules, arms, REPEATS_PART) if arms.unit != "request" else None
        self._index = 0
        self._breach: Verdict | None = None

    @property
    def unit(self) -> Unit:
        """The thing that draws its arm, and is counted."""
        return self._arms.unit

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
        counted = [outcome for outcome in ended if outcome.started_at >= self.since]
        self.num_requests += sum(outcome.version == self._arms.candidate for outcome in counted)
        self._turn(now)
        self._whole.observe(ended, rows, now)
        if self._latest is not None:
            self._latest.observe(ended, rows, now)
        if self._repeats is not None:
            self._repeats.observe(counted)
        return self.verdict()

    def verdict(self) -> Verdict:
        """The verdict of what was observed."""
        if self._breach is not None:
            return self._breach
        nearest = Verdict("hold", 0.0, 1.0, self.num_requests)
        for part in self._parts():
            e_value, threshold = part.e_value, part.threshold
            if e_value >= threshold:
                worst = self._shown(part)
                self._breach = Verdict("breach", e_value, threshold, self.num_requests, worst)
                return self._breach
            if e_value / threshold > nearest.e_value / nearest.threshold:
                nearest = Verdict("hold", e_value, threshold, self.num_requests)
        advice = self._waits_for()
        return msgspec.structs.replace(nearest, kind="hold" if advice else "pass", advice=advice)

    def readings(self) -> list[Reading]:
        """The metrics since the guard began. What is missing is what is missing by first requests or by repeats,
        whichever is less."""
        found = self._whole.groups.readings()
        if self._repeats is None:
            return found
        pairs = zip(found, self._repeats.groups.readings(), strict=True)
        return [
            msgspec.structs.replace(
                one, needs=min(one.needs, other.needs) if other.num_candidate else one.needs
            )
            for one, other in pairs
        ]

    @property
    def needs(self) -> int:
        """Units of both arms that are missing until a gross fault would have been found; 0 after a breach."""
        return 0 if self._breach is not None else max(reading.needs for reading in self.readings())

    def _shown(self, part: Groups) -> Reading:
        """The metric that is worst in this part. Of repeats, whose numbers are stretched, those of first requests are
        shown."""
        worst = _worst(part)
        if self._repeats is None or part is not self._repeats.groups:
            return worst
        whole = next(reading for reading in self.readings() if reading.metric == worst.metric)
        return msgspec.structs.replace(whole, e_value=worst.e_value)

    def _waits_for(self) -> str | None:
        """Why the verdict is no pass, with what would help; None if it is one."""
        for part in self._parts():
            worst = _worst(part)
            if worst.e_value >= SUSPICIOUS:
                return f"{worst.metric} looks worse: waits for more evidence"
        if needs := self.needs:
            more = f"needs {needs} {self._arms.unit}{'' if needs == 1 else 's'} more"
            return more if self._arms.unit == "request" else f"{more}, or --sticky none"
        if not any(reading.num_candidate for reading in self.readings()):
            return "nothing of the new version has been compared yet"
        missing = self._rules.min_requests - self.num_requests
        return f"needs {missing} requests of the new version more" if missing > 0 else None

    def to_json(self) -> bytes:
        """All state, at most `MAX_STATE_BYTES`."""
        latest = None if self._latest is None else self._latest.state()
        repeated = None if self._repeats is None else self._repeats.state()
        return msgspec.json.encode(
            _State(
                self._rules,
                self._arms,
                self.since,
                self._whole.state(),
                latest,
                repeated,
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
        guard = cls(state.rules, state.arms, since=state.since)
        guard.num_requests, guard._index, guard._breach = state.num_requests, state.index, state.breach
        guard._whole = Window(state.rules, state.arms, state.whole, _first_part(state.arms))
        if state.latest is not None:
            guard._latest = Window(state.rules, state.arms, state.latest, later_part(state.index))
        if state.repeats is not None:
            guard._repeats = Repeats(state.rules, state.arms, state.repeats, REPEATS_PART)
        return guard

    def _parts(self) -> list[Groups]:
        parts = (self._whole, self._latest, self._repeats)
        return [part.groups for part in parts if part is not None]

    def _turn(self, now: float) -> None:
        index = int(max(0.0, now - self.since) // WINDOW_S)
        if index > self._index:  # less where another server's clock is behind
            self._index = index
            begins_at = self.since + index * WINDOW_S
            self._latest = Window.start(self._rules, self._arms, begins_at, later_part(index))


def _worst(part: Groups) -> Reading:
    return max(part.readings(), key=lambda reading: reading.share * reading.e_value)


def _problem_of(state: _State) -> str | None:
    """Say what is wrong with a state whose types are right; None if nothing is."""
    rules, arms = state.rules, state.arms
    if not rules.margins or not 0 < rules.max_false_alarm < 1:
        return "its rules are out of range"
    if arms.control_weight <= 0 or arms.candidate_weight <= 0:
        return "its weights are not above 0"
    if not 0 <= state.since < _LATEST or state.index < 0:
        return "its times are out of range"
    if (state.repeats is None) is (arms.unit != "request") or (state.latest is None) is (state.index > 0):
        return "its parts are not those of its arms"
    parts = [part for part in (state.whole, state.latest, state.repeats) if part is not None]
    problems = [groups.problem_of(part.groups, rules) for part in parts]
    problems += [window.problem_of(part) for part in (state.whole, state.latest) if part is not None]
    problems += [] if state.repeats is None else [repeats.problem_of(state.repeats)]
    return next(filter(None, problems), None)


def _first_part(arms: Arms) -> float:
    return FIRST_PART + REPEATS_PART if arms.unit == "request" else FIRST_PART


def later_part(index: int) -> float:
    """The part of the allowed false alarms of the windows that begin again, 1, 2, …; they add up to `LATER_PART`."""
    return LATER_PART / (index * (index + 1))
