"""/tenants/{tenant}/adapters/{name}/versions/{version}/archive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import anyio.to_thread
import structlog
from starlette.responses import Response

from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, LoraplexError
from loraplex.adapters.stored_archive import MEDIA_TYPE, StoredArchive
from loraplex.admin.download import Download
from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.problem import Problem
from loraplex.admin.routes.versions import version_path
from loraplex.admin.services import AdminServices
from loraplex.control.errors import AdapterUnavailable
from loraplex.control.types import VersionInfo
from loraplex.serving.errors import ServingError

log = structlog.get_logger("loraplex.admin")


def archive_operations(services: AdminServices) -> list[Operation]:
    run, gate = services.database.run, services.download_gate

    async def get_archive(call: Call) -> Answer:
        info = await run(services.catalog.get_living, *version_path(call))
        if info.state == "corrupt":
            raise _damaged(info)
        give_back = _slot(call.path["tenant"])
        try:
            return Answer(response=await respond(call, info, give_back))
        except BaseException:
            give_back()
            raise

    def _slot(tenant: str) -> Callable[[], None]:
        if not gate.downloads.take(tenant, gate.max_downloads):
            held = gate.downloads.held(tenant)
            detail = f"Too many downloads are on their way, {held} of them for this tenant; try again."
            raise Problem("server_overloaded", detail, retry_after_s=5)
        return partial(gate.downloads.give_back, tenant)

    async def respond(call: Call, info: VersionInfo, give_back: Callable[[], None]) -> Response:
        headers = {
            "Content-Disposition": f'attachment; filename="{info.name}-{info.version}.tar"',
            "Cache-Control": "no-store",
        }
        archive, first = await opened(call, info)
        if call.request.method == "HEAD":
            archive.close()
            give_back()
            return Response(None, 200, {**headers, "Content-Length": str(archive.num_bytes)}, MEDIA_TYPE)

        def close() -> None:
            archive.close()
            give_back()

        async def cut(error: LoraplexError) -> None:
            log.error("download_cut", adapter=f"{info.name}@{info.version}", reason=error.message)
            await report(error, info.digest)

        return Download(
            first,
            lambda: in_thread(archive.read),
            num_bytes=archive.num_bytes,
            headers=headers,
            media_type=MEDIA_TYPE,
            on_failure=cut,
            close=close,
        )

    async def opened(call: Call, info: VersionInfo) -> tuple[StoredArchive, bytes]:
        """What is damaged at its beginning is an answer that says so."""

        def open_and_read() -> tuple[StoredArchive, bytes]:
            archive = StoredArchive(services.artifacts.store.path(info.digest), info.digest)
            try:
                return archive, archive.read()
            except BaseException:
                archive.close()
                raise

        try:
            return await in_thread(open_and_read)
        except (ArtifactMissing, ArtifactCorrupt) as error:
            await report(error, info.digest)
            await run(services.catalog.get_living, *version_path(call))  # or it was deleted just now
            raise _damaged(info) from error

    async def report(error: LoraplexError, digest: str) -> None:
        """The catalog looks for itself; who deletes a version takes its bytes away too."""
        if isinstance(error, ArtifactMissing | ArtifactCorrupt):
            try:
                damaged = await run(services.catalog.mark_damaged, digest)
            except LoraplexError as failure:
                log.warning("damage_not_recorded", digest=digest, reason=failure.message)
                return
            if damaged:
                # Nothing asks for it any more; a pin would have it read over and over.
                with contextlib.suppress(ServingError):
                    await services.engine.drop(digest)

    in_thread = partial(anyio.to_thread.run_sync, limiter=gate.readers)
    return [
        Operation(
            "GET",
            "/tenants/{tenant}/adapters/{name}/versions/{version}/archive",
            "adapters:read",
            get_archive,
            "Download a version's two files as they were uploaded, as a tar.",
            {200: None},
            file_type=MEDIA_TYPE,
        )
    ]


def _damaged(info: VersionInfo) -> AdapterUnavailable:
    return AdapterUnavailable(
        f"The stored bytes of {info.name}@{info.version} are damaged or lost; upload the same files again to mend them."
    )
