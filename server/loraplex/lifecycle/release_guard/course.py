"""The course of a release's evidence: what the guards of its steps found, as few points over the whole of its time.

A point is a look that changed the evidence, or the last of those that left it as it was. Of the looks that fall into
one stretch of `every_s` seconds, the one that came nearest to its threshold is kept, and of each guard its latest look
too. Where the points are more than `MAX_POINTS`, stretches become twice as long: a release of an hour and one of a
month have about as many. The legs of the latest `MAX_LEGS` guards are kept: longer stretches leave as many legs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_POINTS = 120
MAX_LEGS = 30
FIRST_EVERY_S, MAX_EVERY_S = 1.0, 2.0**20
_LATEST = 2.0**37
"""A time that no clock shows, thousands of years ahead."""
_Moment = Annotated[float, msgspec.Meta(ge=0, lt=_LATEST)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Point(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The findings of one look, at `at` in seconds since the epoch. `evidence` and `threshold` are those of the guard's
    verdict, `requests` counts the candidate's, and `needs` the units that were missing."""

    at: _Moment
    evidence: Annotated[float, msgspec.Meta(ge=0)]
    threshold: Annotated[float, msgspec.Meta(gt=0)]
    requests: _Count
    needs: _Count

    @property
    def part(self) -> float:
        """The evidence as a part of its threshold: at 1 the release goes back."""
        return self.evidence / self.threshold

    def same_as(self, other: Point) -> bool:
        """Whether both looks found the same."""
        return msgspec.structs.replace(other, at=self.at) == self


class Leg(msgspec.Struct, forbid_unknown_fields=True):
    """The looks of one guard: of the schedule's step `step`, from `since` on, in seconds since the epoch. A resume
    begins another one. `points` are those before the `latest`."""

    step: int
    since: _Moment
    latest: Point
    points: list[Point] = []

    @property
    def all_points(self) -> list[Point]:
        """All points, in the order in which they came."""
        return [*self.points, self.latest]


class Course(msgspec.Struct, forbid_unknown_fields=True):
    """The legs of a release, the first one first. Of each `every_s` seconds one point is kept."""

    legs: list[Leg] = []
    every_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_EVERY_S)] = FIRST_EVERY_S

    @classmethod
    def from_json(cls, data: bytes | None) -> Course:
        """The course that `to_json` wrote; an empty one for None, and for one of another form."""
        if data is None:
            return cls()
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def last_look(self, step: int, since: float) -> float | None:
        """When the guard of step `step`, which began at `since`, last looked; None before its first look."""
        leg = self.leg_of(step, since)
        return None if leg is None else leg.latest.at

    def leg_of(self, step: int, since: float) -> Leg | None:
        """The looks of the guard that looked last, if it is that of step `step`, which began at `since`."""
        last = self.legs[-1] if self.legs else None
        return last if last is not None and (last.step, last.since) == (step, since) else None

    def add(self, step: int, since: float, point: Point) -> None:
        """Take a look of the guard of step `step`, which began at `since`."""
        last = self.leg_of(step, since)
        if last is None:
            self.legs.append(Leg(step, since, point))
        else:
            if not (last.points and last.points[-1].same_as(last.latest) and last.latest.same_as(point)):
                last.points = _kept([*last.points, last.latest], since, self.every_s)
            last.latest = point
        self._bound()

    def _bound(self) -> None:
        del self.legs[:-MAX_LEGS]
        if self._count() > MAX_POINTS:
            self.every_s = min(2 * self.every_s, MAX_EVERY_S)
            for leg in self.legs:
                leg.points = _kept(leg.points, leg.since, self.every_s)
        while self._count() > MAX_POINTS:  # of the oldest, less and less, its first point last
            oldest = self.legs[0]
            if oldest.points:
                del oldest.points[min(1, len(oldest.points) - 1)]
            else:
                del self.legs[0]

    def _count(self) -> int:
        return sum(len(leg.points) + 1 for leg in self.legs)


def _kept(points: list[Point], since: float, every_s: float) -> list[Point]:
    """The first point, from which the pace is told, and for each stretch of time the one that is nearest to its
    threshold."""
    found: list[Point] = []
    stretch: float | None = None
    for point in points:
        its_own = (point.at - since) // every_s
        if its_own != stretch or len(found) == 1:
            found.append(point)
        elif point.part > found[-1].part:
            found[-1] = point
        stretch = its_own
    return found
