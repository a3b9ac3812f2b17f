"""Adapters of all tenants in one list, with what was asked of them lately. The database filters by tenant, name, state
and base, and sums up the requests; the rest is done here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, Text, and_, cast, false, func, select, tuple_
from sqlalchemy.orm import Session, aliased

from loraplex.control import rules
from loraplex.control.adapter_tags import tags_of
from loraplex.control.catalog.release_reading import release_info
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import LIVING, AdapterTag, AdapterVersion, Release
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page
from loraplex.control.usage.overview_figures import AskedOfAdapters, Key, Sums

Sort = Literal["name", "requests", "errors", "tokens", "first_token", "last_used", "bytes", "created"]
"""Orders of the list; the names of tenants and adapters decide between equals."""
ReleaseFilter = Literal["none", "released", "running", "paused"]
BaseFilter = Literal["served", "other"]
_TIMES = ("last_used", "created")
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS = ("requests", "errors", "tokens")


@dataclass(frozen=True, slots=True)
class OverviewFilter:
    """The adapters that are listed; None: of any kind."""

    tenant: str | None = None
    state: str | None = None
    """Names whose newest living version, or one that takes traffic, has this state and was made for this base."""
    release: ReleaseFilter | None = None
    base: BaseFilter | None = None
    search: str | None = None
    """A part of the name."""
    tag: str | None = None
    """One of the name's tags."""
    min_errors: int = 0
    """Names with at least this number of errors since the time asked for."""
    min_error_rate: float = 0.0
    """Names of whose requests at least this part failed, from 0 to 1; above 0, one without requests is left out."""


@dataclass(frozen=True, slots=True)
class TargetSummary:
    """A version that takes traffic, and its state."""

    version: str
    weight: int
    state: str


@dataclass(frozen=True, slots=True)
class Summary:
    """One adapter."""

    tenant_id: str
    name: str
    newest: int
    """The number of the newest living version."""
    state: str
    """The state of that version."""
    digest: str
    """The digest of its bytes."""
    base_fingerprint: str
    created_at: datetime
    """When that version was made."""
    num_versions: int
    """The living versions; `bytes` is the size of their files, `pinned` counts those that are pinned."""
    bytes: int
    pinned: int
    targets: tuple[TargetSummary, ...]
    """The versions that take the name's traffic."""
    run: str | None
    """The status of the release's guard or schedule, while it is the one in force."""
    requests: int
    """The requests that ended since the time asked for; `errors` counts those that failed by the server's doing."""
    errors: int
    tokens: int
    """Tokens of their prompts and answers."""
    first_token_s: float | None
    """The median time to the first token, in seconds; None where none came."""
    last_used_at: datetime | None
    """When the last of these requests ended."""
    tags: tuple[str, ...]
    """The name's tags, in order."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all adapters that the filter lets through: adapters by the state of their newest version, the bytes of
    their versions, and what was asked of them."""

    states: dict[str, int]
    bytes: int
    requests: int
    errors: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Overview:
    page: Page[Summary]
    totals: Totals


class Overviews:
    """Reads with a number of plain statements that does not grow with the adapters. The joins and the sorting are done
    here: planners expect few groups and choose nested loops."""

    def __init__(
        self, database: Database, base_fingerprint: str, asked: AskedOfAdapters | None = None
    ) -> None:
        self._database = database
        self._base = base_fingerprint
        self._asked = asked or AskedOfAdapters(database)

    def read(
        self,
        chosen: OverviewFilter,
        *,
        since: datetime | None,
        sort: Sort = "name",
        descending: bool = False,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> Overview:
        """One page, and the sums over all pages. What was asked counts from `since` on, at most a day ago; None:
        nothing counts, and the ledger is not read. Raises InvalidCursor, DatabaseUnavailable, DatabaseBusy."""
        rules.check_page_limit(limit)
        after = None if cursor is None else _read_place(cursor, sort)
        with self._database.read(report=True) as session:
            rows = self._chosen(session, chosen)
            figures = None if since is None else self._asked.since(session, since)
            used = {} if figures is None else figures.sums()
            if chosen.min_errors or chosen.min_error_rate:
                rows = [row for row in rows if _fails(chosen, used.get(row.key))]
            medians: dict[Key, float] = {}
            if figures is not None and sort == "first_token":
                medians = figures.medians()

            def place_of(row: _Living) -> tuple[Any, ...]:
                key = row.key
                return key if sort == "name" else (_value(sort, row, used.get(key), medians.get(key)), *key)

            placed = sorted(((place_of(row), row) for row in rows), key=itemgetter(0), reverse=descending)
            if after is not None:
                placed = [one for one in placed if (one[0] < after if descending else one[0] > after)]
            found = placed[: limit + 1]
            shown = {row.key for _, row in found[:limit]}
            releases, tags = _releases(session, shown), tags_of(session, shown)
            if figures is not None and sort != "first_token":
                medians = figures.medians(shown)

        def show(one: tuple[Any, _Living]) -> Summary:
            key = one[1].key
            return _show(
                one[1], used.get(key), releases.get(key, ((), None)), medians.get(key), tags.get(key, ())
            )

        def cursor_of(one: tuple[Any, _Living]) -> str:
            return json.dumps(one[0], default=datetime.isoformat)

        return Overview(rules.make_page(found, limit, cursor_of, show), _totals(rows, used))

    def _chosen(self, session: Session, chosen: OverviewFilter) -> list[_Living]:
        """The names that every filter but those of errors lets through."""
        version, wanted = AdapterVersion, list[ColumnElement[bool]]()
        if chosen.state is not None:
            wanted.append(version.state == chosen.state)
        if chosen.base is not None:
            of_base = version.base_fingerprint == self._base
            wanted.append(of_base if chosen.base == "served" else ~of_base)
        if wanted and chosen.tenant is not None:
            wanted.append(version.tenant_id == chosen.tenant)
        rows = list(_living(session, chosen, wanted))
        if wanted and any(row.newest not in row.matching for row in rows):
            targets = _targets(session, wanted)
            rows = [
                row
                for row in rows
                if row.newest in row.matching
                or any(f"v{number}" in targets.get(row.key, ()) for number in row.matching)
            ]
        if chosen.release is not None:
            names = _released(session, chosen.release)
            rows = [row for row in rows if (row.key in names) == (chosen.release != "none")]
        return rows


@dataclass(slots=True)
class _Living:
    """A name's living versions; fields as in `Summary`. `matching`: the versions of the state and base that are
    filtered by, none without such a filter."""

    tenant_id: str
    name: str
    newest: int = 0
    state: str = ""
    digest: str = ""
    base_fingerprint: str = ""
    created_at: datetime = _NEVER
    num_versions: int = 0
    bytes: int = 0
    pinned: int = 0
    matching: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.tenant_id, self.name


def _names_with(wanted: Sequence[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
    """The names that have a living version like that."""
    return select(AdapterVersion.tenant_id, AdapterVersion.name).where(LIVING, *wanted).correlate(None)


def _living(
    session: Session, chosen: OverviewFilter, wanted: Sequence[ColumnElement[bool]]
) -> Iterable[_Living]:
    """The names that have a living version like `wanted`, each with all its living versions."""
    version = AdapterVersion
    query = select(
        version.tenant_id, version.name, version.number, version.state, version.digest,
        version.base_fingerprint, version.created_at, version.bytes, version.pinned,
        (and_(*wanted) if wanted else false()).label("matches"),
    ).where(LIVING)  # fmt: skip
    if wanted:
        query = query.where(tuple_(version.tenant_id, version.name).in_(_names_with(wanted)))
    if chosen.tenant is not None:
        query = query.where(version.tenant_id == chosen.tenant)
    if chosen.search is not None:
        query = query.where(version.name.contains(chosen.search, autoescape=True))
    if chosen.tag is not None:
        tagged = select(AdapterTag.tenant_id, AdapterTag.name).where(AdapterTag.tag == chosen.tag)
        query = query.where(tuple_(version.tenant_id, version.name).in_(tagged))
    found: dict[Key, _Living] = {}
    for tenant, name, number, state, digest, base, created_at, size, pinned, matches in session.execute(
        query
    ):
        if (row := found.get((tenant, name))) is None:
            row = found[tenant, name] = _Living(tenant, name)
        if number > row.newest:
            row.newest, row.state, row.digest, row.base_fingerprint = number, state, digest, base
            row.created_at = created_at
        row.num_versions += 1
        row.bytes += size
        row.pinned += pinned
        if matches:
            row.matching += (number,)
    return found.values()


def _in_force() -> ColumnElement[bool]:
    """Whether a release is the newest of its name."""
    release, other = Release, aliased(Release)
    # SQLite looks the newest revision up in the key's index; it would scan a grouped subquery for each name.
    newest = select(func.max(other.revision)).where(
        other.tenant_id == release.tenant_id, other.name == release.name
    )
    return release.revision == newest.correlate(release).scalar_subquery()


def _targets(session: Session, wanted: Sequence[ColumnElement[bool]]) -> dict[Key, set[str]]:
    """The versions that take traffic, of the names that have a living version like that."""
    release = Release
    named = tuple_(release.tenant_id, release.name).in_(_names_with(wanted))
    query = select(release.tenant_id, release.name, release.targets).where(_in_force(), named)
    return {
        (tenant, name): {target["version"] for target in targets}
        for tenant, name, targets in session.execute(query)
    }


def _released(session: Session, chosen: ReleaseFilter) -> set[Key]:
    """The names whose release in force has targets, or a guard or schedule in this state. A name whose last version was
    deleted has a release without targets."""
    release, run = Release, ReleaseRun
    query = select(release.tenant_id, release.name).where(_in_force())
    if chosen in ("none", "released"):
        query = query.where(cast(release.targets, Text) != "[]")
    else:
        own = (run.tenant_id == release.tenant_id) & (run.name == release.name)
        query = query.join(run, own & (run.revision == release.revision)).where(run.status == chosen)
    return {(tenant, name) for tenant, name in session.execute(query)}


def _fails(chosen: OverviewFilter, used: Sums | None) -> bool:
    return (
        used is not None
        and used.errors >= chosen.min_errors
        and used.errors / used.requests >= chosen.min_error_rate
    )


def _value(sort: Sort, row: _Living, used: Sums | None, first_token_s: float | None) -> Any:
    """The value that the list is sorted by; a name without requests counts as last used at the beginning of time."""
    if sort == "first_token":
        return first_token_s or 0.0
    if sort == "last_used":
        return _NEVER if used is None else used.last_used_at
    if sort in _COUNTS:
        return 0 if used is None else getattr(used, sort)
    return row.created_at if sort == "created" else row.bytes


def _releases(session: Session, names: set[Key]) -> dict[Key, tuple[tuple[TargetSummary, ...], str | None]]:
    """The targets of the release in force with their states, and the status of its guard or schedule."""
    if not names:
        return {}
    place = (Release.tenant_id, Release.name)
    last = (
        select(*place, func.max(Release.revision)).where(tuple_(*place).in_(sorted(names))).group_by(*place)
    )
    run = ReleaseRun
    own = (run.tenant_id == Release.tenant_id) & (run.name == Release.name)
    query = (
        select(Release, run.status)
        .outerjoin(run, own & (run.revision == Release.revision))
        .where(tuple_(*place, Release.revision).in_(last))
    )
    found = session.execute(query).all()
    version = AdapterVersion
    named = tuple_(version.tenant_id, version.name).in_(sorted(names))
    living = select(version.tenant_id, version.name, version.number, version.state).where(LIVING, named)
    states = {(tenant, name, f"v{number}"): state for tenant, name, number, state in session.execute(living)}

    def targets(row: Release) -> Iterable[TargetSummary]:
        for target in release_info(row).targets:
            # One that was deleted since the first statement is left out.
            if state := states.get((row.tenant_id, row.name, target.version)):
                yield TargetSummary(target.version, target.weight, state)

    return {(row.tenant_id, row.name): (tuple(targets(row)), status) for row, status in found}


def _totals(rows: Sequence[_Living], used: dict[Key, Sums]) -> Totals:
    states = Counter(row.state for row in rows)
    counted = [one for row in rows if (one := used.get((row.tenant_id, row.name)))]
    requests, errors, tokens = (sum(getattr(one, name) for one in counted) for name in _COUNTS)
    return Totals(dict(sorted(states.items())), sum(row.bytes for row in rows), requests, errors, tokens)


def _read_place(cursor: str, sort: Sort) -> tuple[Any, ...]:
    """The last adapter of the page before: the value that the list is sorted by, the tenant, the name."""
    wrong = InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    try:
        place = json.loads(rules.read_cursor(cursor) or "")
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(place, list) or len(place) != (2 if sort == "name" else 3):
        raise wrong
    first, names = place[:-2], place[-2:]
    if not all(isinstance(name, str) and name.isprintable() for name in names):
        raise wrong
    return (*(_read_value(value, sort, wrong) for value in first), *names)


def _read_value(value: object, sort: Sort, wrong: InvalidCursor) -> datetime | float | int:
    if sort in _TIMES and isinstance(value, str):
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            raise wrong from None
    if sort == "first_token" and isinstance(value, float) and math.isfinite(value):
        return value
    if sort not in (*_TIMES, "first_token") and type(value) is int:
        return value
    raise wrong


def _show(
    row: _Living,
    used: Sums | None,
    release: tuple[tuple[TargetSummary, ...], str | None],
    first_token_s: float | None,
    tags: tuple[str, ...],
) -> Summary:
    targets, run = release
    return Summary(
        tenant_id=row.tenant_id,
        name=row.name,
        newest=row.newest,
        state=row.state,
        digest=row.digest,
        base_fingerprint=row.base_fingerprint,
        created_at=row.created_at,
        num_versions=row.num_versions,
        bytes=row.bytes,
        pinned=row.pinned,
        targets=targets,
        run=run,
        requests=0 if used is None else used.requests,
        errors=0 if used is None else used.errors,
        tokens=0 if used is None else used.tokens,
        first_token_s=first_token_s,
        last_used_at=None if used is None else used.last_used_at,
        tags=tags,
    )
