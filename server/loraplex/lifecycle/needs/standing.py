"""Where a release that runs by itself stands: when it is likely to be decided, or why it cannot be.

All is told by the numbers that a comparison has: the course of the evidence has, for each look, the requests of the new
version and the units that were still missing until a gross fault would have been found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loraplex.lifecycle.release_guard.course import Course, Leg
from loraplex.lifecycle.releases.look import NOTED_S

Obstacle = Literal["not_looked", "no_requests", "no_progress", "too_slow", "not_passing"]
"""Why a step cannot be decided. `not_looked`: no server looks at the release, or none does any more. `no_requests`: the
new version got none. `no_progress`: requests came, and nothing that is missing. `too_slow`: what is missing comes too
slowly. `not_passing`: the units are there, and the guard holds beyond the step's time."""
GRACE_S = 900.0
"""Nothing is said of a step that is younger, or whose time is over for less."""
MISSED_S = 5 * NOTED_S
"""Time since the last look that was noted after which looks have stopped."""
STALLED_S = 3600.0
"""Time since the first look after which a step that has not come nearer to its decision makes no progress."""
SLOW_S = 2 * 86_400.0
"""A decision is too far away when it comes so long after now, and after the step's time."""
_LONGEST_S = 70 * 365 * 86_400.0
"""Most that is told of the time until a decision."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Times are in seconds since the epoch; None where they are not known."""

    obstacle: Obstacle | None
    """None: it goes on as it should."""
    needs: int | None
    """Units of both versions that are missing; None without a guard's look."""
    requests: int | None
    """Requests of the new version that ended since the step began."""
    likely_at: float | None
    """When the step is likely to be decided."""
    looked_at: float | None = None
    """When its guard last looked, to `NOTED_S` seconds, by the database's clock as `now` is."""


def standing_of(
    *,
    step: int,
    since: float,
    schedule: Sequence[Mapping[str, Any]] | None,
    has_guard: bool,
    course: bytes | None,
    now: float,
) -> Standing:
    """Judge the step that began at `since`, in seconds since the epoch as `now` is. `course` is a `Course` as JSON."""
    ends_at = None
    if schedule is not None and step < len(schedule):
        ends_at = since + schedule[step]["for_seconds"]
    if not has_guard:
        is_late = ends_at is not None and now > ends_at + GRACE_S
        return Standing("not_looked" if is_late else None, None, None, ends_at)
    leg = Course.from_json(course).leg_of(step, since)
    if leg is None:
        return Standing("not_looked" if now > since + GRACE_S else None, None, None, None)
    latest, left_s = leg.latest, _seconds_left(leg, now)
    likely_at = ends_at if latest.needs == 0 else None
    if latest.needs and left_s is not None:
        likely_at = max(now + left_s, ends_at or 0.0)
    obstacle: Obstacle | None = None
    age, looked_for = now - since, now - leg.all_points[0].at
    if abs(now - latest.at) > MISSED_S:  # a look that is ahead of the clock, which went back, is noted again
        obstacle, likely_at = "not_looked", None
    elif latest.requests == 0:
        obstacle = "no_requests" if age > GRACE_S else None
    elif latest.needs == 0:
        if ends_at is not None and now > ends_at + GRACE_S:
            obstacle, likely_at = "not_passing", None
    elif likely_at is None:
        obstacle = "no_progress" if looked_for > STALLED_S else None
    elif looked_for > STALLED_S and likely_at > max(now, ends_at or 0.0) + SLOW_S:
        obstacle = "too_slow"  # the pace of fewer looks may be that of the first request
    return Standing(obstacle, latest.needs, latest.requests, likely_at, latest.at)


def _seconds_left(leg: Leg, now: float) -> float | None:
    """Time until nothing is missing, at the pace since the first look; None where nothing came."""
    first = leg.all_points[0]
    came, passed = first.needs - leg.latest.needs, now - first.at
    # A pace may be as slow as the weights make it, and a moment has an end.
    return min(_LONGEST_S, passed * leg.latest.needs / came) if came > 0 and passed > 0 else None
