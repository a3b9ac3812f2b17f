"""Releases: which versions take the traffic of an adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas import described
from loraplex.admin.schemas.fields import PositiveCount, RequestBody, ResponseBody, Timestamp, VersionName
from loraplex.control.catalog.releases import MAX_TARGETS
from loraplex.control.types import MAX_RELEASE_WEIGHT


class Target(RequestBody):
    """`weight` is its part of the weights' sum."""

    version: VersionName
    weight: Annotated[int, Field(ge=0, le=MAX_RELEASE_WEIGHT)]


class ReleaseChange(RequestBody):
    """`targets` name each version once."""

    targets: Annotated[
        list[Target],
        Field(min_length=1, max_length=MAX_TARGETS, json_schema_extra=described.SOME_WEIGHT),
    ]
    sticky: Literal["user", "key", "none"] = "none"
    shadow: None = None
    guard: None = None
    schedule: None = None


class ReleasePromote(RequestBody):
    version: VersionName | None = None


class ReleaseRollback(RequestBody):
    """`to` is the revision to restore; without it, the release before this one."""

    to: PositiveCount | None = None


class Release(ResponseBody):
    """Which versions take the traffic of a name, in which shares. `origin` is what made the revision; a rollback
    `restores` an earlier one. `actor` and `actor_key_id` are who did. Each is null where it is not known."""

    name: str
    targets: list[Target]
    sticky: Literal["user", "key", "none"]
    revision: int
    created_at: Timestamp
    origin: Literal["upload", "set", "promote", "rollback", "delete", "step"] | None
    restores: int | None
    actor: Literal["admin", "key", "local", "guard"] | None
    actor_key_id: str | None


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
