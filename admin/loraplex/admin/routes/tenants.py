"""/tenants."""

from __future__ import annotations

import dataclasses
from functools import partial

from loraplex.admin.forget import forget
from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import (
    BudgetState,
    Erased,
    Kept,
    Limits,
    PageQuery,
    Tenant,
    TenantChange,
    TenantCreate,
    TenantDeleted,
    TenantPage,
)
from loraplex.admin.services import AdminServices
from loraplex.control.types import TenantInfo, TenantRemoval


def tenant_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    async def create_tenant(call: Call) -> Answer:
        body = call.body(TenantCreate)
        create = partial(
            services.tenants.create,
            display_name=body.display_name,
            weight=body.weight,
            limits=body.limits.model_dump(exclude_unset=True),
            by=call.actor,
        )
        made = await run(create, body.id)
        return Answer(_show(made), 201, {"Location": f"/admin/v1/tenants/{made.id}"})

    async def list_tenants(call: Call) -> Answer:
        query = call.query(PageQuery)
        page = await run(partial(services.tenants.list, limit=query.limit, cursor=query.cursor))
        return Answer(TenantPage(data=[_show(row) for row in page.items], next_cursor=page.next_cursor))

    async def get_tenant(call: Call) -> Answer:
        return Answer(_show(await run(services.tenants.get, call.path["tenant"])))

    async def update_tenant(call: Call) -> Answer:
        changes = call.body(TenantChange).model_dump(exclude_unset=True)
        update = partial(services.tenants.update, changes=changes, by=call.actor)
        return Answer(_show(await run(update, call.path["tenant"])))

    async def delete_tenant(call: Call) -> Answer:
        removal = await run(partial(services.tenants.delete, by=call.actor), call.path["tenant"])
        await forget(services, removal)
        return Answer(_show_removal(removal))

    one = "/tenants/{tenant}"
    return [
        Operation(
            "POST",
            "/tenants",
            "operator",
            create_tenant,
            "Create a tenant.",
            {201: Tenant},
            body=TenantCreate,
            action="tenant.create",
        ),
        Operation(
            "GET",
            "/tenants",
            "operator",
            list_tenants,
            "List tenants by id.",
            {200: TenantPage},
            query=PageQuery,
        ),
        Operation("GET", one, "operator", get_tenant, "Show a tenant.", {200: Tenant}),
        Operation(
            "PATCH",
            one,
            "operator",
            update_tenant,
            "Change a tenant.",
            {200: Tenant},
            body=TenantChange,
            action="tenant.update",
        ),
        Operation(
            "DELETE",
            one,
            "operator",
            delete_tenant,
            "Delete a tenant with its keys, adapters and texts; what runs finishes. Says what is erased and kept.",
            {200: TenantDeleted},
            action="tenant.delete",
        ),
    ]


def _show(info: TenantInfo) -> Tenant:
    return Tenant(
        id=info.id,
        display_name=info.display_name,
        weight=info.weight,
        limits=Limits(**dataclasses.asdict(info.limits)),
        budget=None if info.budget is None else BudgetState(**dataclasses.asdict(info.budget)),
        created_at=info.created_at,
    )


def _show_removal(removal: TenantRemoval) -> TenantDeleted:
    return TenantDeleted(
        id=removal.tenant_id,
        deleted=True,
        erased=Erased(
            keys=removal.num_keys,
            adapters=removal.num_adapters,
            versions=removal.num_versions,
            artifacts=len(removal.digests),
            artifact_bytes=removal.num_bytes,
            audit_texts=removal.num_texts,
        ),
        kept=Kept(
            usage_since=removal.usage_since,
            audit_rows=removal.num_audit_rows,
            shared_artifacts=removal.num_shared_artifacts,
        ),
    )
