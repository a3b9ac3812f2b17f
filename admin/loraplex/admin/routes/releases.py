"""/tenants/{tenant}/adapters/{name}/release."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from loraplex.admin.framework.dependencies import (
    AdapterName,
    Audited,
    IfMatch,
    Reader,
    Services,
    TenantId,
    Writer,
)
from loraplex.admin.framework.openapi import WITH_ETAG, refused
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.routes.release_comparison import show_comparison
from loraplex.admin.routes.release_plan import parse_plan, show_plan, show_run
from loraplex.admin.schemas.fields import PageQuery
from loraplex.admin.schemas.release_comparison import ReleaseComparison
from loraplex.admin.schemas.releases import (
    Release,
    ReleaseChange,
    ReleasePage,
    ReleasePromote,
    ReleaseRollback,
    RolledBackRelease,
    SkippedRevision,
    Target,
)
from loraplex.admin.services import AdminServices
from loraplex.control.release_types import ReleaseInfo, ReleaseTarget
from loraplex.lifecycle.release_comparison import compare_release

router = APIRouter(prefix="/tenants/{tenant}/adapters/{name}/release", route_class=AdminRoute)

_CONDITIONAL = WITH_ETAG | refused(412)
_NEWEST, _ONE_BACK = ReleasePromote(), ReleaseRollback()


@router.get("", responses=WITH_ETAG)
async def get_release(
    _: Reader, tenant: TenantId, name: AdapterName, services: Services, response: Response
) -> Release:
    """Show which versions take an adapter's traffic."""
    info = await services.database.run(services.releases.get, tenant, name)
    response.headers["ETag"] = _etag(info)
    return show_release(info)


@router.put("", responses=_CONDITIONAL)
async def put_release(
    tenant: TenantId,
    name: AdapterName,
    body: ReleaseChange,
    if_match: IfMatch,
    by: Annotated[Writer, Audited("release.set")],
    services: Services,
    response: Response,
) -> Release:
    """Share an adapter's traffic among versions, from the next request on."""
    plan = parse_plan(body)
    if by.kind == "key" and plan.schedule:
        services.change_limit.charge_change(tenant, len(plan.schedule))  # each step is a change too
    targets = tuple(ReleaseTarget(target.version, target.weight) for target in body.targets)
    put = partial(
        services.releases.put,
        targets=targets,
        sticky=body.sticky,
        plan=plan,
        if_revision=if_match,
        by=by,
    )
    info = await services.database.run(put, tenant, name)
    response.headers["ETag"] = _etag(info)
    await _prefetch(services, info)
    return show_release(info)


@router.post("/promote", responses=_CONDITIONAL)
async def promote_release(
    tenant: TenantId,
    name: AdapterName,
    if_match: IfMatch,
    by: Annotated[Writer, Audited("release.promote")],
    services: Services,
    response: Response,
    body: ReleasePromote = _NEWEST,
) -> Release:
    """Give all the traffic to one version (default: the newest that is ready)."""
    promote = partial(services.releases.promote, version=body.version, if_revision=if_match, by=by)
    info = await services.database.run(promote, tenant, name)
    response.headers["ETag"] = _etag(info)
    await _prefetch(services, info)
    return show_release(info)


@router.post("/rollback", responses=_CONDITIONAL)
async def rollback_release(
    tenant: TenantId,
    name: AdapterName,
    if_match: IfMatch,
    by: Annotated[Writer, Audited("release.rollback")],
    services: Services,
    response: Response,
    body: ReleaseRollback = _ONE_BACK,
) -> RolledBackRelease:
    """Go back to the release before this one, one more with each call; or restore the revision `to`."""
    rollback = partial(services.releases.rollback, to=body.to, if_revision=if_match, by=by)
    info = await services.database.run(rollback, tenant, name)
    response.headers["ETag"] = _etag(info.release)
    await _prefetch(services, info.release)
    skipped = list(map(SkippedRevision.of, info.skipped))
    return RolledBackRelease(**show_release(info.release).model_dump(), skipped=skipped)


@router.post("/pause", responses=_CONDITIONAL)
async def pause_release(
    tenant: TenantId,
    name: AdapterName,
    if_match: IfMatch,
    by: Annotated[Writer, Audited("release.pause")],
    services: Services,
    response: Response,
) -> Release:
    """Keep the weights of a running release as they are: no next step, and no look of its guard."""
    pause = partial(services.releases.pause, if_revision=if_match, by=by)
    info = await services.database.run(pause, tenant, name)
    response.headers["ETag"] = _etag(info)
    return show_release(info)


@router.post("/resume", responses=_CONDITIONAL)
async def resume_release(
    tenant: TenantId,
    name: AdapterName,
    if_match: IfMatch,
    by: Annotated[Writer, Audited("release.resume")],
    services: Services,
    response: Response,
) -> Release:
    """Begin a paused release's step again, with a guard without evidence."""
    resume = partial(services.releases.resume, if_revision=if_match, by=by)
    info = await services.database.run(resume, tenant, name)
    response.headers["ETag"] = _etag(info)
    return show_release(info)


@router.get("/comparison")
async def compare_versions(
    caller: Reader, tenant: TenantId, name: AdapterName, services: Services
) -> ReleaseComparison:
    """Show the versions of a release side by side: their requests, and what the guard and the shadow found.

    Counts are of the latest requests of each version, from the ledger: at most 10,000, since the step began.
    """
    read = partial(compare_release, services.database, tenant, name)
    return show_comparison(await services.report_gate.run(caller.tenant_id or "", read))


@router.get("/history")
async def list_history(
    _: Reader, tenant: TenantId, name: AdapterName, query: Annotated[PageQuery, Query()], services: Services
) -> ReleasePage:
    """List an adapter's releases, the newest first: who made them, and how."""
    read = partial(services.releases.history, limit=query.limit, cursor=query.cursor)
    page = await services.database.run(read, tenant, name)
    return ReleasePage(data=list(map(show_release, page.items)), next_cursor=page.next_cursor)


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
        began=info.began,
        reason=info.reason,
        run=show_run(info.run),
        **show_plan(info.plan),
    )


async def _prefetch(services: AdminServices, info: ReleaseInfo) -> None:
    """The versions that take traffic from now on are loaded before their first request."""
    services.engine.prefetch(await services.database.run(services.releases.serving, [info]))


def _etag(info: ReleaseInfo) -> str:
    return f'"{info.revision}"'
