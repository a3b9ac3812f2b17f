"""/adapters of all tenants, /tenants/{tenant}/adapters and /tenants/{tenant}/adapters/{name}."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, cast

from fastapi import APIRouter, Query, Response

from loraplex.admin.framework.dependencies import (
    AdapterName,
    Audited,
    Operator,
    Reader,
    Services,
    TenantId,
    Writer,
)
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.routes.engine import residency
from loraplex.admin.routes.releases import show_release
from loraplex.admin.schemas.adapters import (
    Adapter,
    AdapterChange,
    AdapterPage,
    AdapterQuery,
    OverviewPage,
    OverviewQuery,
    OverviewRow,
    OverviewTarget,
    OverviewTotals,
)
from loraplex.admin.services import AdminServices
from loraplex.control.adapter_tags import TagEdit
from loraplex.control.errors import ReleaseNotFound
from loraplex.control.release_types import RunStatus
from loraplex.control.types import AdapterInfo, VersionState
from loraplex.control.usage.overview import OverviewFilter, Summary
from loraplex.lifecycle.eviction import evict_removed
from loraplex.serving.errors import ServingError

operator_router = APIRouter(route_class=AdminRoute)
router = APIRouter(prefix="/tenants/{tenant}/adapters", route_class=AdminRoute)


@operator_router.get("/adapters")
async def list_all_adapters(
    caller: Operator, query: Annotated[OverviewQuery, Query()], services: Services
) -> OverviewPage:
    """List adapters of all tenants, with what was asked of them lately; sums over all pages."""
    base = services.catalog.base.fingerprint
    read = partial(
        services.overviews.read,
        OverviewFilter(
            query.tenant,
            query.state,
            query.release,
            query.base,
            query.search,
            query.tag,
            query.min_errors,
            query.min_error_rate,
        ),
        since=datetime.now(UTC) - timedelta(hours=query.hours) if query.hours else None,
        sort=query.sort,
        descending=query.order == "desc",
        limit=query.limit,
        cursor=query.cursor,
    )
    found = await services.report_gate.run(caller.tenant_id or "", read)
    tiers = await _tiers(services, {row.digest for row in found.page.items})
    return OverviewPage(
        data=[_show_summary(row, base, tiers) for row in found.page.items],
        next_cursor=found.page.next_cursor,
        totals=OverviewTotals(
            adapters=sum(found.totals.states.values()),
            states=found.totals.states,
            bytes=found.totals.bytes,
            requests=found.totals.requests,
            errors=found.totals.errors,
            tokens=found.totals.tokens,
        ),
    )


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


@router.patch("/{name}")
async def update_adapter(
    tenant: TenantId,
    name: AdapterName,
    body: AdapterChange,
    by: Annotated[Writer, Audited("adapter.update")],
    services: Services,
) -> Adapter:
    """Give an adapter other tags, or add and remove some."""

    def change() -> Adapter:
        tags = body.tags if "tags" in body.model_fields_set else TagEdit(body.add, body.remove)
        return _show(services, services.catalog.set_tags(tenant, name, tags, by=by))

    return await services.database.run(change)


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


async def _tiers(services: AdminServices, digests: set[str]) -> dict[str, list[str]] | None:
    """The tiers of those that the engine knows, by digest; None while it is away."""
    try:
        return {entry.ref.digest: residency(entry) for entry in await services.engine.cache(digests)}
    except ServingError:
        return None


def _show_summary(row: Summary, base: str, tiers: dict[str, list[str]] | None) -> OverviewRow:
    return OverviewRow(
        tenant=row.tenant_id,
        name=row.name,
        tags=list(row.tags),
        version=f"v{row.newest}",
        state=cast(VersionState, row.state),
        compatible=row.base_fingerprint == base,
        num_versions=row.num_versions,
        bytes=row.bytes,
        pinned=row.pinned,
        created_at=row.created_at,
        released=[
            OverviewTarget(
                version=target.version, weight=target.weight, state=cast(VersionState, target.state)
            )
            for target in row.targets
        ],
        run=cast(RunStatus | None, row.run),
        requests=row.requests,
        errors=row.errors,
        tokens=row.tokens,
        first_token_seconds=row.first_token_s,
        last_used_at=row.last_used_at,
        residency=None if tiers is None else tiers.get(row.digest, residency(None)),
    )


def _show(services: AdminServices, info: AdapterInfo) -> Adapter:
    try:
        release = show_release(services.releases.get(info.tenant_id, info.name))
    except ReleaseNotFound:
        release = None
    return Adapter(
        name=info.name,
        tags=list(info.tags),
        num_versions=info.num_versions,
        latest_version=f"v{info.latest}",
        release=release,
        created_at=info.created_at,
    )
