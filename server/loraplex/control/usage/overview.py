"""Adapters of all tenants in one list, with what was asked of them lately. The database filters, sorts and counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    Subquery,
    Text,
    case,
    cast,
    func,
    literal,
    select,
    tuple_,
)
from sqlalchemy.orm import Session, aliased

from loraplex.control import rules
from loraplex.control.catalog.release_reading import release_info
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import LIVING, AdapterVersion, Release, Usage, UtcDateTime
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page
from loraplex.control.usage.outcome import FAILURES

Sort = Literal["name", "requests", "errors", "tokens", "first_token", "last_used", "bytes", "created"]
"""Orders of the list; the names of tenants and adapters decide between equals."""
ReleaseFilter = Literal["none", "released", "running", "paused"]
BaseFilter = Literal["served", "other"]
Key = tuple[str, str]
"""A tenant and a name."""
_TIMES = ("last_used", "created")
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS = ("requests", "errors", "tokens")


@dataclass(frozen=True, slots=True)
class OverviewFilter:
    """The adapters that are listed; None: of any kind. `state` is of the newest living version, `base` says whether it
    was made for the base that is served, `search` is a part of the name."""

    tenant: str | None = None
    state: str | None = None
    release: ReleaseFilter | None = None
    base: BaseFilter | None = None
    search: str | None = None


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
    targets: tuple[ReleaseTarget, ...]
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
    """Reads with at most four statements, however many adapters there are."""

    def __init__(self, database: Database, base_fingerprint: str) -> None:
        self._database = database
        self._base = base_fingerprint

    def read(
        self,
        chosen: OverviewFilter,
        *,
        since: datetime,
        sort: Sort = "name",
        descending: bool = False,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> Overview:
        """One page, and the sums over all pages. What was asked counts from `since` on. Raises InvalidCursor,
        DatabaseUnavailable, DatabaseBusy."""
        rules.check_page_limit(limit)
        rows = self._rows(chosen, since, sort == "first_token")
        by = [*([rows.c[sort]] if sort != "name" else []), rows.c.tenant_id, rows.c.name]
        query = select(rows)
        if cursor is not None:
            place = tuple_(*_read_place(cursor, sort))
            query = query.where(tuple_(*by) < place if descending else tuple_(*by) > place)
        order = [column.desc() if descending else column for column in by]
        with self._database.read(report=True) as session:
            found = session.execute(query.order_by(*order).limit(limit + 1)).mappings().all()
            totals = _totals(session, rows)
            shown = {(row["tenant_id"], row["name"]) for row in found[:limit]}
            targets = _targets(session, shown)
            medians = _medians(session, shown, since)

        def place_of(row: Any) -> str:
            return json.dumps([row[column.name] for column in by], default=datetime.isoformat)

        def show(row: Any) -> Summary:
            key = (row["tenant_id"], row["name"])
            return _show(row, targets.get(key, ()), medians.get(key))

        return Overview(rules.make_page(found, limit, place_of, show), totals)

    def _rows(self, chosen: OverviewFilter, since: datetime, with_medians: bool) -> Subquery:
        """A row for each adapter that the filter lets through."""
        version, release, run = AdapterVersion, Release, ReleaseRun
        living, used = _living(chosen.tenant), _used(chosen.tenant, since)
        query = (
            select(
                living,
                version.state,
                version.digest,
                version.base_fingerprint,
                version.created_at.label("created"),
                case((run.revision == release.revision, run.status)).label("run"),
                *(func.coalesce(used.c[name], 0).label(name) for name in _COUNTS),
                used.c.last_used_at,
                func.coalesce(used.c.last_used_at, literal(_NEVER, UtcDateTime())).label("last_used"),
            )
            .join(
                version,
                (version.tenant_id == living.c.tenant_id)
                & (version.name == living.c.name)
                & (version.number == living.c.newest),
            )
            .outerjoin(
                release,
                (release.tenant_id == living.c.tenant_id)
                & (release.name == living.c.name)
                & (release.revision == _newest_revision(living)),
            )
            .outerjoin(run, (run.tenant_id == living.c.tenant_id) & (run.name == living.c.name))
            .outerjoin(used, _same_name(used, living))
        )
        if with_medians:
            median = _median_rows(since, chosen.tenant).subquery()
            query = query.add_columns(func.coalesce(median.c.first_token_s, 0.0).label("first_token"))
            query = query.outerjoin(median, _same_name(median, living))
        if chosen.state is not None:
            query = query.where(version.state == chosen.state)
        if chosen.base is not None:
            own = version.base_fingerprint == self._base
            query = query.where(own if chosen.base == "served" else ~own)
        if chosen.search is not None:
            query = query.where(living.c.name.contains(chosen.search, autoescape=True))
        if chosen.release in ("none", "released"):
            # A name whose last version was deleted has a release without targets.
            targets = func.coalesce(cast(release.targets, Text), "[]")
            query = query.where(targets == "[]" if chosen.release == "none" else targets != "[]")
        elif chosen.release is not None:
            query = query.where(run.revision == release.revision, run.status == chosen.release)
        return query.subquery()


def _same_name(rows: Subquery, others: Subquery) -> ColumnElement[bool]:
    return (rows.c.tenant_id == others.c.tenant_id) & (rows.c.name == others.c.name)


def _living(tenant: str | None) -> Subquery:
    version = AdapterVersion
    query = select(
        version.tenant_id,
        version.name,
        func.max(version.number).label("newest"),
        func.count().label("num_versions"),
        cast(func.sum(version.bytes), BigInteger).label("bytes"),
        func.sum(case((version.pinned, 1), else_=0)).label("pinned"),
    ).where(LIVING)
    if tenant is not None:
        query = query.where(version.tenant_id == tenant)
    return query.group_by(version.tenant_id, version.name).subquery()


def _newest_revision(names: Subquery) -> ColumnElement[int]:
    """The revision in force of each of these names. SQLite looks it up in the key's index; it would scan a grouped
    subquery for each name."""
    other = aliased(Release)
    query = select(func.max(other.revision)).where(
        other.tenant_id == names.c.tenant_id, other.name == names.c.name
    )
    return query.correlate(names).scalar_subquery()


def _used(tenant: str | None, since: datetime) -> Subquery:
    """Sums of the requests of each name since then."""
    query = select(
        Usage.tenant_id,
        Usage.adapter.label("name"),
        func.count().label("requests"),
        func.sum(case((Usage.status.in_(sorted(FAILURES)), 1), else_=0)).label("errors"),
        cast(func.sum(Usage.prompt_tokens + Usage.completion_tokens), BigInteger).label("tokens"),
        func.max(Usage.at).label("last_used_at"),
    ).where(Usage.at >= literal(since, UtcDateTime()))
    if tenant is not None:
        query = query.where(Usage.tenant_id == tenant)
    return query.group_by(Usage.tenant_id, Usage.adapter).subquery()


def _median_rows(since: datetime, tenant: str | None, names: Iterable[Key] = ()) -> Select[Any]:
    """The median time to the first token of each name, of these names alone where some are given. Of an even number of
    requests it is the lower one of the two in the middle."""
    of = (Usage.tenant_id, Usage.adapter)
    ranked = select(
        Usage.tenant_id,
        Usage.adapter.label("name"),
        Usage.first_token_s,
        func.row_number().over(partition_by=of, order_by=Usage.first_token_s).label("place"),
        func.count().over(partition_by=of).label("count"),
    ).where(Usage.at >= literal(since, UtcDateTime()), Usage.first_token_s.is_not(None))
    if tenant is not None:
        ranked = ranked.where(Usage.tenant_id == tenant)
    if names:
        ranked = ranked.where(tuple_(*of).in_(sorted(names)))
    rows = ranked.subquery()
    middle = rows.c.place * 2 - rows.c.count
    return select(rows.c.tenant_id, rows.c.name, rows.c.first_token_s).where(middle >= 0, middle <= 1)


def _medians(session: Session, names: set[Key], since: datetime) -> dict[Key, float]:
    if not names:
        return {}
    rows = session.execute(_median_rows(since, None, names))
    return {(tenant, name): value for tenant, name, value in rows}


def _targets(session: Session, names: set[Key]) -> dict[Key, tuple[ReleaseTarget, ...]]:
    if not names:
        return {}
    place = (Release.tenant_id, Release.name)
    last = (
        select(*place, func.max(Release.revision)).where(tuple_(*place).in_(sorted(names))).group_by(*place)
    )
    rows = session.scalars(select(Release).where(tuple_(*place, Release.revision).in_(last)))
    return {(row.tenant_id, row.name): release_info(row).targets for row in rows}


def _totals(session: Session, rows: Subquery) -> Totals:
    sums = (cast(func.coalesce(func.sum(rows.c[name]), 0), BigInteger) for name in ("bytes", *_COUNTS))
    query = select(rows.c.state, func.count(), *sums).group_by(rows.c.state).order_by(rows.c.state)
    found = session.execute(query).all()
    size, requests, errors, tokens = (sum(row[place] for row in found) for place in range(2, 6))
    return Totals({row[0]: row[1] for row in found}, size, requests, errors, tokens)


def _read_place(cursor: str, sort: Sort) -> list[ColumnElement[Any]]:
    """The last adapter of the page before: the value that the list is sorted by, the tenant, the name."""
    wrong = InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    try:
        place = json.loads(rules.read_cursor(cursor) or "")
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(place, list) or len(place) != (2 if sort == "name" else 3):
        raise wrong
    first, names = place[:-2], place[-2:]
    # JSON spells what no name has and not every database takes: NUL, halves of a character.
    if not all(isinstance(name, str) and name.isprintable() for name in names):
        raise wrong
    return [*(_read_value(value, sort, wrong) for value in first), *(literal(name) for name in names)]


def _read_value(value: object, sort: Sort, wrong: InvalidCursor) -> ColumnElement[Any]:
    if sort in _TIMES and isinstance(value, str):
        try:
            time = datetime.fromisoformat(value).astimezone(UTC)
        except (ValueError, OverflowError):
            raise wrong from None
        return literal(time, UtcDateTime())
    if sort == "first_token" and isinstance(value, float) and math.isfinite(value):
        return literal(value)
    if sort not in (*_TIMES, "first_token") and type(value) is int and 0 <= value < 2**63:
        return literal(value, BigInteger())
    raise wrong


def _show(row: Any, targets: tuple[ReleaseTarget, ...], first_token_s: float | None) -> Summary:
    names = (
        "tenant_id", "name", "newest", "state", "digest", "base_fingerprint", "num_versions", "bytes", "pinned",
        "run", *_COUNTS, "last_used_at",
    )  # fmt: skip
    kept = {name: row[name] for name in names}
    return Summary(**kept, created_at=row["created"], targets=targets, first_token_s=first_token_s)
