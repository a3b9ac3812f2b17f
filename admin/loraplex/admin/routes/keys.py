"""/tenants/{tenant}/keys."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from loraplex.admin.framework.dependencies import Audited, KeyId, Operator, Services, TenantId
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.keys import (
    Key,
    KeyChange,
    KeyCreate,
    KeyPage,
    KeyQuery,
    KeyRotate,
    KeyWithSecret,
)

router = APIRouter(prefix="/tenants/{tenant}/keys", route_class=AdminRoute)

_DEFAULT_KEY, _AT_ONCE = KeyCreate(), KeyRotate()


@router.post("", status_code=201)
async def create_key(
    tenant: TenantId,
    by: Annotated[Operator, Audited("key.create")],
    services: Services,
    body: KeyCreate = _DEFAULT_KEY,
) -> KeyWithSecret:
    """Create a key. Its secret is in this answer and never again."""
    create = partial(
        services.keys.create,
        name=body.name,
        scopes=body.scopes,
        models=body.models,
        limits=body.limits.model_dump(exclude_unset=True),
        expires_at=body.expires_at,
        by=by,
    )
    made, secret = await services.database.run(create, tenant)
    return KeyWithSecret(**dict(Key.of(made)), secret=secret)


@router.get("")
async def list_keys(
    _: Operator, tenant: TenantId, query: Annotated[KeyQuery, Query()], services: Services
) -> KeyPage:
    """List keys, without their secrets."""
    list_page = partial(
        services.keys.list, limit=query.limit, cursor=query.cursor, newest_first=query.order == "newest"
    )
    page = await services.database.run(list_page, tenant)
    return KeyPage(data=[Key.of(row) for row in page.items], next_cursor=page.next_cursor)


@router.patch("/{key}")
async def update_key(
    tenant: TenantId,
    key: KeyId,
    body: KeyChange,
    by: Annotated[Operator, Audited("key.update")],
    services: Services,
) -> Key:
    """Change a key's name, scopes, models, limits or end."""
    update = partial(services.keys.update, changes=body.model_dump(exclude_unset=True), by=by)
    return Key.of(await services.database.run(update, tenant, key))


@router.post("/{key}/rotate")
async def rotate_key(
    tenant: TenantId,
    key: KeyId,
    by: Annotated[Operator, Audited("key.rotate")],
    services: Services,
    body: KeyRotate = _AT_ONCE,
) -> KeyWithSecret:
    """Replace a key's secret; the old one works for the grace time."""
    rotate = partial(services.keys.rotate, grace_seconds=body.grace_seconds, by=by)
    made, secret = await services.database.run(rotate, tenant, key)
    return KeyWithSecret(**dict(Key.of(made)), secret=secret)


@router.delete("/{key}", status_code=204, response_class=Response)
async def revoke_key(
    tenant: TenantId, key: KeyId, by: Annotated[Operator, Audited("key.revoke")], services: Services
) -> None:
    """Revoke a key at once, for good."""
    await services.database.run(partial(services.keys.revoke, by=by), tenant, key)
