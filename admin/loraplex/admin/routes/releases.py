"""/tenants/{tenant}/adapters/{name}/release."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import Release, ReleaseChange, ReleasePromote, Target
from loraplex.admin.services import AdminServices
from loraplex.control.types import ReleaseInfo, ReleaseTarget


def release_operations(services: AdminServices) -> list[Operation]:
    run = services.database.run

    async def get_release(call: Call) -> Answer:
        return Answer(show_release(await run(services.releases.get, call.path["tenant"], call.path["name"])))

    async def put_release(call: Call) -> Answer:
        body = call.body(ReleaseChange)
        targets = tuple(ReleaseTarget(target.version, target.weight) for target in body.targets)
        put = partial(services.releases.put, targets=targets, sticky=body.sticky, by=call.actor)
        return await released(call, put)

    async def promote_release(call: Call) -> Answer:
        version = call.body(ReleasePromote).version
        return await released(call, partial(services.releases.promote, version=version, by=call.actor))

    async def rollback_release(call: Call) -> Answer:
        return await released(call, partial(services.releases.rollback, by=call.actor))

    async def released(call: Call, change: Callable[[str, str], ReleaseInfo]) -> Answer:
        """What takes traffic from now on is brought nearer before its first request."""
        info = await run(change, call.path["tenant"], call.path["name"])
        services.engine.prefetch(await run(services.releases.serving, [info]))
        return Answer(show_release(info))

    path = "/tenants/{tenant}/adapters/{name}/release"
    return [
        Operation(
            "GET",
            path,
            "adapters:read",
            get_release,
            "Show which versions take an adapter's traffic.",
            {200: Release},
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
        ),
        Operation(
            "POST",
            f"{path}/rollback",
            "adapters:write",
            rollback_release,
            "Go back to the release before this one.",
            {200: Release},
            action="release.rollback",
        ),
    ]


def show_release(info: ReleaseInfo) -> Release:
    return Release(
        name=info.name,
        targets=[Target(version=target.version, weight=target.weight) for target in info.targets],
        sticky=info.sticky,
        revision=info.revision,
        created_at=info.created_at,
    )
