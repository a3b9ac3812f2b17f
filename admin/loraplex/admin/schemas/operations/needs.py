"""Rows that an operator has to look at."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loraplex.admin.schemas.fields import ResponseBody, Timestamp
from loraplex.lifecycle.needs.standing import Obstacle

Fraction = Annotated[float, Field(ge=0, le=1)]


class LeftOut(ResponseBody):
    """A tenant, and how many of its rows are left out."""

    tenant_id: str
    count: int


class RunningRelease(ResponseBody):
    """A release with a guard or a schedule, in a step that began at `since`: `version` has `share` of the traffic. It
    is null where there is no such thing: `step` (from 0) without a schedule; `verdict`, `advice`, `needs` and
    `requests` before a guard's first look, `looked_at` too and without a guard; `likely_at` where nothing tells it.
    `looked_at`: when its guard last looked, to a minute. `needs` units are
    missing until a gross fault of the new version would have been found. `likely_at`: when the step is likely to be
    decided, at the pace so far. `obstacle`: why it cannot be: no server looks at it, or none has for five minutes
    (`not_looked`), the new version got no requests (`no_requests`), requests came and nothing that is missing
    (`no_progress`), that comes too slowly (`too_slow`), or nothing is missing and the guard still holds
    (`not_passing`)."""

    tenant_id: str
    name: str
    version: str
    since: Timestamp
    share: Fraction
    step: int | None
    steps: int
    unit: Literal["user", "key", "request"]
    verdict: Literal["hold", "pass", "breach"] | None
    advice: str | None
    needs: int | None
    requests: int | None
    likely_at: Timestamp | None
    looked_at: Timestamp | None
    obstacle: Obstacle | None


class RunningReleases(ResponseBody):
    """Rows of the tenants in turn. `total` counts all; `more`: what is left out, of the ten tenants with the most."""

    data: list[RunningRelease]
    total: int
    more: list[LeftOut]


class RunningShadow(ResponseBody):
    """A release whose shadow `version` answers `share` of the requests too. `samples` were compared."""

    tenant_id: str
    name: str
    version: str
    since: Timestamp
    share: Fraction
    samples: int


class RunningShadows(ResponseBody):
    """Rows and counts as in `RunningReleases`."""

    data: list[RunningShadow]
    total: int
    more: list[LeftOut]


class ThrashingAdapter(ResponseBody):
    """A version that came again and again within the last hour: `loads` from the disk, and `copies` to the device.
    Fewer than 12 are 0. `others` are versions of the tenant with the same files, `elsewhere` those of other tenants;
    `pinned`: one of them all is. A version that a release in force names comes before others."""

    tenant_id: str
    name: str
    version: str
    pinned: bool
    others: int
    elsewhere: int
    loads: int
    copies: int


class ThrashingAdapters(ResponseBody):
    """Rows and counts as in `RunningReleases`."""

    data: list[ThrashingAdapter]
    total: int
    more: list[LeftOut]


class ShortDisk(ResponseBody):
    """A disk of the server that answered, with less `free` than the `wanted` bytes, or one that cannot be reached:
    `error` says why, and `free` and `size` are null then. `holds` says what is there: the database and the usage
    journal (`data`), `adapters`, or prefixes of the KV cache (`prefixes`)."""

    holds: Literal["data", "adapters", "prefixes"]
    path: str
    free: int | None
    wanted: int
    size: int | None
    error: str | None


class Disks(ResponseBody):
    """`node`: the machine of the server that answered. `prefixes_off`: engines whose disk for prefixes fails or is too
    slow, so that they leave it alone for now."""

    node: str
    data: list[ShortDisk]
    prefixes_off: int


class EndingKey(ResponseBody):
    """A key that was used within the last week."""

    id: str
    name: str | None
    expires_at: Timestamp
    last_used_at: Timestamp


class EndingKeys(ResponseBody):
    """A tenant with keys that end within a week, or ended within the last day: the first three of `count`, those that
    ended last. Keys whose whole life is a week or less, and keys of suspended tenants, are left out."""

    tenant_id: str
    count: int
    keys: list[EndingKey]


class TenantsWithEndingKeys(ResponseBody):
    """`total` counts the tenants."""

    data: list[EndingKeys]
    total: int


class Notice(ResponseBody):
    """The newest act on an adapter or a version of it, of the last day. `version` is null where none was made, `code`
    that of a refusal."""

    tenant_id: str
    name: str
    version: str | None
    time: Timestamp
    code: str | None


class Notices(ResponseBody):
    """Rows and counts as in `RunningReleases`."""

    data: list[Notice]
    total: int
    more: list[LeftOut]


class Needs(ResponseBody):
    """Rows of the last day and of now, at most 20 of each kind."""

    running: RunningReleases
    """Releases that go on as they should."""
    undecided: RunningReleases
    """Releases with an obstacle."""
    unread_releases: int
    """Releases that run and were not judged: of more than 500, the tenants in turn, those whose step began last."""
    shadows: RunningShadows
    thrashing: ThrashingAdapters
    disks: Disks
    ending_keys: TenantsWithEndingKeys
    rolled_back: Notices
    failed_checks: Notices
    refused_uploads: Notices
