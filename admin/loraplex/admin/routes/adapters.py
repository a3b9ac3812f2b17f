"""/tenants/{tenant}/adapters and /tenants/{tenant}/adapters/{name}."""

from __future__ import annotations

from functools import partial

from loraplex.admin.forget import forget
from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.routes.releases import show_release
from loraplex.admin.schemas import Adapter, AdapterPage, PageQuery
from loraplex.admin.services import AdminServices
from loraplex.control.errors import ReleaseNotFound
from loraplex.control.types import AdapterInfo


def adapter_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    def show(info: AdapterInfo) -> Adapter:
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

    def read_page(tenant: str, query: PageQuery) -> AdapterPage:
        page = services.catalog.list_adapters(tenant, limit=query.limit, cursor=query.cursor)
        return AdapterPage(data=[show(info) for info in page.items], next_cursor=page.next_cursor)

    async def list_adapters(call: Call) -> Answer:
        return Answer(await run(read_page, call.path["tenant"], call.query(PageQuery)))

    async def get_adapter(call: Call) -> Answer:
        get = partial(services.catalog.get_adapter, call.path["tenant"], call.path["name"])
        return Answer(await run(lambda: show(get())))

    async def delete_adapter(call: Call) -> Answer:
        delete = partial(services.catalog.delete_adapter, by=call.actor)
        await forget(services, await run(delete, call.path["tenant"], call.path["name"]))
        return Answer(status=204)

    one = "/tenants/{tenant}/adapters/{name}"
    return [
        Operation(
            "GET",
            "/tenants/{tenant}/adapters",
            "adapters:read",
            list_adapters,
            "List a tenant's adapters by name, with what is released.",
            {200: AdapterPage},
            query=PageQuery,
        ),
        Operation("GET", one, "adapters:read", get_adapter, "Show an adapter.", {200: Adapter}),
        Operation(
            "DELETE",
            one,
            "adapters:write",
            delete_adapter,
            "Delete an adapter with all its versions; what runs finishes.",
            {204: None},
            action="adapter.delete",
        ),
    ]
