"""What rolling a release back takes and answers, and the history of releases."""

from __future__ import annotations

from loraplex.admin.schemas import Given, PositiveCount, Release, Shown


class ReleaseRollback(Given):
    """`to` is the revision to restore; without it, the release before this one."""

    to: PositiveCount | None = None


class SkippedRevision(Shown):
    """An earlier release that could not be restored, and why."""

    revision: int
    reason: str


class RolledBackRelease(Release):
    """The release that is in force now. `skipped` are those that a step back passed over, the newest first."""

    skipped: list[SkippedRevision]


class ReleasePage(Shown):
    """The newest revision first. One without targets ended the release: the name had no version left."""

    data: list[Release]
    next_cursor: str | None
