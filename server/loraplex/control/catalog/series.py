"""Series: names whose versions a training pushes, one after the other. Only the newest of them are kept.

Each version of a series is checked by its structure. The outputs of its sites are measured and compared for the first
version after the series was set, and for one in `check_every` from there on; a version that fails makes the next one
due. Which check a version needed stands in its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.spec import AdapterSpec
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import NUMBERS_CHECKED, Adapter, AdapterVersion, Series
from loraplex.control.errors import Conflict, NotForTraining, SeriesNotFound
from loraplex.control.tenancy.tenants import require_tenant, tenant_target
from loraplex.control.types import Checked

MAX_SERIES = 1000
"""Series of one tenant."""
MAX_KEPT = 1000
MAX_CHECK_EVERY = 10_000
MAX_QUOTA = 60_000
MAX_AGREE_WITHIN = 100.0
"""In nats. Log probabilities that differ by more have nothing to do with each other."""
MAX_CONFIG_BYTES = 64 << 10
MAX_CONFIG_FIELDS = 256


@dataclass(frozen=True, slots=True)
class SeriesRules:
    """How the versions of a series are taken, and which are kept."""

    keep_last: int
    """Newest versions that are kept, beside those in use."""
    check_every: int
    """Versions from one whose numbers are checked to the next. 1: each is checked."""
    latest: bool = True
    """Whether each version takes all the traffic of the name once it is ready."""
    quota: int | None = None
    """Pushes in a minute. None: no limit beside the tenant's changes."""
    config: Mapping[str, Any] | None = None
    """The adapter_config.json of pushes that are tensors alone. None: such pushes are refused."""
    agree_within: float | None = None
    """Largest mean absolute difference of a trainer's log probabilities and the server's with which a version serves,
    in nats. None: pushes bring none."""


@dataclass(frozen=True, slots=True)
class SeriesInfo:
    tenant_id: str
    name: str
    rules: SeriesRules
    created_at: datetime


class AllSeries:
    """All calls are synchronous and atomic. Changes are recorded with the actor, `by`. `check_name` is
    `Catalog.check_name`."""

    def __init__(self, database: Database, check_name: Callable[[str], None]) -> None:
        self._database = database
        self._check_name = check_name

    def get(self, tenant_id: str, name: str) -> SeriesInfo:
        """Raises TenantNotFound, SeriesNotFound."""
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            return _info(_require(session, tenant_id, name))

    def quota(self, tenant_id: str, name: str) -> int | None:
        """Pushes that the name takes in a minute. None: it is no series, or has no such limit."""
        with self._database.read() as session:
            return session.scalar(
                select(Series.quota).where(Series.tenant_id == tenant_id, Series.name == name)
            )

    def put(self, tenant_id: str, name: str, rules: SeriesRules, *, by: Actor = LOCAL) -> SeriesInfo:
        """Make a name a series, or change one: its next version has its numbers checked. The versions that are there
        stay until the next push. Raises InvalidValue, AdapterRefused (name_reserved), TenantNotFound; Conflict where
        the config is too large, or the tenant has too many series."""
        self._check_name(name)
        config = None if rules.config is None else json.dumps(rules.config, sort_keys=True)
        if config is not None and len(config) > MAX_CONFIG_BYTES:
            raise Conflict(
                f"A series' config has at most {MAX_CONFIG_BYTES} bytes; this one has {len(config)}.",
                param="config",
            )
        with self._database.write() as session:
            require_tenant(session, tenant_id)
            adapter = session.get(Adapter, (tenant_id, name))
            row = session.get(Series, (tenant_id, name))
            before = None if row is None else _shown(_info(row).rules)
            if row is None:
                count = session.scalar(select(func.count()).where(Series.tenant_id == tenant_id)) or 0
                if count >= MAX_SERIES:
                    raise Conflict(f"The tenant has {MAX_SERIES} series; delete one first.")
                row = Series(tenant_id=tenant_id, name=name, created_at=database_now(session))
                session.add(row)
            row.config, row.keep_last, row.check_every = config, rules.keep_last, rules.check_every
            row.latest, row.quota, row.agree_within = rules.latest, rules.quota, rules.agree_within
            row.since = 0 if adapter is None else adapter.last_number
            session.flush()
            made = _info(row)
            target = series_target(tenant_id, name)
            record(
                session,
                by,
                "series.set",
                target,
                tenant_id=tenant_id,
                before=before,
                after=_shown(made.rules),
            )
            return made

    def delete(self, tenant_id: str, name: str, *, by: Actor = LOCAL) -> None:
        """Make it an ordinary name, with the versions that it has. Raises TenantNotFound, SeriesNotFound."""
        with self._database.write() as session:
            require_tenant(session, tenant_id)
            _require(session, tenant_id, name)
            forget_series(session, tenant_id, name, by)


def series_for_push(session: Session, tenant_id: str, name: str, by: Actor) -> Series | None:
    """The series that the name is, if it is one. Raises NotForTraining where the caller's key may not push to it, and
    SeriesNotFound where it may push to a series alone, and the name is none (any more)."""
    if by.only_trains:
        return _require(session, tenant_id, name)
    series = session.get(Series, (tenant_id, name))
    if series is not None and not by.may_train:
        raise NotForTraining(
            f"'{name}' is a series, and only a key with the scope adapters:train may push to one."
        )
    return series


def check_needed(session: Session, series: Series, base_fingerprint: str, digest: str) -> Checked:
    """The check that the name's next version, of these bytes, needs: of its numbers if no version since the series was
    set has passed or awaits that check on this base, if `check_every` were pushed since, or if the tenant's same bytes
    were rejected before."""
    of = AdapterVersion
    rejected = select(of.number).where(
        of.digest == digest,
        of.tenant_id == series.tenant_id,
        of.state == "rejected",
        of.base_fingerprint == base_fingerprint,
    )
    if session.scalar(rejected.limit(1)) is not None:
        return "numbers"
    name = (series.tenant_id, series.name)
    last = session.scalar(
        select(of.number)
        .where(
            of.tenant_id == series.tenant_id,
            of.name == series.name,
            of.number > series.since,
            NUMBERS_CHECKED,
            of.state.not_in(("rejected", "deleted", "lost")),
            of.base_fingerprint == base_fingerprint,
        )
        .order_by(of.number.desc())
        .limit(1)
    )
    adapter = session.get(Adapter, name)
    coming = 1 if adapter is None else adapter.last_number + 1
    return "numbers" if last is None or coming - last >= series.check_every else "structure"


def with_policy(spec: AdapterSpec, series: Series) -> AdapterSpec:
    """The spec of a version whose numbers are not checked, with that in its report."""
    told = (
        f"left out: the series '{series.name}' has the numbers of its first version checked, and of one in "
        f"{series.check_every} after it"
    )
    note = {"name": "numbers", "ok": True, "detail": told}
    return replace(spec, report=spec.report | {"checks": [*spec.report["checks"], note]})


def forget_series(session: Session, tenant_id: str, name: str, by: Actor) -> None:
    """Delete the rules of a name that is a series, with an audit entry."""
    series = session.get(Series, (tenant_id, name))
    if series is not None:
        before = _shown(_info(series).rules)
        session.delete(series)
        record(
            session,
            by,
            "series.delete",
            series_target(tenant_id, name),
            tenant_id=tenant_id,
            before=before,
        )


def series_target(tenant_id: str, name: str) -> str:
    """The name of a series in the audit log."""
    return f"{tenant_target(tenant_id)}/adapters/{name}/series"


def _require(session: Session, tenant_id: str, name: str) -> Series:
    row = session.get(Series, (tenant_id, name))
    if row is None:
        raise SeriesNotFound(
            f"'{name[:80]}' is no series of the tenant '{tenant_id}'. PUT its rules to make it one."
        )
    return row


def _info(row: Series) -> SeriesInfo:
    config = None if row.config is None else json.loads(row.config)
    rules = SeriesRules(row.keep_last, row.check_every, row.latest, row.quota, config, row.agree_within)
    return SeriesInfo(row.tenant_id, row.name, rules, row.created_at)


def _shown(rules: SeriesRules) -> dict[str, Any]:
    """The rules in the audit log, with the config as whether there is one."""
    return {
        "keep_last": rules.keep_last,
        "check_every": rules.check_every,
        "latest": rules.latest,
        "quota": rules.quota,
        "agree_within": rules.agree_within,
        "config": rules.config is not None,
    }
