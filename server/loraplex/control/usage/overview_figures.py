"""Figures of adapters from the ledger: sums of their requests, and medians of the time to the first token."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from statistics import median_low
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, case, cast, func, literal, select, tuple_
from sqlalchemy.orm import Session

from loraplex.control.db.tables import Usage, UtcDateTime
from loraplex.control.usage.outcome import FAILURES

Key = tuple[str, str]
"""A tenant and a name."""


def sums(tenant: str | None, since: datetime) -> Select[*tuple[Any, ...]]:
    """Sums of the requests of each name since then."""
    owner = _owner()
    query = select(
        owner.label("tenant_id"),
        Usage.adapter.label("name"),
        func.count().label("requests"),
        func.sum(case((Usage.status.in_(sorted(FAILURES)), 1), else_=0)).label("errors"),
        cast(func.sum(Usage.prompt_tokens + Usage.completion_tokens), BigInteger).label("tokens"),
        func.max(Usage.at).label("last_used_at"),
    ).where(Usage.at >= literal(since, UtcDateTime()))
    if tenant is not None:
        query = query.where(Usage.tenant_id == tenant)
    return query.group_by(owner, Usage.adapter)


def all_medians(session: Session, tenant: str | None, since: datetime) -> dict[Key, float]:
    """The median time to the first token of each name. Of an even number of requests it is the lower one of the two in
    the middle."""
    owner = _owner()
    ranked = select(
        owner.label("tenant_id"),
        Usage.adapter,
        Usage.first_token_s,
        func.row_number()
        .over(partition_by=(owner, Usage.adapter), order_by=Usage.first_token_s)
        .label("place"),
        func.count().over(partition_by=(owner, Usage.adapter)).label("count"),
    ).where(Usage.at >= literal(since, UtcDateTime()), Usage.first_token_s.is_not(None))
    if tenant is not None:
        ranked = ranked.where(Usage.tenant_id == tenant)
    rows = ranked.subquery()
    middle = rows.c.place * 2 - rows.c.count
    query = select(rows.c.tenant_id, rows.c.adapter, rows.c.first_token_s).where(middle >= 0, middle <= 1)
    return {(tenant, name): value for tenant, name, value in session.execute(query)}


def _owner() -> ColumnElement[str]:
    """The tenant of a row. By the column itself SQLite reads the whole ledger in the order of the index by tenant, a
    page for each row."""
    return Usage.tenant_id.concat("")


def medians_of(session: Session, names: set[Key], since: datetime) -> dict[Key, float]:
    """The same of these names alone, which takes no sorting of all requests."""
    if not names:
        return {}
    query = select(Usage.tenant_id, Usage.adapter, Usage.first_token_s).where(
        Usage.at >= literal(since, UtcDateTime()),
        Usage.first_token_s.is_not(None),
        tuple_(Usage.tenant_id, Usage.adapter).in_(sorted(names)),
    )
    times: dict[Key, list[float]] = defaultdict(list)
    for tenant, name, value in session.execute(query):
        times[tenant, name].append(value or 0.0)
    return {name: median_low(values) for name, values in times.items()}
