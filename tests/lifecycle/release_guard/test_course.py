"""The evidence over time: few points, however long a release runs, and none of what matters is lost."""

from __future__ import annotations

import itertools

import pytest

from loraplex.lifecycle.release_guard.course import MAX_LEGS, MAX_POINTS, Course, Point

SINCE = 1_700_000_000.0


def point(second: float, evidence: float = 1.0, requests: int = 0) -> Point:
    return Point(SINCE + second, evidence, 100.0, requests, 40)


def parts(course: Course) -> list[list[float]]:
    return [[one.part for one in leg.all_points] for leg in course.legs]


def test_each_look_is_a_point_while_there_are_few() -> None:
    course = Course()
    for second, evidence in enumerate((1, 2, 50, 30)):
        course.add(0, SINCE, point(second, evidence))
    assert parts(course) == [[0.01, 0.02, 0.5, 0.3]]


def test_looks_that_find_nothing_new_move_the_last_point_on() -> None:
    course = Course()
    for second, evidence in ((1, 5), (60, 50), (120, 50), (180, 50), (240, 30)):
        course.add(0, SINCE, point(second, evidence))
    assert [(one.at - SINCE, one.part) for one in course.legs[0].all_points] == [
        (1, 0.05),
        (60, 0.5),
        (180, 0.5),
        (240, 0.3),
    ]


def test_the_looks_of_two_guards_are_not_one_line() -> None:
    course = Course()
    course.add(0, SINCE, point(1, 60))
    course.add(0, SINCE + 5, point(6))  # a resume of the same step
    course.add(1, SINCE + 9, point(10))
    assert [(leg.step, leg.since) for leg in course.legs] == [(0, SINCE), (0, SINCE + 5), (1, SINCE + 9)]
    assert parts(course) == [[0.6], [0.01], [0.01]]


@pytest.mark.parametrize("seconds", [500, 90_000])
def test_a_long_release_keeps_its_begin_its_end_and_its_peak(seconds: int) -> None:
    course, peak = Course(), seconds // 3
    for second in range(seconds):
        course.add(0, SINCE, point(second, 90.0 if second == peak else 1 + second % 7 / 10, requests=second))
    found = course.legs[0].all_points
    assert MAX_POINTS / 3 < len(found) <= MAX_POINTS
    assert found[0].at < SINCE + 3 * seconds / MAX_POINTS
    assert found[-1] == point(seconds - 1, 1 + (seconds - 1) % 7 / 10, requests=seconds - 1)
    assert max(found, key=lambda one: one.part).at == SINCE + peak
    assert [one.at for one in found] == sorted(one.at for one in found)
    gaps = [after.at - before.at for before, after in itertools.pairwise(found)]
    assert max(gaps) <= 6 * seconds / MAX_POINTS


def test_however_often_a_release_is_resumed_it_stays_small() -> None:
    course = Course()
    for resume in range(3000):
        for second in range(3):
            course.add(0, SINCE + 10 * resume, point(10 * resume + second))
    assert sum(len(leg.all_points) for leg in course.legs) <= MAX_POINTS
    assert course.legs[-1].since == SINCE + 29_990
    assert len(course.to_json()) < 12_000
    assert Course.from_json(course.to_json()) == course


def test_the_latest_guards_keep_their_points_however_many_there_were() -> None:
    course = Course()
    for resume in range(3000):
        for second in range(3):
            course.add(0, SINCE + 10 * resume, point(10 * resume + second, requests=second))
    assert [leg.since for leg in course.legs] == [SINCE + 10 * resume for resume in range(3000)][-MAX_LEGS:]
    assert {len(leg.all_points) for leg in course.legs} == {3}


def test_a_clock_that_goes_back_is_borne() -> None:
    course = Course()
    for second in (5, 4, -3, 6):
        course.add(0, SINCE, point(second))
    assert Course.from_json(course.to_json()) == course
    assert course.legs[0].latest == point(6)


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\xff",
        b"[]",
        b'{"points": []}',
        b'{"legs": [{"step": 0, "since": 1e300, "latest": [1, 1, 1, 1, 1]}]}',
        b'{"legs": [{"step": 0, "since": 1, "latest": [1, 1, 0, 1, 1]}]}',
        b'{"legs": [{"step": 0, "since": 1, "latest": [1, null, 1, 1, 1]}]}',
        b'{"legs": [], "every_s": 0}',
    ],
)
def test_what_is_no_course_is_an_empty_one(data: bytes | None) -> None:
    assert Course.from_json(data) == Course()
