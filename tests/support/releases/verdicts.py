"""Runs of the guard, and of threshold rules as Flagger has them, over the same simulated traffic."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard
from loraplex.lifecycle.release_guard.rules import Rules
from support.releases.traffic import CANDIDATE, CONTROL, Fault, Look, Traffic, looks


@dataclass(frozen=True)
class Found:
    """A breach: requests of the candidate that had begun by then, users who met it, seconds since the begin."""

    num_started: int
    users_met: int
    after_s: float
    metric: str


class Flagger:
    """Checks as in Flagger's documentation: once a minute, over the last minute, the candidate's share of requests
    without an error is at least 99 %, and the 99th percentile of its latency at most a fixed number. The `threshold`th
    failed check rolls back. Our latency is the time to the first token."""

    INTERVAL_S = 60

    def __init__(self, *, threshold: int = 5, min_success: float = 0.99, max_p99_s: float = 1.2) -> None:
        self._threshold, self._min_success, self._max_p99_s = threshold, min_success, max_p99_s
        self._recent: list[Outcome] = []
        self._failed = 0

    def observe(self, look: Look) -> str | None:
        """Why it rolls back at this look, if it does."""
        self._recent += [outcome for outcome in look.outcomes if outcome.version == CANDIDATE]
        if look.now % self.INTERVAL_S:
            return None
        recent, self._recent = self._recent, []
        reason = None
        if recent and sum(bool(outcome.failed) for outcome in recent) > (1 - self._min_success) * len(recent):
            reason = "error_rate"
        firsts = sorted(o.first_token_s for o in recent if o.first_token_s is not None)
        if firsts and firsts[int(len(firsts) * 0.99)] > self._max_p99_s:
            reason = "ttft"
        self._failed += reason is not None
        return reason if self._failed >= self._threshold else None


def breaches(
    traffic: Traffic, seed: int, *, seconds: int, fault: Fault | None = None, rules: Rules | None = None
) -> dict[str, Found | None]:
    """When the guard and Flagger's rules call the candidate worse, over one run."""
    arms = Arms(CONTROL, CANDIDATE, 1 - traffic.share, traffic.share)
    guard, flagger = Guard(rules or Rules(), arms, since=0.0), Flagger()
    found: dict[str, Found | None] = {"guard": None, "flagger": None}
    for look in looks(traffic, seed, seconds=seconds, fault=fault):
        if found["guard"] is None:
            breach = guard.observe(look.outcomes, look.running, look.now).breach
            found["guard"] = None if breach is None else _found(look, breach.metric)
        if found["flagger"] is None and (reason := flagger.observe(look)) is not None:
            found["flagger"] = _found(look, reason)
        if all(found.values()):
            break
    return found


def first_breach(
    traffic: Traffic, seed: int, *, seconds: int, fault: Fault | None = None, rules: Rules | None = None
) -> Found | None:
    """When the guard calls the candidate worse; None if it does not."""
    guard = Guard(rules or Rules(), Arms(CONTROL, CANDIDATE, 1 - traffic.share, traffic.share), since=0.0)
    for look in looks(traffic, seed, seconds=seconds, fault=fault):
        breach = guard.observe(look.outcomes, look.running, look.now).breach
        if breach is not None:
            return _found(look, breach.metric)
    return None


def _found(look: Look, metric: str) -> Found:
    return Found(look.num_started, look.users_met, look.now, metric)
