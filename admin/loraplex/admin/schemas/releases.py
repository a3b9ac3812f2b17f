"""Releases: which versions take the traffic of an adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import PositiveCount, RequestBody, ResponseBody, Timestamp, VersionName
from loraplex.admin.schemas.release_plan import (
    GivenGuard,
    GivenSchedule,
    ReleaseGuard,
    Run,
    ScheduleStep,
    Shadow,
)
from loraplex.control.catalog.releases import MAX_TARGETS
from loraplex.control.release_types import MAX_RELEASE_WEIGHT


class Target(RequestBody):
    """`weight` is its part of the weights' sum."""

    version: VersionName
    weight: Annotated[int, Field(ge=0, le=MAX_RELEASE_WEIGHT)]


class ReleaseChange(RequestBody):
    """`targets` name each version once. With a `schedule`, the newest of them gets its steps' percent, and the others
    share the rest by their weights. A `guard` goes back to the release before where the newest is worse. A `shadow`
    answers a share of the requests too, unseen."""

    targets: Annotated[
        list[Target],
        Field(min_length=1, max_length=MAX_TARGETS, json_schema_extra=described.SOME_WEIGHT),
    ]
    sticky: Literal["user", "key", "none"] = "none"
    shadow: Shadow | None = None
    guard: GivenGuard = None
    schedule: GivenSchedule = None


class ReleasePromote(RequestBody):
    version: VersionName | None = None


class ReleaseRollback(RequestBody):
    """`to` is the revision to restore; without it, the release before this one."""

    to: PositiveCount | None = None


class Release(ResponseBody):
    """Which versions take the traffic of a name, in which shares. `origin` is what made the revision; a rollback
    `restores` an earlier one, a step is of the schedule that revision `began` began. `actor` and `actor_key_id` are
    who did. Each is null where it is not known. `run` is null where no guard or schedule was given; `reason` says why
    the guard went back."""

    name: str
    targets: list[Target]
    sticky: Literal["user", "key", "none"]
    revision: int
    created_at: Timestamp
    origin: Literal["upload", "set", "promote", "rollback", "delete", "step"] | None
    restores: int | None
    actor: Literal["admin", "key", "local", "guard"] | None
    actor_key_id: str | None
    guard: ReleaseGuard | None
    schedule: list[ScheduleStep] | None
    shadow: Shadow | None
    began: int | None
    reason: str | None
    run: Run | None


class SkippedRevision(ResponseBody):
    """An earlier release that could not be restored, and why."""

    revision: int
    reason: str


class RolledBackRelease(Release):
    """The release that is in force now. `skipped` are those that a step back passed over, the newest first."""

    skipped: list[SkippedRevision]


class ReleasePage(ResponseBody):
    """The newest revision first. One without targets ended the release: the name had no version left."""

    data: list[Release]
    next_cursor: str | None
