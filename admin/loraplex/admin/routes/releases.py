"""/tenants/{tenant}/adapters/{name}/release."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.release_schemas import (
    ReleasePage,
    ReleaseRollback,
    RolledBackRelease,
    SkippedRevision,
)
from loraplex.admin.schemas import PageQuery, Release, ReleaseChange, ReleasePromote, Target
from loraplex.admin.services import AdminServices
from loraplex.control.types import ReleaseInfo, ReleaseTarget

T = TypeVar("T")


def release_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    async def get_release(call: Call) -> Answer:
        info = await run(services.releases.get, call.path["tenant"], call.path["name"])
        return Answer(show_release(info), headers=_etag(info))

    async def put_release(call: Call) -> Answer:
        body = call.body(ReleaseChange)
        targets = tuple(ReleaseTarget(target.version, target.weight) for target in body.targets)
        info = await change(call, partial(services.releases.put, targets=targets, sticky=body.sticky))
        return await released(show_release(info), info)

    async def promote_release(call: Call) -> Answer:
        version = call.body(ReleasePromote).version
        info = await change(call, partial(services.releases.promote, version=version))
        return await released(show_release(info), info)

    async def rollback_release(call: Call) -> Answer:
        rollback = partial(services.releases.rollback, to=call.body(ReleaseRollback).to)
        info = await change(call, rollback)
        skipped = [SkippedRevision(revision=skip.revision, reason=skip.reason) for skip in info.skipped]
        shown = RolledBackRelease(**show_release(info.release).model_dump(), skipped=skipped)
        return await released(shown, info.release)

    async def list_history(call: Call) -> Answer:
        query = call.query(PageQuery)
        read = partial(services.releases.history, limit=query.limit, cursor=query.cursor)
        page = await run(read, call.path["tenant"], call.path["name"])
        return Answer(ReleasePage(data=list(map(show_release, page.items)), next_cursor=page.next_cursor))

    async def change(call: Call, make: Callable[..., T]) -> T:
        made = partial(make, if_revision=_if_match(call.request), by=call.actor)
        return await run(made, call.path["tenant"], call.path["name"])

    async def released(shown: Release, info: ReleaseInfo) -> Answer:
        """What takes traffic from now on is brought nearer before its first request."""
        services.engine.prefetch(await run(services.releases.serving, [info]))
        return Answer(shown, headers=_etag(info))

    path = "/tenants/{tenant}/adapters/{name}/release"
    return [
        Operation(
            "GET",
            path,
            "adapters:read",
            get_release,
            "Show which versions take an adapter's traffic.",
            {200: Release},
            etagged=True,
        ),
        Operation(
            "PUT",
            path,
            "adapters:write",
            put_release,
            "Share an adapter's traffic among versions, from the next request on.",
            {200: Release},
            body=ReleaseChange,
            action="release.set",
            etagged=True,
        ),
        Operation(
            "POST",
            f"{path}/promote",
            "adapters:write",
            promote_release,
            "Give all the traffic to one version (default: the newest that is ready).",
            {200: Release},
            body=ReleasePromote,
            body_optional=True,
            action="release.promote",
            etagged=True,
        ),
        Operation(
            "POST",
            f"{path}/rollback",
            "adapters:write",
            rollback_release,
            "Go back to the release before this one, one more with each call; or restore the revision `to`.",
            {200: RolledBackRelease},
            body=ReleaseRollback,
            body_optional=True,
            action="release.rollback",
            etagged=True,
        ),
        Operation(
            "GET",
            f"{path}/history",
            "adapters:read",
            list_history,
            "List an adapter's releases, the newest first: who made them, and how.",
            {200: ReleasePage},
            query=PageQuery,
        ),
    ]


def show_release(info: ReleaseInfo) -> Release:
    return Release(
        name=info.name,
        targets=[Target(version=target.version, weight=target.weight) for target in info.targets],
        sticky=info.sticky,
        revision=info.revision,
        created_at=info.created_at,
        origin=info.origin,
        restores=info.restores,
        actor=info.actor,
        actor_key_id=info.actor_key_id,
    )


def _etag(info: ReleaseInfo) -> dict[str, str]:
    return {"ETag": f'"{info.revision}"'}


def _if_match(request: Request) -> frozenset[int] | None:
    """The revisions that If-Match names; None where it names none in particular. What is no ETag of ours names none
    that there is."""
    given = ",".join(request.headers.getlist("if-match"))
    if not given or given.strip() == "*":
        return None
    return frozenset(int(digits) for digits in re.findall(r'(?<![\w/])"([0-9]{1,9})"', given))
