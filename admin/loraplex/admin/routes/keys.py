"""/tenants/{tenant}/keys."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import (
    Key,
    KeyChange,
    KeyCreate,
    KeyPage,
    KeyRotate,
    KeyWithSecret,
    Limits,
    PageQuery,
)
from loraplex.admin.services import AdminServices
from loraplex.control.types import KeyInfo, Scope


def key_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    async def create_key(call: Call) -> Answer:
        body = call.body(KeyCreate)
        create = partial(
            services.keys.create,
            name=body.name,
            scopes=body.scopes,
            models=body.models,
            limits=body.limits.model_dump(exclude_unset=True),
            expires_at=body.expires_at,
            by=call.actor,
        )
        made, secret = await run(create, call.path["tenant"])
        return Answer(KeyWithSecret(**_fields(made), secret=secret), 201)

    async def list_keys(call: Call) -> Answer:
        query = call.query(PageQuery)
        list_page = partial(services.keys.list, limit=query.limit, cursor=query.cursor)
        page = await run(list_page, call.path["tenant"])
        return Answer(KeyPage(data=[Key(**_fields(row)) for row in page.items], next_cursor=page.next_cursor))

    async def update_key(call: Call) -> Answer:
        changes = call.body(KeyChange).model_dump(exclude_unset=True)
        update = partial(services.keys.update, changes=changes, by=call.actor)
        return Answer(Key(**_fields(await run(update, call.path["tenant"], call.path["key"]))))

    async def rotate_key(call: Call) -> Answer:
        grace_seconds = call.body(KeyRotate).grace_seconds
        rotate = partial(services.keys.rotate, grace_seconds=grace_seconds, by=call.actor)
        made, secret = await run(rotate, call.path["tenant"], call.path["key"])
        return Answer(KeyWithSecret(**_fields(made), secret=secret))

    async def revoke_key(call: Call) -> Answer:
        revoke = partial(services.keys.revoke, by=call.actor)
        await run(revoke, call.path["tenant"], call.path["key"])
        return Answer(status=204)

    all_keys, one = "/tenants/{tenant}/keys", "/tenants/{tenant}/keys/{key}"
    return [
        Operation(
            "POST",
            all_keys,
            "operator",
            create_key,
            "Create a key. Its secret is in this answer and never again.",
            {201: KeyWithSecret},
            body=KeyCreate,
            body_optional=True,
            action="key.create",
        ),
        Operation(
            "GET",
            all_keys,
            "operator",
            list_keys,
            "List keys, without their secrets.",
            {200: KeyPage},
            query=PageQuery,
        ),
        Operation(
            "PATCH",
            one,
            "operator",
            update_key,
            "Change a key's name, scopes, models, limits or end.",
            {200: Key},
            body=KeyChange,
            action="key.update",
        ),
        Operation(
            "POST",
            f"{one}/rotate",
            "operator",
            rotate_key,
            "Replace a key's secret; the old one works for the grace time.",
            {200: KeyWithSecret},
            body=KeyRotate,
            body_optional=True,
            action="key.rotate",
        ),
        Operation(
            "DELETE",
            one,
            "operator",
            revoke_key,
            "Revoke a key at once, for ever.",
            {204: None},
            action="key.revoke",
        ),
    ]


def _fields(info: KeyInfo) -> dict[str, Any]:
    return dataclasses.asdict(info) | {
        "scopes": cast("list[Scope]", list(info.scopes)),
        "models": None if info.models is None else list(info.models),
        "limits": Limits(**dataclasses.asdict(info.limits)),
    }
