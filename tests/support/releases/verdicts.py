"""Runs of the guard over simulated traffic."""

from __future__ import annotations

from dataclasses import dataclass

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
