"""The one way by which an adapter's files become a version: uploaded, imported or loaded at run time.

Where the files come from is the caller's `Receive`. Whatever it is, they count for the tenant's quota before they are
written, they are validated alike, and the engine hears of the version.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

import anyio
import structlog

from loraplex.adapters.admission.chat_files import ChatFiles, read_chat_files
from loraplex.adapters.admission.safetensors_header import adapter_limits
from loraplex.adapters.archive.extract import extract_upload
from loraplex.admin.problem import Problem
from loraplex.admin.services import AdminServices, UploadGate
from loraplex.admin.uploads.multipart import Part
from loraplex.admin.uploads.receive import Received
from loraplex.admin.uploads.serving_field import check_serving
from loraplex.control.adapter_tags import check_added
from loraplex.control.agreement import DueAgreement, TrainerNumbers
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.staged import StagedUpload
from loraplex.control.types import VersionInfo
from loraplex.lifecycle.durability import no_place
from loraplex.serving.errors import ServingError
from loraplex.serving.text.own_chat import ChatFound

log = structlog.get_logger("loraplex.admin")


class Receive(Protocol):
    def __call__(
        self, *, threads: anyio.CapacityLimiter, staged: StagedUpload
    ) -> AbstractAsyncContextManager[Received]:
        """Puts an adapter's files into a staging folder. `staged` hears of sizes before they are written; what writes
        runs in `threads`."""
        ...


async def admit_version(
    services: AdminServices,
    tenant: str,
    name: str,
    receive: Receive,
    *,
    by: Actor,
    source: str | None = None,
    release: bool = False,
    wait: bool = True,
    measured: bool = True,
    durable_first: bool = True,
    compared: bool = False,
    tags: Sequence[str] = (),
) -> tuple[VersionInfo, bool]:
    """The version that the received files are, and whether it is new. `source` and `release` are those of
    `Catalog.admit`. With `wait` it is ready; otherwise it may be `validating`, and is checked in the background.
    `measured` is that of `VersionChecks.wait`. Without `durable_first` the bytes may reach the disk later, where this
    server flushes in the background and has a place for them. `compared` is that of `Catalog.check_upload`,
    `tags` those that the adapter gets beside its own.

    Raises Problem: 503 where too many uploads are on their way, 429 where a series takes no more pushes now. Raises
    what `receive`, `Catalog.check_upload` and `Catalog.admit` raise, and with `wait` what `VersionChecks.wait` and
    `AgreementChecks.confirm` raise, which have `VersionChecks.wait_s` together.
    """
    gate = services.upload_gate
    room = await services.database.run(
        partial(services.catalog.check_upload, compared=compared), tenant, name, by
    )
    if tags:
        await services.database.run(check_added, services.database, tenant, name, tags)
    quota = await services.database.run(services.series.quota, tenant, name)
    if quota is not None:
        services.change_limit.charge_push(tenant, name, quota)
    with _slot(gate, tenant), gate.staged.upload(tenant, name, room) as staged:
        async with receive(threads=gate.writers, staged=staged) as received:
            files = await gate.validators.run(tenant, _unpack, services, staged, received)
            chat = (
                ChatFound() if files is None else await services.examine_chat(tenant, files, received.serving)
            )
            admitted = partial(
                _admit, services, staged, received, chat, by, source, release, durable_first, tags
            )
            info, is_new = await gate.validators.run(tenant, admitted)
    if info.state != "validating":
        # It is asked for soon, if only to try it.
        services.engine.prefetch([info.ref()])
    await _pin_again(services, info.digest)
    waits_until = time.monotonic() + services.checks.wait_s
    if info.state == "validating":
        if not wait:
            services.checks.start(info)
            return info, is_new
        info = await services.checks.wait(info, measured=measured)
        if is_new:
            return info, is_new
    if received.numbers is not None and not is_new:
        left_s = waits_until - time.monotonic()
        info = await _confirm(services, info, received.numbers, by, left_s)
    if is_new and services.surplus is not None:
        await services.surplus.after(info, by)
    return info, is_new


def _unpack(services: AdminServices, staged: StagedUpload, received: Received) -> ChatFiles | None:
    """The upload's files are in its staging folder then. Returns what they say of its chats. Runs in a worker
    thread."""
    staging = received.staging
    check_serving(received.serving, services.check_formats)
    if Part.ARCHIVE in received.parts:
        extract_upload(
            staging.archive_path,
            staging.directory,
            max_bytes=services.max_upload_bytes,
            fault=staging.fault,
            reserve=staged.unpack,
            limits=adapter_limits(services.catalog.base),
        )
    return read_chat_files(staging.directory)


def _admit(
    services: AdminServices,
    staged: StagedUpload,
    received: Received,
    chat: ChatFound,
    by: Actor,
    source: str | None,
    release: bool,
    durable_first: bool,
    tags: Sequence[str],
) -> tuple[VersionInfo, bool]:
    """Runs in a worker thread."""
    durability = None if durable_first else services.durability
    with no_place() if durability is None else durability.place(staged.size) as place:
        info, is_new = services.catalog.admit(
            staged.tenant_id,
            staged.name,
            received.staging,
            serving=received.serving,
            chat=chat.own,
            notes=chat.checks,
            source=source,
            release=release,
            check=True,
            durable=not place.is_free,
            numbers=received.numbers,
            tags=tags,
            by=by,
        )
        if not info.durable:
            place.put(info.digest)
    staged.admitted(info.bytes if is_new else 0)
    return info, is_new


async def _confirm(
    services: AdminServices, info: VersionInfo, numbers: TrainerNumbers, by: Actor, wait_s: float
) -> VersionInfo:
    """Hold what was pushed again to the numbers that came with it: they may be those of other weights. Raises as
    `AgreementChecks.confirm`."""
    within = (await services.database.run(services.series.get, info.tenant_id, info.name)).rules.agree_within
    if within is None:
        return info
    return await services.checks.agreements.confirm(info, DueAgreement(numbers, within), by, wait_s=wait_s)


async def _pin_again(services: AdminServices, digest: str) -> None:
    """Versions that were pinned while their bytes were damaged have them again. The engine drops a pin with the
    damage; to it, one that it has is nothing new."""
    for other in await services.database.run(services.catalog.pinned):
        if other.digest == digest:
            try:
                await services.engine.pin(other.ref())
            except ServingError as error:
                log.warning("pin_failed", adapter=f"{other.name}@{other.version}", reason=error.message)


@contextlib.contextmanager
def _slot(gate: UploadGate, tenant: str) -> Iterator[None]:
    if not gate.uploads.acquire(tenant, gate.max_uploads):
        held = gate.uploads.held(tenant)
        detail = f"Too many uploads are on their way, {held} of them for this tenant; try again."
        raise Problem("server_overloaded", detail, retry_after_s=5)
    try:
        yield
    finally:
        gate.uploads.release(tenant)
