"""Whether a database and a store say the same."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, digest_upload
from loraplex.control.audit.verification import verify
from loraplex.control.catalog.release_reading import current_releases
from loraplex.control.db.database import Database
from loraplex.control.db.tables import GONE, Adapter, AdapterVersion, AuditRow, Tenant


def check_integrity(database: Database, root: Path) -> None:
    """Every living version that is not `corrupt` has its bytes in the store below `root`, hashed again and of the
    size that its row says; a `corrupt` one has not; the store holds nothing else, and staging nothing at all. What is
    released lives, and its numbers were checked. A rejected version keeps the reason, and no bytes. The audit log is
    whole, and has one upload for each version that was ever made, and no other."""
    with database.read() as session:
        rows = list(session.scalars(select(AdapterVersion)))
        last = {(row.tenant_id, row.name): row.last_number for row in session.scalars(select(Adapter))}
        releases = {
            (tenant, name): release
            for tenant in session.scalars(select(Tenant.id))
            for name, release in current_releases(session, tenant).items()
        }
        made = _audited_versions(session)
    assert sorted(made) == sorted((row.tenant_id, row.name, f"v{row.number}", row.digest) for row in rows)
    verdict = verify(database)
    assert verdict.whole, verdict
    living = {(r.tenant_id, r.name, r.number): r for r in rows if r.state not in GONE}
    whole = _whole_artifacts(root / "sha256")
    assert list((root / "staging").iterdir()) == []
    for (tenant, name, number), row in living.items():
        where = f"{tenant}/{name}@v{number}, {row.state}"
        assert row.state in ("validating", "ready", "incompatible", "corrupt"), where
        assert (row.state == "validating") == (
            row.pending_check is not None and row.state not in ("corrupt", "incompatible")
        ), where
        assert (row.state != "corrupt") == (whole.get(row.digest) == row.bytes), where
        assert number <= last[tenant, name], where
    assert set(whole) <= {row.digest for row in living.values()}, "the store holds what nobody has"
    for (tenant, name), release in releases.items():
        for target in release.targets:
            released = living.get((tenant, name, int(target.version[1:])))
            assert released is not None, f"{tenant}/{name}: {target} is released"
            assert released.pending_check is None, f"{tenant}/{name}: {target} is released before its check"
    for (tenant, name, _), row in living.items():
        checked = row.pending_check is None
        assert not checked or releases[tenant, name].targets, f"{tenant}/{name} has no release"
    for row in rows:
        if row.state in GONE:
            assert row.pending_check is None, f"{row.tenant_id}/{row.name}@v{row.number} waits for a check"
        if row.state == "rejected":
            assert row.report["refusal"]["code"], f"{row.tenant_id}/{row.name}@v{row.number} has no reason"


def _audited_versions(session: Session) -> list[tuple[str, str, str, str]]:
    """Of the tenants that there are, what the audit log says was made: tenant, name, version, digest."""
    rows = session.scalars(
        select(AuditRow)
        .join(Tenant, Tenant.id == AuditRow.tenant_id)
        .where(AuditRow.action == "version.upload", AuditRow.outcome == "done")
    )
    found = []
    for row in rows:
        after = json.loads(row.after or "{}")
        if after["is_new"]:
            _, tenant, _, name, _ = row.target.split("/")
            found.append((tenant, name, after["version"], after["digest"]))
    return found


def _whole_artifacts(shelves: Path) -> dict[str, int | None]:
    """Digest → bytes of its files, or None where they are not those of the digest."""
    found: dict[str, int | None] = {}
    for shelf in shelves.iterdir():
        for folder in shelf.iterdir():
            assert folder.name[:2] == shelf.name, f"{folder} lies on the wrong shelf"
            assert len(folder.name) == 64, f"{folder} is no artifact"
            found[folder.name] = _whole(folder)
    return found


def _whole(folder: Path) -> int | None:
    entries = {entry.name: entry.lstat() for entry in folder.iterdir()}
    if set(entries) != {CONFIG_NAME, TENSORS_NAME} or not _plain(entries.values()):
        return None
    if digest_upload(folder / CONFIG_NAME, folder / TENSORS_NAME) != folder.name:
        return None
    return sum(entry.st_size for entry in entries.values())


def _plain(entries: Iterable[object]) -> bool:
    return all(stat.S_ISREG(getattr(entry, "st_mode", 0)) for entry in entries)
