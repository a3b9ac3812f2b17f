"""The inspection of an upload, the row of a new version, and what the audit log says of its upload."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from loraplex.adapters.admission.base_model import read_text_config
from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.adapters.admission.config.selection import is_equal_but_for_order
from loraplex.adapters.admission.inspection import inspect_adapter
from loraplex.adapters.admission.inspection_cache import KnownStructures
from loraplex.adapters.admission.peft_config import read_raw_config
from loraplex.adapters.admission.pooled.files import read_embedding, read_head
from loraplex.adapters.errors import AdapterRefused, LoraplexError
from loraplex.adapters.mlx.convert import convert_mlx
from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.adapters.spec import AdapterSpec, BaseSpec
from loraplex.adapters.split_linears import join_split_linears
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import (
    CONFIG_NAME,
    TENSORS_NAME,
    digest_upload,
    disk_failures_named,
    open_regular,
)
from loraplex.adapters.store.interface import Store
from loraplex.adapters.tied_head import name_tied_head
from loraplex.control.audit.recorder import Actor, record
from loraplex.control.catalog.release_reading import current_release, release_shown
from loraplex.control.catalog.series import check_needed
from loraplex.control.catalog.versions import state_of
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, Adapter, AdapterVersion, Series
from loraplex.control.tenancy.tenants import tenant_target
from loraplex.control.types import Checked, Serving, VersionInfo

_MAX_COMPARED = 64
"""The newest versions of a name that an upload is compared with."""


class Inspections:
    """Inspects uploads for one base, from any thread. `refuse_towers` as `inspect_adapter` has it."""

    def __init__(self, database: Database, base: BaseSpec, max_rank: int, refuse_towers: bool) -> None:
        self._database = database
        self._base = base
        self._max_rank = max_rank
        self._refuse_towers = refuse_towers
        self._structures = KnownStructures(base)

    def inspect(self, tenant_id: str, name: str, staging: Staging) -> AdapterSpec:
        """Inspect the two files of an upload in full; a version of a series whose numbers are not due, and whose
        structure passed before, in its values alone. Raises as `inspect_adapter` does, StoreFull, StoreFailed."""
        with self._database.read() as session:
            is_pushed = session.get(Series, (tenant_id, name)) is not None
        files = staging.config_path, staging.tensors_path
        if is_pushed:
            known = self._structures.inspect(*files)
            if known is not None and self._takes_structure(tenant_id, name, known.digest):
                return known
        changed = [
            *convert_mlx(staging, self._max_rank, self._base.model_type),
            *join_split_linears(staging, self._base, self._max_rank),
            *name_tied_head(staging, self._base),
        ]
        spec = inspect_adapter(
            *files,
            self._base,
            max_rank=self._max_rank,
            deep=True,
            earlier=changed,
            refuse_towers=self._refuse_towers,
        )
        if is_pushed and not changed:
            self._structures.remember(*files, spec)
        return spec

    def _takes_structure(self, tenant_id: str, name: str, digest: str) -> bool:
        with self._database.read() as session:
            series = session.get(Series, (tenant_id, name))
            if series is None:
                return False
            return check_needed(session, series, self._base.fingerprint, digest) == "structure"


def check_alora(spec: AdapterSpec, serving: Serving) -> None:
    """Raises AdapterRefused where the choice for prompts without an invocation is made for an adapter without one."""
    if serving.alora is not None and not spec.invocation:
        raise AdapterRefused(
            "unsupported_feature",
            "serving.alora says what becomes of a prompt without the adapter's invocation, and this adapter has none: "
            "leave it out, or train with alora_invocation_tokens",
            feature="alora",
        )


@dataclass(frozen=True, slots=True)
class Outputs:
    """Pooled outputs of a version, and warnings on them for its report."""

    head: Head | None = None
    embedding: EmbeddingSpec | None = None
    notes: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        return (
            None if self.head is None else self.head.as_json(),
            None if self.embedding is None else self.embedding.as_json(),
        )


def read_outputs(spec: AdapterSpec, folder: Path, base: BaseSpec) -> Outputs:
    """The labels of an adapter's head, or the vectors that it was trained for, by the other files of its upload. Raises
    AdapterRefused (config_invalid, too_large), OSError."""
    head = embedding = None
    if spec.head is not None:
        pad = read_text_config(Path(base.model_dir)).get("pad_token_id")
        head, warnings = read_head(folder, spec.head.task, spec.head.num_labels, pad)
    else:
        embedding, warnings = read_embedding(folder)
    notes = ({"name": "outputs", "ok": False, "detail": f"warning: {warning}"} for warning in warnings)
    return Outputs(head, embedding, tuple(notes))


def with_chat(spec: AdapterSpec, chat: OwnChat | None, notes: Sequence[Mapping[str, Any]]) -> AdapterSpec:
    """Its report tells of the chat, and its size counts it: the database keeps it as long as the version."""
    checks = [*spec.report["checks"], *map(dict, notes)]
    num_bytes = spec.num_bytes + (0 if chat is None else len(chat.canonical))
    return replace(spec, report=spec.report | {"checks": checks}, num_bytes=num_bytes)


def take_known_order(
    database: Database, store: Store, tenant_id: str, name: str, staging: Staging, spec: AdapterSpec
) -> AdapterSpec:
    """Where the name has a version of the same tensors and of a config that differs only in the order of a set, give
    the upload that version's config and digest: PEFT writes a set in another order each time that it saves. Raises
    StoreFull, StoreFailed, OSError."""
    norm = spec.report["norm"]
    if norm is None:  # its config is the very bytes of an earlier one
        return spec
    query = (
        select(AdapterVersion.digest, AdapterVersion.report["norm"])
        .where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name, LIVING)
        .where(AdapterVersion.rank == spec.rank, AdapterVersion.state != "corrupt")
        .order_by(AdapterVersion.number.desc())
        .limit(_MAX_COMPARED)
    )
    with database.read() as session:
        # Of a series' version the norms may not have been measured.
        alike = [digest for digest, its in session.execute(query) if its is None or its == norm]
    if not alike or spec.digest in alike:
        return spec
    given = read_raw_config(staging.config_path)
    for digest in alike:
        raw = _same_config(store, digest, given, staging.tensors_path)
        if raw is not None:
            with disk_failures_named():
                staging.config_path.write_bytes(raw)
            return replace(spec, digest=digest)
    return spec


def _same_config(store: Store, digest: str, given: bytes, tensors_path: Path) -> bytes | None:
    """The config of a stored adapter, if it differs from the one `given` in an order alone and the tensors are
    equal."""
    with contextlib.suppress(LoraplexError, OSError):
        folder = store.path(digest)
        raw = read_raw_config(folder / CONFIG_NAME)
        # Other tensors are most often found by their first values, and equal ones are proven by the digest.
        if (
            is_equal_but_for_order(given, raw)
            and cmp(tensors_path, folder / TENSORS_NAME, shallow=False)
            and digest_upload(folder / CONFIG_NAME, tensors_path) == digest
        ):
            return raw
    return None


def flush_staged(staging: Staging) -> None:
    """Wait until an upload's two files are on the disk. Raises StoreFull, StoreFailed, OSError."""
    with disk_failures_named():
        for path in (staging.config_path, staging.tensors_path):
            with open_regular(path) as file:
                staging.fault(FaultPoint.FLUSH_STAGED, path)
                os.fsync(file.fileno())


def find_alike(
    session: Session,
    tenant_id: str,
    name: str,
    digest: str,
    base: BaseSpec,
    serving: Serving,
    outputs: Outputs,
) -> AdapterVersion | None:
    """The living version of a name that has the same bytes and is served alike."""
    of = AdapterVersion
    alike = session.scalars(
        select(of).where(
            of.tenant_id == tenant_id,
            of.name == name,
            of.digest == digest,
            of.base_fingerprint == base.fingerprint,
            of.tool_format.is_not_distinct_from(serving.tool_format),
            of.reasoning_format.is_not_distinct_from(serving.reasoning_format),
            of.chat_digest.is_not_distinct_from(serving.chat_digest),
            of.alora.is_not_distinct_from(serving.alora),
            LIVING,
        )
    )
    return next((row for row in alike if (row.head, row.embedding) == outputs.as_json()), None)


def heal_alike(session: Session, digest: str, base_fingerprint: str, durable: bool) -> None:
    """The store has just got, or proven, the bytes of a digest: they are those of other names and tenants too."""
    of = AdapterVersion
    stale = or_(of.state == "corrupt", of.durable != durable)
    for row in session.scalars(select(of).where(of.digest == digest, LIVING, stale)):
        row.durable = durable
        if row.state == "corrupt":
            row.state = state_of(row, base_fingerprint)


def add_version(
    session: Session,
    tenant_id: str,
    name: str,
    base: BaseSpec,
    spec: AdapterSpec,
    serving: Serving,
    chat: OwnChat | None,
    outputs: Outputs,
    pending: dict[str, Any] | None,
    checked: Checked | None,
    durable: bool,
) -> AdapterVersion:
    """Add a version with the next number of its name. `pending` is of `pending_check`, None for one that is ready;
    `checked` and `durable` are those of `VersionInfo`."""
    now = database_now(session)
    head, embedding = outputs.as_json()
    adapter = session.get(Adapter, (tenant_id, name))
    if adapter is None:
        adapter = Adapter(tenant_id=tenant_id, name=name, last_number=0, created_at=now)
        session.add(adapter)
    adapter.last_number += 1
    session.flush()
    row = AdapterVersion(
        tenant_id=tenant_id,
        name=name,
        number=adapter.last_number,
        digest=spec.digest,
        state="ready" if pending is None else "validating",
        rank=spec.rank,
        targets=list(spec.targets),
        bytes=spec.num_bytes,
        report=spec.report,
        base_fingerprint=base.fingerprint,
        pinned=False,
        created_at=now,
        tool_format=serving.tool_format,
        reasoning_format=serving.reasoning_format,
        chat_digest=serving.chat_digest,
        alora=serving.alora,
        invocation=list(spec.invocation) or None,
        head=head,
        embedding=embedding,
        chat=None if chat is None else chat.as_json(),
        pending_check=pending,
        checked=checked,
        durable=durable,
    )
    session.add(row)
    session.flush()
    return row


def note_upload(session: Session, by: Actor, info: VersionInfo, is_new: bool, source: str | None) -> None:
    """The same bytes again are an act too: they may have healed what was damaged."""
    shown = {
        "version": info.version,
        "digest": info.digest,
        "bytes": info.bytes,
        "rank": info.rank,
        "state": info.state,
        "is_new": is_new,
        "tool_format": info.serving.tool_format,
        "reasoning_format": info.serving.reasoning_format,
        "chat_digest": info.serving.chat_digest,
        "alora": info.serving.alora,
        "checked": info.checked,
        "release": release_shown(current_release(session, info.tenant_id, info.name)),
    } | ({} if source is None else {"source": source})
    target = f"{tenant_target(info.tenant_id)}/adapters/{info.name}/versions"
    record(session, by, "version.upload", target, tenant_id=info.tenant_id, after=shown)
