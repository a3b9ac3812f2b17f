"""Loading and unloading of adapters by the tenant's own key on the data port, with vLLM's two calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.admin.admission import admit_version
from loraplex.admin.framework.refusal_audit import audit_refusals
from loraplex.admin.problem import from_exception
from loraplex.admin.services import AdminServices
from loraplex.admin.uploads.imports import import_source
from loraplex.control.audit.recorder import Actor
from loraplex.control.errors import AdapterNotFound, DatabaseBusy, DatabaseUnavailable
from loraplex.control.types import VersionInfo
from loraplex.http.text import printable
from loraplex.lifecycle.eviction import evict_removed

_VERSIONS = "tenants/{tenant}/adapters/{name}/versions"
_ADAPTER = "tenants/{tenant}/adapters/{name}"

log = structlog.get_logger("loraplex.admin")


class RuntimeLoading:
    """Loading by a training loop through the data plane. Each call counts as a change of its tenant, and is audited as
    the admin routes' are."""

    def __init__(self, services: AdminServices) -> None:
        self._services = services
        self._note_refusal = audit_refusals(services)

    async def load(self, by: Actor, name: str, path: str) -> VersionInfo:
        """The adapter at `path` (a folder of the server, or a URL) as the next version of a name, released at once.
        Raises SourceNotAllowed, SourceNotFound, SourceUnavailable and what `admit_version` raises."""
        services, tenant = self._services, by.tenant_id or ""
        async with self._changing(by, "version.upload", _VERSIONS, name):
            source = services.sources.allow_path(path, tenant)
            receive = partial(
                import_source, source, services.artifacts.store, max_bytes=services.max_upload_bytes
            )
            # A training loop goes on with what is ready; nobody reads a report there.
            info, _ = await admit_version(
                services, tenant, name, receive, by=by, source=source.url, release=True, measured=False
            )
        return info

    async def unload(self, by: Actor, name: str) -> None:
        """Delete the name with all its versions; what runs finishes. A series keeps its rules: loops unload a name to
        load it again. Raises AdapterNotFound."""
        services, tenant = self._services, by.tenant_id or ""
        async with self._changing(by, "adapter.delete", _ADAPTER, name):
            if not name.isprintable():  # databases differ in the text that they accept
                raise AdapterNotFound("No adapter has such a name.")
            delete = partial(services.catalog.delete_adapter, keep_rules=True, by=by)
            await evict_removed(services, await services.database.run(delete, tenant, name))

    @asynccontextmanager
    async def _changing(self, by: Actor, action: str, path: str, name: str) -> AsyncIterator[None]:
        services, tenant = self._services, by.tenant_id or ""
        services.change_limit.charge_change(tenant)
        try:
            yield
        except (DatabaseUnavailable, DatabaseBusy):
            raise
        except Exception as error:
            try:
                names = {"tenant": tenant, "name": printable(name)}
                await self._note_refusal(by, action, path, names, from_exception(error))
            except LoraplexError as failure:
                log.warning("refusal_not_audited", action=action, reason=failure.message)
            raise
        services.on_change(action)
