"""/tenants/{tenant}/adapters/{name}/release/shadow/texts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from loraplex.admin.framework.dependencies import AdapterName, Reader, Services, TenantId
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.shadow_texts import ShadowQuery, ShadowSample, ShadowSamples
from loraplex.control.catalog.shadow_store import ShadowStore, began_of
from loraplex.control.release_types import ShadowTexts

router = APIRouter(prefix="/tenants/{tenant}/adapters/{name}/release/shadow", route_class=AdminRoute)


@router.get("/texts")
async def list_shadow_texts(
    _: Reader,
    tenant: TenantId,
    name: AdapterName,
    services: Services,
    query: Annotated[ShadowQuery, Query()],
) -> ShadowSamples:
    """List prompts with the answers of both versions, of the samples of the release in force, where its shadow keeps
    texts."""

    def read() -> list[ShadowTexts]:
        began = began_of(services.releases.get(tenant, name))
        return ShadowStore(services.database).texts(tenant, name, began, limit=query.limit)

    return ShadowSamples(data=[ShadowSample.of(text) for text in await services.database.run(read)])
