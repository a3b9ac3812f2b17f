"""/tenants/{tenant}/adapters and /tenants/{tenant}/adapters/{name}."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from loraplex.admin.framework.dependencies import AdapterName, Audited, Reader, Services, TenantId, Writer
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.routes.releases import show_release
from loraplex.admin.schemas.adapters import Adapter, AdapterPage, AdapterQuery
from loraplex.admin.services import AdminServices
from loraplex.control.errors import ReleaseNotFound
from loraplex.control.types import AdapterInfo
from loraplex.lifecycle.eviction import evict_removed

router = APIRouter(prefix="/tenants/{tenant}/adapters", route_class=AdminRoute)


@router.get("")
async def list_adapters(
    _: Reader, tenant: TenantId, query: Annotated[AdapterQuery, Query()], services: Services
) -> AdapterPage:
    """List a tenant's adapters by name, with what is released."""

    def read_page() -> AdapterPage:
        page = services.catalog.list_adapters(
            tenant, limit=query.limit, cursor=query.cursor, search=query.search
        )
        return AdapterPage(data=[_show(services, info) for info in page.items], next_cursor=page.next_cursor)

    return await services.database.run(read_page)


@router.get("/{name}")
async def get_adapter(_: Reader, tenant: TenantId, name: AdapterName, services: Services) -> Adapter:
    """Show an adapter."""
    return await services.database.run(lambda: _show(services, services.catalog.get_adapter(tenant, name)))


@router.delete("/{name}", status_code=204, response_class=Response)
async def delete_adapter(
    tenant: TenantId,
    name: AdapterName,
    by: Annotated[Writer, Audited("adapter.delete")],
    services: Services,
) -> None:
    """Delete an adapter with all its versions; what runs finishes."""
    delete = partial(services.catalog.delete_adapter, by=by)
    await evict_removed(services, await services.database.run(delete, tenant, name))


def _show(services: AdminServices, info: AdapterInfo) -> Adapter:
    try:
        release = show_release(services.releases.get(info.tenant_id, info.name))
    except ReleaseNotFound:
        release = None
    return Adapter(
        name=info.name,
        num_versions=info.num_versions,
        latest_version=f"v{info.latest}",
        release=release,
        created_at=info.created_at,
    )
