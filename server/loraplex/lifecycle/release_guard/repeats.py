"""Requests of users beyond their first one, where users are few.

The means over a user's first `NUM_REQUESTS` are one number to each metric: still one of each user, since a user has one
arm, but a number that tells more. They are compared as first requests are, with a part of the allowed false alarms of
their own: the same users and the same arms must not count twice.

A rate's mean x becomes min(1, scale x), and its margin grows by the same scale. Where x0 and x1 are means under control
and candidate and x1 <= x0 + margin in expectation, the stretched numbers differ by scale * margin at most. So half of a
user's answers are as clear a sign as all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.control.usage.outcome import Outcome
from loraplex.lifecycle.release_guard.groups import Arms, Groups, GroupsState, Row
from loraplex.lifecycle.release_guard.rules import METRICS, MetricName, Rules
from loraplex.lifecycle.release_guard.window import numbers_of

NUM_REQUESTS = 5
MAX_USERS = 256
"""Users that are followed: the first ones. With more of them, first requests tell enough."""
_STRETCHED_MARGIN = 0.1
"""Margin up to which a rate is stretched; a wider one would hide what it is to show."""
_KEY_MASK = 2**32 - 1


class User(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A user's requests so far. `sums`: count and sum of each metric's numbers, empty once the user was compared."""

    key: int
    is_candidate: bool
    requests: int = 0
    sums: dict[MetricName, tuple[int, float]] = {}


class RepeatsState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `Repeats` as JSON."""

    groups: GroupsState
    users: list[User] = []


class Repeats:
    """A test that takes users' means and gives evidence. `part` is its part of the allowed false alarms."""

    def __init__(self, rules: Rules, arms: Arms, state: RepeatsState, part: float) -> None:
        self._arms = arms
        self._scales = {name: _scale(name, margin) for name, margin in rules.margins.items()}
        self._users = {user.key: user for user in state.users}
        self.groups = Groups(_stretched(rules), arms, state.groups, part)

    @classmethod
    def start(cls, rules: Rules, arms: Arms, part: float) -> Repeats:
        """Begin without evidence."""
        return cls(rules, arms, RepeatsState(GroupsState.start(_stretched(rules))), part)

    def state(self) -> RepeatsState:
        return RepeatsState(self.groups.state, list(self._users.values()))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take ended requests of the two arms that began with the guard or later."""
        for outcome in outcomes:
            key = outcome.key_hash & _KEY_MASK
            user = self._users.get(key)
            if user is None:
                if len(self._users) >= MAX_USERS:
                    continue
                user = self._users[key] = User(key, outcome.version == self._arms.candidate)
            if user.requests < NUM_REQUESTS:
                self._count(user, numbers_of(outcome), outcome.ended_at)
        self.groups.settle()

    def _count(self, user: User, numbers: dict[MetricName, float], at: float) -> None:
        if not numbers:
            return
        user.requests += 1
        for name in self._scales.keys() & numbers.keys():
            count, total = user.sums.get(name, (0, 0.0))
            user.sums[name] = (count + 1, total + numbers[name])
        if user.requests == NUM_REQUESTS:
            means = {
                name: min(1.0, self._scales[name] * total / count) if METRICS[name].is_rate else total / count
                for name, (count, total) in user.sums.items()
                if 2 * count >= NUM_REQUESTS
            }
            user.sums = {}
            self.groups.add(Row(user.key, user.is_candidate, at, means))


def _scale(name: MetricName, margin: float) -> float:
    if not METRICS[name].is_rate:
        return 1.0
    return max(1.0, min(float(NUM_REQUESTS), _STRETCHED_MARGIN / max(margin, 1e-9)))


def _stretched(rules: Rules) -> Rules:
    margins = {name: _scale(name, margin) * margin for name, margin in rules.margins.items()}
    return msgspec.structs.replace(rules, margins=margins)


def problem_of(state: RepeatsState) -> str | None:
    """Say what is wrong with a state whose types are right; None if nothing is."""
    return "it follows too many users" if len(state.users) > MAX_USERS else None
