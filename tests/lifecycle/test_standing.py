"""Where a release stands by the looks of its guard, with the time of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from loraplex.lifecycle.needs.standing import MISSED_S, STALLED_S, standing_of
from loraplex.lifecycle.release_guard.course import Course, Point

HOUR_S = 3600.0


def course_of(looks: Sequence[tuple[float, int, int]]) -> bytes:
    """The course of looks: seconds since the step began at 0, requests of the new version, units that are missing."""
    course = Course(every_s=2.0**15)
    for at, requests, missing in looks:
        course.add(0, 0.0, Point(at, evidence=0.1, threshold=1.0, requests=requests, needs=missing))
    return course.to_json()


def obstacle_at(
    now: float, looks: Sequence[tuple[float, int, int]], steps_s: float | None = None
) -> str | None:
    """The obstacle at `now`, at which the guard looks again and finds nothing new."""
    return obstacle_after([*looks, (now, *looks[-1][1:])], now, steps_s)


def obstacle_after(
    looks: Sequence[tuple[float, int, int]], now: float, steps_s: float | None = None
) -> str | None:
    schedule = None if steps_s is None else [{"weight": 10, "for_seconds": steps_s}]
    return standing_of(
        step=0, since=0.0, schedule=schedule, has_guard=True, course=course_of(looks), now=now
    ).obstacle


@pytest.mark.parametrize(("needs", "steps_s"), [(500, None), (0, None), (0, HOUR_S)])
def test_looks_that_stop_are_told(needs: int, steps_s: float | None) -> None:
    looks = [(5.0, 10, needs), (2 * HOUR_S, 20, needs)]
    assert obstacle_after(looks, 2 * HOUR_S + MISSED_S, steps_s) != "not_looked"
    assert obstacle_after(looks, 2 * HOUR_S + MISSED_S + 1, steps_s) == "not_looked"


def test_a_clock_that_went_back_hides_no_look_that_is_missing() -> None:
    """Looks that go on are noted by the clock as it is now."""
    assert obstacle_after([(5.0, 10, 500), (9 * HOUR_S, 20, 500)], HOUR_S / 2) == "not_looked"


@pytest.mark.parametrize(("now", "expected"), [(320.0, None), (STALLED_S + 320.0, "too_slow")])
def test_a_pace_is_told_after_an_hour_of_looks(now: float, expected: str | None) -> None:
    """A new guard of a small share has seen one unit of hundreds that it needs."""
    assert obstacle_at(now, [(5.0, 1, 800), (300.0, 2, 799)], steps_s=HOUR_S) == expected


def test_the_slowest_pace_ends_at_a_moment() -> None:
    """Callers who keep their version, at a weight of one in a million: thousands of years."""
    looks = [(5.0, 1, 10**9), (9 * HOUR_S, 2, 10**9 - 1)]
    standing = standing_of(
        step=0, since=0.0, schedule=None, has_guard=True, course=course_of(looks), now=9 * HOUR_S
    )
    assert standing.obstacle == "too_slow"
    assert standing.likely_at is not None
    assert datetime.fromtimestamp(standing.likely_at, UTC).year < 2100


def test_a_first_look_that_is_late_is_no_lack_of_progress() -> None:
    looks = [(2 * HOUR_S, 5, 500), (2 * HOUR_S + 5, 6, 500)]
    assert obstacle_at(2 * HOUR_S + 10, looks) is None
    assert obstacle_at(3 * HOUR_S + 10, looks) == "no_progress"


def test_the_pace_is_that_since_the_first_look() -> None:
    """Half of what is missing came within two hours, and nothing with the last looks. One point stands for hours."""
    looks = [(60.0 * number, number, 1000 - 5 * min(number, 100)) for number in range(1, 121)]
    assert obstacle_at(120 * 60.0 + 1, looks) is None


@pytest.mark.parametrize("every_s", [1.0, 2.0**15])
def test_the_first_look_stays_however_many_come(every_s: float) -> None:
    """The evidence rises with each look, and what is missing shrinks with the first ten alone."""
    course = Course(every_s=every_s)
    for number in range(1, 201):
        missing = 1000 - 5 * min(number, 10)
        point = Point(600.0 * number, evidence=0.001 * number, threshold=1.0, requests=number, needs=missing)
        course.add(0, 0.0, point)
    first = Course.from_json(course.to_json()).legs[-1].all_points[0]
    assert (first.at, first.needs) == (600.0, 995)
