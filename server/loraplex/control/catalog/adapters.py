"""Adapters and their versions: admitted once, immutable, deleted when no version has them any more."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.adapters.errors import AdapterRefused, ArtifactMissing, ArtifactUnreadable, LoraplexError
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control import rules
from loraplex.control.adapter_tags import Tags, add_tags, forget_tags, replace_tags, tags_of
from loraplex.control.agreement import DueAgreement, TrainerNumbers, threshold
from loraplex.control.artifacts import Artifacts, lost_pins
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.catalog.all_versions import reconcile
from loraplex.control.catalog.new_versions import (
    Inspections,
    Outputs,
    add_version,
    check_alora,
    find_alike,
    flush_staged,
    heal_alike,
    note_upload,
    read_outputs,
    take_known_order,
    with_chat,
)
from loraplex.control.catalog.quota import check_comparisons, check_quota, upload_room
from loraplex.control.catalog.release_changes import add_release
from loraplex.control.catalog.release_reading import current_release, release_shown
from loraplex.control.catalog.retention import remove_version
from loraplex.control.catalog.series import check_needed, forget_series, series_for_push, with_policy
from loraplex.control.catalog.shadow_store import forget_shadows
from loraplex.control.catalog.staged import UploadRoom
from loraplex.control.catalog.validation import pending_check, release_upload
from loraplex.control.catalog.versions import (
    count_living,
    no_adapter,
    require_living,
    require_version,
    version_info,
    version_number,
    version_target,
)
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, Adapter, AdapterVersion, Series, Tenant
from loraplex.control.errors import Conflict, TenantNotFound
from loraplex.control.tenancy.tenants import require_tenant, tenant_target
from loraplex.control.types import (
    AS_THE_BASE,
    AdapterInfo,
    Page,
    Removal,
    Serving,
    VersionInfo,
)

MAX_LOGGED = 20
"""Versions that one log line names."""

log = structlog.get_logger("loraplex")


class Catalog:
    """All calls are synchronous and atomic. `base` is the model that is served; `served_name` its name, which no
    adapter may take, in upper or lower case. `refuse_towers` as `inspect_adapter` has it. Changes are recorded with the
    actor, `by`."""

    def __init__(
        self,
        database: Database,
        artifacts: Artifacts,
        base: BaseSpec,
        *,
        served_name: str,
        max_rank: int,
        refuse_towers: bool = False,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self.base = base
        self.served_name = served_name
        self.max_rank = max_rank
        self._inspections = Inspections(database, base, max_rank, refuse_towers)

    def check_name(self, name: str) -> None:
        """Whether a tenant's adapter may have this name. Raises InvalidValue, AdapterRefused."""
        rules.check_adapter_name(name)
        if name.lower() == self.served_name.lower():
            raise AdapterRefused(
                "name_reserved",
                f"'{name}' is the name of the base model, '{self.served_name}', whatever the case; choose another.",
            )

    def check_upload(
        self, tenant_id: str, name: str, by: Actor = LOCAL, *, compared: bool = False
    ) -> UploadRoom | None:
        """Refuse what can be refused before a byte is read, and return the room that the quota leaves (None: it bounds
        nothing). `compared`: a trainer's log probabilities come with it. Raises InvalidValue, TenantNotFound,
        AdapterRefused, NotForTraining, and Conflict for log probabilities without a threshold."""
        self.check_name(name)
        with self._database.read() as session:
            tenant = require_tenant(session, tenant_id)
            series = series_for_push(session, tenant_id, name, by)
            threshold(series, compared=compared)
            limits = rules.read_limits(tenant.limits)
            check_quota(session, limits, tenant_id, name, 0)
            return upload_room(session, limits, tenant_id, name)

    def admit(
        self,
        tenant_id: str,
        name: str,
        staging: Staging,
        *,
        serving: Serving = AS_THE_BASE,
        chat: OwnChat | None = None,
        notes: Sequence[Mapping[str, Any]] = (),
        source: str | None = None,
        release: bool = False,
        check: bool = False,
        durable: bool = True,
        numbers: TrainerNumbers | None = None,
        tags: Sequence[str] = (),
        by: Actor = LOCAL,
    ) -> tuple[VersionInfo, bool]:
        """Make a version of an upload's two files; whether it is new. mlx-lm's files are turned into PEFT's first, and
        LoRA on parts of a linear is joined. The adapter gets `tags` beside those that it has. The same bytes again
        within a name, to be served alike, are the version that has them, also with a set of the config in another
        order; where the stored ones are lost or damaged, they take their place. Bytes that were rejected before are a
        new version, and are checked again. `chat` is what they bring for their chats; `notes` are added to the checks
        of the report. `source` is where an import came from, for the audit log. With `release` the version takes all
        the traffic of its name from the moment when it is ready on. With `check` that is when `Validation.accept` says
        so: until then a new version is `validating`. Of a series' version its rules decide on both, and with
        `agree_within` it is `validating` until `numbers` were compared with the server's. Without `durable` new bytes
        are flushed by `Flushes.settle` later; a crash of the machine until then may cost the version.

        The bytes are published before the row is committed: a crash between the two leaves an orphan, which the next
        start sweeps, and never a row without bytes. Raises AdapterRefused, StoreFull, StoreFailed, RateLimited where
        too many versions wait for a comparison, and what `check_upload` raises; then nothing of the upload is kept.
        """
        self.check_upload(tenant_id, name, by, compared=numbers is not None)
        spec = self._inspections.inspect(tenant_id, name, staging)
        check_alora(spec, serving)
        outputs = read_outputs(spec, staging.directory, self.base)
        spec = take_known_order(self._database, self._artifacts.store, tenant_id, name, staging, spec)
        spec = with_chat(spec, chat, [*notes, *outputs.notes])
        fault = self._artifacts.store.fault
        # Before the lock, so that the slow part of a commit keeps no other upload and no deletion waiting.
        if durable:
            flush_staged(staging)
        try:
            with self._artifacts.examined(spec.digest) as examined:
                # Others may have these bytes, who were told that they are on the disk.
                durable = durable or not isinstance(examined.damage, ArtifactMissing)
                replace = not self._artifacts.is_durable(spec.digest)
                self._artifacts.store.commit(staging, spec.digest, examined, flush=durable, replace=replace)
                with self._database.write() as session:
                    self._artifacts.check_stored(spec.digest)
                    series = series_for_push(session, tenant_id, name, by)
                    within = threshold(series, compared=numbers is not None)
                    due = None if numbers is None or within is None else DueAgreement(numbers, within)
                    pending = pending_check(by) if check or due is not None else None
                    row, is_new = self._record(
                        session, tenant_id, name, spec, serving, chat, outputs, pending, series, due, durable
                    )
                    takes_all = release if series is None else series.latest and (is_new or release)
                    release_upload(session, row, release=takes_all, by=by)
                    admitted = version_info(row), is_new
                    note_upload(session, by, *admitted, source)
                    add_tags(session, tenant_id, name, tags, by)
                    fault(FaultPoint.COMMIT_VERSION)
        except BaseException:
            # The bytes may be published while the row is not. If this fails too, the next start sweeps them.
            with contextlib.suppress(LoraplexError, OSError):
                self._artifacts.remove_unused([spec.digest])
            # Or damaged ones were to be replaced, and went before the good ones came.
            with contextlib.suppress(LoraplexError, OSError):
                self.mark_damaged(spec.digest)
            raise
        fault(FaultPoint.VERSION_COMMITTED)
        return admitted

    def _record(
        self,
        session: Session,
        tenant_id: str,
        name: str,
        spec: AdapterSpec,
        serving: Serving,
        chat: OwnChat | None,
        outputs: Outputs,
        pending: dict[str, Any] | None,
        series: Series | None,
        due: DueAgreement | None,
        durable: bool,
    ) -> tuple[AdapterVersion, bool]:
        """Record the version that stands for published bytes."""
        serving = replace(serving, chat_digest=None if chat is None else chat.digest)
        tenant = session.get(Tenant, tenant_id, with_for_update=True)
        if tenant is None:
            raise TenantNotFound(f"There is no tenant '{tenant_id}'.")
        heal_alike(session, spec.digest, self.base.fingerprint, durable)
        known = find_alike(session, tenant_id, name, spec.digest, self.base, serving, outputs)
        if known is not None:
            return known, False
        check_quota(session, rules.read_limits(tenant.limits), tenant_id, name, spec.num_bytes)
        if due is not None:
            check_comparisons(session, tenant_id)
        checked = None
        if series is not None:
            checked = check_needed(session, series, self.base.fingerprint, spec.digest)
            if checked == "structure":
                spec, pending = with_policy(spec, series), None if due is None else pending
        made = add_version(
            session, tenant_id, name, self.base, spec, serving, chat, outputs, pending, checked, durable
        )
        made.pending_agreement = None if due is None else due.as_json()
        return made, True

    def get_adapter(self, tenant_id: str, name: str) -> AdapterInfo:
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            adapter = session.get(Adapter, (tenant_id, name))
            living = count_living(session, tenant_id, name)
            if adapter is None or not living:
                raise no_adapter(tenant_id, name)
            tags = tags_of(session, [(tenant_id, name)]).get((tenant_id, name), ())
            return AdapterInfo(tenant_id, name, adapter.last_number, living, adapter.created_at, tags)

    def set_tags(self, tenant_id: str, name: str, tags: Tags, *, by: Actor = LOCAL) -> AdapterInfo:
        """Give an adapter these tags in place of its own, or edit those. Raises InvalidValue, AdapterNotFound."""
        with self._database.write() as session:
            if not count_living(session, tenant_id, name):
                require_tenant(session, tenant_id)
                raise no_adapter(tenant_id, name)
            replace_tags(session, tenant_id, name, tags, by)
        return self.get_adapter(tenant_id, name)

    def list_adapters(
        self,
        tenant_id: str,
        *,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
        search: str | None = None,
    ) -> Page[AdapterInfo]:
        """List adapters by name, those whose names hold `search`; names without a living version are left out."""
        after = rules.read_cursor(cursor)
        query = (
            select(Adapter, func.count(AdapterVersion.number))
            .join(
                AdapterVersion,
                (AdapterVersion.tenant_id == Adapter.tenant_id) & (AdapterVersion.name == Adapter.name),
            )
            .where(Adapter.tenant_id == tenant_id, LIVING)
            .group_by(Adapter.tenant_id, Adapter.name)
            .order_by(Adapter.name)
            .limit(rules.check_page_limit(limit) + 1)
        )
        if after is not None:
            query = query.where(Adapter.name > after)
        if search is not None:
            query = query.where(Adapter.name.contains(search, autoescape=True))
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            rows = session.execute(query).all()
            tags = tags_of(session, [(tenant_id, row.name) for row, _ in rows])
            found = [
                AdapterInfo(
                    tenant_id,
                    row.name,
                    row.last_number,
                    count,
                    row.created_at,
                    tags.get((tenant_id, row.name), ()),
                )
                for row, count in rows
            ]
        return rules.make_page(found, limit, lambda info: info.name, lambda info: info)

    def get_version(self, tenant_id: str, name: str, version: str) -> VersionInfo:
        with self._database.read() as session:
            return version_info(require_version(session, tenant_id, name, version))

    def get_living(self, tenant_id: str, name: str, version: str) -> VersionInfo:
        """Get a version as `get_version` does; a deleted or rejected one raises VersionNotFound."""
        with self._database.read() as session:
            return version_info(require_living(session, tenant_id, name, version))

    def get_chat(self, tenant_id: str, name: str, version: str) -> OwnChat | None:
        """Get the chat files that a living version brings. Raises as `get_living`."""
        with self._database.read() as session:
            chat = require_living(session, tenant_id, name, version).chat
            return None if chat is None else OwnChat.of_json(chat)

    def list_versions(
        self, tenant_id: str, name: str, *, limit: int = rules.DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[VersionInfo]:
        """List versions by number, deleted and rejected ones too."""
        after = rules.read_cursor(cursor)
        query = (
            select(AdapterVersion)
            .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name)
            .order_by(AdapterVersion.number)
            .limit(rules.check_page_limit(limit) + 1)
        )
        if after is not None:
            if version_number(after) < 0:
                raise rules.InvalidCursor("The cursor is not one that this list gave.", param="cursor")
            query = query.where(AdapterVersion.number > version_number(after))
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            if session.get(Adapter, (tenant_id, name)) is None:
                raise no_adapter(tenant_id, name)
            rows = session.scalars(query).all()
            return rules.make_page(rows, limit, lambda row: f"v{row.number}", version_info)

    def set_pin(
        self, tenant_id: str, name: str, version: str, pinned: bool, *, by: Actor = LOCAL
    ) -> VersionInfo:
        """Record whether the version is kept on the device; the caller informs the engine."""
        with self._database.write() as session:
            row = require_living(session, tenant_id, name, version)
            record(
                session,
                by,
                "version.pin" if pinned else "version.unpin",
                f"{version_target(tenant_id, name, version)}/pin",
                tenant_id=tenant_id,
                before={"pinned": row.pinned},
                after={"pinned": pinned},
            )
            row.pinned = pinned
            return version_info(row)

    def pinned(self) -> list[VersionInfo]:
        """Every version that must be pinned after the engine's start."""
        with self._database.read() as session:
            query = select(AdapterVersion).where(AdapterVersion.pinned, AdapterVersion.state == "ready")
            return [version_info(row) for row in session.scalars(query)]

    def delete_version(self, tenant_id: str, name: str, version: str, *, by: Actor = LOCAL) -> Removal:
        """A released version goes only as the last one of its name: to delete it earlier would silently change
        what the name answers. Raises Conflict."""
        with self._artifacts.lock:
            with self._database.write() as session:
                row = require_living(session, tenant_id, name, version)
                release = current_release(session, tenant_id, name)
                released = release is not None and any(t.version == version for t in release.targets)
                if released and count_living(session, tenant_id, name) > 1:
                    raise Conflict(
                        f"{name}@{version} is released: release another version first, or delete the adapter.",
                        param="version",
                    )
                if released:
                    add_release(session, tenant_id, name, (), "none", origin="delete", by=by)
                    forget_shadows(session, tenant_id, name)
                digest = row.digest
                before = {"digest": digest, "state": row.state, "pinned": row.pinned, "released": released}
                if count_living(session, tenant_id, name) == 1:
                    before |= forget_tags(session, tenant_id, name)
                target = version_target(tenant_id, name, version)
                record(session, by, "version.delete", target, tenant_id=tenant_id, before=before)
                pinned = [digest] if row.pinned else []
                remove_version(row, "deleted")
                unpinned = lost_pins(session, pinned)
                self._artifacts.store.fault(FaultPoint.COMMIT_REMOVAL)
            self._artifacts.store.fault(FaultPoint.REMOVAL_COMMITTED)
            return self._artifacts.remove_unused([digest], unpinned)

    def delete_adapter(
        self, tenant_id: str, name: str, *, keep_rules: bool = False, by: Actor = LOCAL
    ) -> Removal:
        """All versions of a name. What runs finishes; the name's numbers are not used again. With `keep_rules` a series
        stays one, and its versions are retired, but those that wait for their check."""
        with self._artifacts.lock:
            with self._database.write() as session:
                require_tenant(session, tenant_id)
                rows = session.scalars(
                    select(AdapterVersion).where(
                        AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name, LIVING
                    )
                ).all()
                if not rows:
                    raise no_adapter(tenant_id, name)
                digests = [row.digest for row in rows]
                before = {
                    "versions": {f"v{row.number}": row.digest for row in rows},
                    "release": release_shown(current_release(session, tenant_id, name)),
                } | forget_tags(session, tenant_id, name)
                target = f"{tenant_target(tenant_id)}/adapters/{name}"
                record(session, by, "adapter.delete", target, tenant_id=tenant_id, before=before)
                pinned = [row.digest for row in rows if row.pinned]
                series = session.get(Series, (tenant_id, name)) if keep_rules else None
                for row in rows:
                    # One whose numbers were never checked does not count as checked.
                    is_kept = series is not None and row.pending_check is None
                    remove_version(row, "retired" if is_kept else "deleted")
                if series is None:
                    forget_series(session, tenant_id, name, by)
                unpinned = lost_pins(session, pinned)
                add_release(session, tenant_id, name, (), "none", origin="delete", by=by)
                forget_shadows(session, tenant_id, name)
                self._artifacts.store.fault(FaultPoint.COMMIT_REMOVAL)
            self._artifacts.store.fault(FaultPoint.REMOVAL_COMMITTED)
            return self._artifacts.remove_unused(digests, unpinned)

    def mark_damaged(self, digest: str) -> bool:
        """Verify bytes that were reported damaged or lost. Then every living version that has them, of
        whatever name or tenant, is `corrupt` from now on. Uploading the same bytes again heals them all.

        Raises ArtifactUnreadable where the bytes cannot be read at the moment.
        """
        with self._artifacts.examined(digest) as examined:
            if examined.damage is None:
                return False
            if isinstance(examined.damage, ArtifactUnreadable):
                raise examined.damage
            reason = examined.damage.message
            with self._database.write() as session:
                query = select(AdapterVersion).where(AdapterVersion.digest == digest, LIVING)
                found = [row for row in session.scalars(query) if row.state != "corrupt"]
                for row in found:
                    row.state = "corrupt"
                self._artifacts.store.fault(FaultPoint.MARK_CORRUPT)
                versions = [f"{row.tenant_id}/{row.name}@v{row.number}" for row in found]
        if versions:
            log.error(
                "artifact_damaged",
                digest=digest,
                num_versions=len(versions),
                versions=versions[:MAX_LOGGED],
                reason=reason,
            )
        return True

    def reconcile(self) -> int:
        """Set states at the start, as `reconcile` has it. Returns how many versions are lost."""
        return reconcile(self._database, self._artifacts, self.base.fingerprint)
