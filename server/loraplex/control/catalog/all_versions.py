"""Versions of all tenants: in one list for the operator, by digest for a start, and then beside the store: which have
their bytes, and which a crash has cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import structlog
from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from loraplex.adapters.errors import ArtifactUnreadable, LoraplexError
from loraplex.adapters.store.artifact_store import Examined
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control import rules
from loraplex.control.adapter_tags import forget_tags
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.recorder import LOCAL
from loraplex.control.catalog.release_changes import add_release, release_only
from loraplex.control.catalog.release_reading import current_release
from loraplex.control.catalog.shadow_store import forget_shadows
from loraplex.control.catalog.versions import count_living, state_of, version_info
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion, Series
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page, VersionInfo

MAX_DIGESTS = 500
"""In one query."""
log = structlog.get_logger("loraplex")


def list_all_versions(
    database: Database,
    limit: int,
    cursor: str | None,
    *,
    tenant_id: str | None = None,
    adapter: str | None = None,
) -> Page[VersionInfo]:
    """Living versions by tenant, name and number; of one tenant, or of adapters of one name, where these are given.
    Raises InvalidCursor."""
    key = (AdapterVersion.tenant_id, AdapterVersion.name, AdapterVersion.number)
    query = select(AdapterVersion).where(LIVING).order_by(*key).limit(limit + 1)
    if tenant_id is not None:
        query = query.where(AdapterVersion.tenant_id == tenant_id)
    if adapter is not None:
        query = query.where(AdapterVersion.name == adapter)
    after = rules.read_cursor(cursor)
    if after is not None:
        tenant, name, number = _read_key(after)
        query = query.where(tuple_(*key) > tuple_(tenant, name, number))
    with database.read() as session:
        rows = session.scalars(query).all()
        return rules.make_page(rows, limit, lambda r: f"{r.tenant_id}/{r.name}/{r.number}", version_info)


def find_ready(database: Database, tenants: Mapping[str, str]) -> dict[str, VersionInfo]:
    """Ready versions by digest, for those of these digests that have one: if there is one, of the tenant that `tenants`
    names for the digest."""
    found: dict[str, VersionInfo] = {}
    wanted = sorted(tenants)
    with database.read() as session:
        for start in range(0, len(wanted), MAX_DIGESTS):
            digests = wanted[start : start + MAX_DIGESTS]
            query = select(AdapterVersion).where(
                AdapterVersion.digest.in_(digests), AdapterVersion.state == "ready"
            )
            for row in session.scalars(query):
                if row.digest not in found or row.tenant_id == tenants[row.digest]:
                    found[row.digest] = version_info(row)
    return found


def find_living(database: Database, digests: Collection[str]) -> set[str]:
    """Those of these digests whose bytes a version has, in whatever state it is."""
    found: set[str] = set()
    wanted = sorted(digests)
    with database.read() as session:
        for start in range(0, len(wanted), MAX_DIGESTS):
            chosen = AdapterVersion.digest.in_(wanted[start : start + MAX_DIGESTS])
            found.update(session.scalars(select(AdapterVersion.digest).where(chosen, LIVING).distinct()))
    return found


def _read_key(after: str) -> tuple[str, str, int]:
    parts = after.split("/")
    if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit() or len(parts[2]) > 9:
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    return parts[0], parts[1], int(parts[2])


def reconcile(database: Database, artifacts: Artifacts, base_fingerprint: str) -> int:
    """Set the states of all versions while this base is served. Returns how many are `lost`.

    Versions made for another base are `incompatible`, and `ready` again when theirs is served, or `validating` where
    their numbers wait for their check. Those whose bytes the store lacks are `corrupt`, and those that were `corrupt`
    stay so unless their bytes are good again, for which they are hashed. Those that were not durable are hashed and
    flushed, or `lost` where their bytes are not whole; not where the store lacks all, as one that is not mounted does.
    """
    store = artifacts.store
    with artifacts.lock:
        damaged = {digest for digest in _digests(database, corrupt=True) if not _is_whole(artifacts, digest)}
        found = {
            digest: _examine_and_flush(artifacts, digest) for digest in _digests(database, corrupt=False)
        }
        lost: list[AdapterVersion] = []
        with database.write() as session:
            # Now, and not before: another server may have committed an upload just now.
            stored, rows = set(store.digests()), list(session.scalars(select(AdapterVersion).where(LIVING)))
            whole, is_away = stored - damaged, not stored and any(row.durable for row in rows)
            for row in rows:
                examined = None if row.durable else found.get(row.digest)
                if examined is not None and store.is_current(examined):
                    if examined.damage is not None and is_away:
                        row.state = "corrupt"
                        continue
                    if examined.damage is not None:
                        row.state, row.pinned, row.pending_check, row.chat = "lost", False, None, None
                        row.pending_agreement = None
                        lost.append(row)
                        continue
                    row.durable = True
                row.state = state_of(row, base_fingerprint) if row.digest in whole else "corrupt"
            session.flush()
            for tenant_id, name in sorted({(row.tenant_id, row.name) for row in lost}):
                if not count_living(session, tenant_id, name):
                    forget_tags(session, tenant_id, name)
                _release_what_is_left(session, tenant_id, name)
            if lost:
                store.fault(FaultPoint.COMMIT_LOST)
        _tell(lost)
        artifacts.remove_unused([row.digest for row in lost])
        return len(lost)


def _digests(database: Database, *, corrupt: bool) -> list[str]:
    """Digests of living versions that are `corrupt`, or of those that are not durable."""
    of = AdapterVersion
    chosen = of.state == "corrupt" if corrupt else of.durable.is_(False)
    with database.read() as session:
        return list(session.scalars(select(of.digest).where(LIVING, chosen).distinct()))


def _is_whole(artifacts: Artifacts, digest: str) -> bool:
    try:
        artifacts.store.verify(digest)
    except LoraplexError:
        return False
    return True


def _examine_and_flush(artifacts: Artifacts, digest: str) -> Examined | None:
    """The finding on the stored bytes. Whole ones are on the disk then. None: they cannot be read or flushed now."""
    try:
        examined = artifacts.store.examine(digest)
        if isinstance(examined.damage, ArtifactUnreadable):
            raise examined.damage
        # As copies: whether a flush has failed before is not known any more.
        return artifacts.store.flush(digest, rewrite=True) if examined.damage is None else examined
    except (LoraplexError, OSError) as error:
        log.warning("version_not_durable", digest=digest[:12], reason=str(error))
        return None


def _release_what_is_left(session: Session, tenant_id: str, name: str) -> None:
    """A release whose versions are all lost goes to the newest version that is ready, where the name is a series with
    `latest`. Where no version is left it ends, as by a deletion."""
    of = AdapterVersion
    named = (of.tenant_id == tenant_id, of.name == name)
    before = current_release(session, tenant_id, name)
    if before is None or not before.targets:
        return
    if not count_living(session, tenant_id, name):
        add_release(session, tenant_id, name, (), "none", origin="delete", by=LOCAL)
        forget_shadows(session, tenant_id, name)
        return
    numbers = [int(target.version[1:]) for target in before.targets if target.weight]
    living = session.scalar(select(of.number).where(*named, of.number.in_(numbers), LIVING).limit(1))
    series = session.get(Series, (tenant_id, name))
    if living is not None or series is None or not series.latest:
        return
    query = select(of.number).where(*named, of.state == "ready").order_by(of.number.desc()).limit(1)
    newest = session.scalar(query)
    if newest is not None:
        release_only(session, tenant_id, name, f"v{newest}", by=LOCAL)


def _tell(lost: Iterable[AdapterVersion]) -> None:
    for row in lost:
        log.error(
            "version_lost", tenant=row.tenant_id, version=f"{row.name}@v{row.number}", digest=row.digest[:12]
        )
