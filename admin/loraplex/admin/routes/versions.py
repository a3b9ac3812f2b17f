"""/tenants/{tenant}/adapters/{name}/versions and what hangs below it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial

import anyio
import anyio.to_thread
import structlog

from loraplex.adapters.archive import extract_upload
from loraplex.adapters.files import shown
from loraplex.adapters.store import Staging
from loraplex.admin import described
from loraplex.admin.forget import forget, unpin_unused
from loraplex.admin.multipart import Part
from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.problem import Problem
from loraplex.admin.schemas import PageQuery, Pin, Version, VersionPage
from loraplex.admin.services import AdminServices, UploadGate
from loraplex.admin.upload import receive_upload
from loraplex.control.audit import Actor
from loraplex.control.errors import ControlError, VersionNotFound
from loraplex.control.staged import StagedUpload
from loraplex.control.types import VersionInfo
from loraplex.serving.errors import EngineUnavailable, ServingError

log = structlog.get_logger("loraplex.admin")


def version_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run
    gate = services.upload_gate

    async def push_version(call: Call) -> Answer:
        tenant, name = call.path["tenant"], call.path["name"]
        room = await run(services.catalog.check_upload, tenant, name)
        with _slot(gate, tenant), gate.staged.upload(tenant, name, room) as staged:
            async with receive_upload(
                call.request,
                services.artifacts.store,
                max_bytes=services.max_upload_bytes,
                threads=gate.writers,
                staged=staged,
            ) as (staging, parts):
                admitted = partial(admit, staged, staging, parts, call.actor)
                info, is_new = await anyio.to_thread.run_sync(admitted, limiter=gate.validators)
        await pin_healed(info.digest)
        # It is asked for soon, if only to try it.
        services.engine.prefetch([info.ref()])
        location = f"/admin/v1/tenants/{tenant}/adapters/{name}/versions/{info.version}"
        return Answer(_show(info), 201 if is_new else 200, {"Location": location})

    def admit(
        staged: StagedUpload, staging: Staging, parts: frozenset[Part], by: Actor
    ) -> tuple[VersionInfo, bool]:
        if Part.ARCHIVE in parts:
            extract_upload(
                staging.archive_path,
                staging.directory,
                max_bytes=services.max_upload_bytes,
                fault=staging.fault,
                reserve=staged.unpack,
            )
        info, is_new = services.catalog.admit(staged.tenant_id, staged.name, staging, by=by)
        staged.admitted(info.bytes if is_new else 0)
        return info, is_new

    async def pin_healed(digest: str) -> None:
        """Versions that were pinned while their bytes were damaged have them again. The engine drops a pin with the
        damage; to it, one that it has is nothing new."""
        for other in await run(services.catalog.pinned):
            if other.digest == digest:
                try:
                    await services.engine.pin(other.ref())
                except ServingError as error:
                    log.warning("pin_failed", adapter=f"{other.name}@{other.version}", reason=error.message)

    async def list_versions(call: Call) -> Answer:
        query = call.query(PageQuery)
        read = partial(services.catalog.list_versions, limit=query.limit, cursor=query.cursor)
        page = await run(read, call.path["tenant"], call.path["name"])
        return Answer(VersionPage(data=[_show(row) for row in page.items], next_cursor=page.next_cursor))

    async def get_version(call: Call) -> Answer:
        return Answer(_show(await run(services.catalog.get_version, *version_path(call))))

    async def delete_version(call: Call) -> Answer:
        delete = partial(services.catalog.delete_version, by=call.actor)
        await forget(services, await run(delete, *version_path(call)))
        return Answer(status=204)

    async def pin_version(call: Call) -> Answer:
        info = await run(services.catalog.get_version, *version_path(call))
        if info.state != "ready":
            raise Problem(
                "conflict", f"{info.name}@{info.version} is {info.state}; only a ready version is pinned."
            )
        # The engine first: a pin that it refuses, for want of room, must not come back at its next start.
        try:
            await services.engine.pin(info.ref())
        except EngineUnavailable:
            raise
        except ServingError as error:
            raise Problem("conflict", f"The engine does not pin it: {error.message}") from error
        try:
            set_pin = partial(services.catalog.set_pin, pinned=True, by=call.actor)
            return Answer(_pinned(await run(set_pin, *version_path(call))))
        except ControlError:  # deleted in this moment
            await services.engine.unpin(info.digest)
            raise

    async def unpin_version(call: Call) -> Answer:
        set_pin = partial(services.catalog.set_pin, pinned=False, by=call.actor)
        info = await run(set_pin, *version_path(call))
        await unpin_unused(services, info.digest)
        return Answer(_pinned(info))

    versions = "/tenants/{tenant}/adapters/{name}/versions"
    one = f"{versions}/{{version}}"
    return [
        Operation(
            "POST",
            versions,
            "adapters:write",
            push_version,
            "Upload an adapter as the next version of a name. The same bytes again are the version that has them.",
            {201: Version, 200: Version},
            upload=True,
            action="version.upload",
        ),
        Operation(
            "GET",
            versions,
            "adapters:read",
            list_versions,
            "List an adapter's versions, deleted ones too.",
            {200: VersionPage},
            query=PageQuery,
        ),
        Operation(
            "GET", one, "adapters:read", get_version, "Show a version with its report.", {200: Version}
        ),
        Operation(
            "DELETE",
            one,
            "adapters:write",
            delete_version,
            "Delete a version; what runs finishes.",
            {204: None},
            action="version.delete",
        ),
        Operation(
            "PUT",
            f"{one}/pin",
            "adapters:write",
            pin_version,
            "Keep a version on the device.",
            {200: Pin},
            action="version.pin",
        ),
        Operation(
            "DELETE",
            f"{one}/pin",
            "adapters:write",
            unpin_version,
            "Let a version leave the device when room is needed.",
            {200: Pin},
            action="version.unpin",
        ),
    ]


@contextlib.contextmanager
def _slot(gate: UploadGate, tenant: str) -> Iterator[None]:
    if not gate.uploads.take(tenant, gate.max_uploads):
        held = gate.uploads.held(tenant)
        detail = f"Too many uploads are on their way, {held} of them for this tenant; try again."
        raise Problem("server_overloaded", detail, retry_after_s=5)
    try:
        yield
    finally:
        gate.uploads.give_back(tenant)


def version_path(call: Call) -> tuple[str, str, str]:
    """Tenant, name and version of the path. A version has one spelling, so that nothing compares amiss."""
    version = call.path["version"]
    if not re.fullmatch(described.VERSION, version):
        raise VersionNotFound(f"There is no version {shown(version)}; versions are named v1, v2, ….")
    return call.path["tenant"], call.path["name"], version


def _pinned(info: VersionInfo) -> Pin:
    return Pin(name=info.name, version=info.version, pinned=info.pinned)


def _show(info: VersionInfo) -> Version:
    return Version(
        name=info.name,
        version=info.version,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        targets=list(info.targets),
        bytes=info.bytes,
        pinned=info.pinned,
        base_fingerprint=info.base_fingerprint,
        created_at=info.created_at,
        report=info.report,
    )
