"""/needs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter

from loraplex.admin.framework.dependencies import Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.operations import needs as shown
from loraplex.admin.services import AdminServices
from loraplex.control.audit.newest import Notice
from loraplex.control.turns import Turns
from loraplex.engine.reports import EngineStats
from loraplex.lifecycle.needs.reading import read_needs
from loraplex.lifecycle.needs.releases import RunningRelease
from loraplex.serving.errors import ServingError

T = TypeVar("T")

ROWS = 20
"""Rows of each kind."""

router = APIRouter(route_class=AdminRoute)


@router.get("/needs")
async def get_needs(caller: Operator, services: Services) -> shown.Needs:
    """Show what an operator has to look at, over all tenants.

    Releases and shadows under way, releases that cannot be decided, adapters that are loaded again and again, short
    disks, keys in use that end, and rollbacks and refusals of the last day.
    """
    try:
        stats = await services.engine.stats()
    except ServingError:
        stats = EngineStats()  # the engine is away, which GET /engine says
    read = partial(read_needs, services.database, stats.reloads, ROWS)
    found = await services.report_gate.run(caller.tenant_id or "", read)
    releases = found.releases
    return shown.Needs(
        running=shown.RunningReleases(**_turns(releases.running, _release)),
        undecided=shown.RunningReleases(**_turns(releases.undecided, _release)),
        unread_releases=releases.unread,
        shadows=shown.RunningShadows(**_turns(releases.shadows, shown.RunningShadow.of)),
        thrashing=shown.ThrashingAdapters(**_turns(found.thrashing, shown.ThrashingAdapter.of)),
        disks=await _disks(services, stats.num_kv_disks_off),
        ending_keys=shown.TenantsWithEndingKeys(
            data=[shown.EndingKeys.of(row) for row in found.ending_keys], total=found.num_ending
        ),
        rolled_back=shown.Notices(**_turns(found.rolled_back, _notice)),
        failed_checks=shown.Notices(**_turns(found.failed_checks, _notice)),
        refused_uploads=shown.Notices(**_turns(found.refused_uploads, _notice)),
    )


def _turns(turns: Turns[T], show: Any) -> dict[str, Any]:
    return {
        "data": [show(row) for row in turns.rows],
        "total": turns.total,
        "more": [shown.LeftOut(tenant_id=tenant, count=count) for tenant, count in turns.more],
    }


def _release(row: RunningRelease) -> shown.RunningRelease:
    standing, verdict = row.standing, row.verdict
    return shown.RunningRelease(
        tenant_id=row.tenant_id,
        name=row.name,
        version=row.version,
        since=row.since,
        share=row.share,
        step=row.step,
        steps=row.steps,
        unit=row.unit,
        verdict=None if verdict is None else verdict.kind,
        advice=None if verdict is None else verdict.advice,
        needs=standing.needs,
        requests=standing.requests,
        likely_at=_moment(standing.likely_at),
        looked_at=_moment(standing.looked_at),
        obstacle=standing.obstacle,
    )


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _notice(row: Notice) -> shown.Notice:
    """Read the target `tenants/TENANT/adapters/NAME/…`, in which `versions/VERSION` may come next."""
    parts = row.target.split("/")
    of = dict(zip(parts[::2], parts[1::2], strict=False))
    return shown.Notice(
        tenant_id=row.tenant_id,
        name=of.get("adapters", ""),
        version=of.get("versions"),
        time=row.time,
        code=row.code,
    )


async def _disks(services: AdminServices, prefixes_off: int) -> shown.Disks:
    kept = await _kept_prefixes(services)
    folders = [one for one in services.folders if one.holds != "prefixes" or kept is not None]
    taken: Mapping[str, int] = {"prefixes": kept or 0}
    rows = []
    for room in await services.rooms.read(folders):
        wanted = max(0, room.folder.wanted - taken.get(room.folder.holds, 0))
        if room.error or room.free < wanted:
            rows.append(
                shown.ShortDisk(
                    holds=room.folder.holds,
                    path=str(room.folder.path),
                    free=None if room.error else room.free,
                    wanted=wanted,
                    size=None if room.error else room.size,
                    error=room.error or None,
                )
            )
    return shown.Disks(node=services.history.server.node, data=rows, prefixes_off=prefixes_off)


async def _kept_prefixes(services: AdminServices) -> int | None:
    """The bytes of prefixes on this machine's disk. None where its engines do not all say, or it has none."""
    if not any(folder.holds == "prefixes" for folder in services.folders):
        return None
    node = services.history.server.node
    own = [report.id for report in services.engine.reports() if report.node == node]
    try:
        figures = await services.engine.replica_stats()
    except ServingError:
        return None
    if not own or not figures.keys() >= set(own):
        return None
    return sum(figures[name].kv_disk_bytes_used for name in own)
