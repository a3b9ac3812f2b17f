"""/cluster."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Query

from loraplex.adapters.store.files import shown
from loraplex.admin.framework.dependencies import Audited, Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.problem import Problem
from loraplex.admin.schemas.fields import PageQuery
from loraplex.admin.schemas.operations.cluster import (
    ClusterPage,
    PlacedRow,
    PlaceRow,
    ReplicaAdapters,
    ReplicaRow,
)
from loraplex.control import rules
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.reports import ReplicaReport
from loraplex.serving.placement.homes import PlacedVersion

router = APIRouter(prefix="/cluster", route_class=AdminRoute)


@router.get("")
async def get_cluster(_: Operator, query: Annotated[PageQuery, Query()], services: Services) -> ClusterPage:
    """Show the engines, and where adapters live."""
    view, after = services.engine, rules.read_cursor(query.cursor)
    placed = view.placed(query.limit + 1, after or "")
    page = rules.make_page(placed, query.limit, lambda version: version.ref.digest, _placed)
    return ClusterPage(
        wanted=view.num_wanted,
        replicas=[_replica(report) for report in view.reports()],
        data=list(page.items),
        next_cursor=page.next_cursor,
    )


@router.post("/replicas/{replica}/drain")
async def drain_replica(
    replica: Annotated[str, Path()],
    by: Annotated[Operator, Audited("replica.drain")],
    services: Services,
) -> ReplicaRow:
    """Give an engine nothing new: it finishes what it has, and its adapters move to the others.

    It stays so until this is undone, it joins again or the server is started again. The last engine that takes
    requests is not drained.
    """
    _check_drain(services.engine, replica)
    target = f"cluster/replicas/{replica}/drain"
    note = partial(services.audit.note_change, by, "replica.drain", target, after={"draining": True})
    await services.database.run(note)
    _check_drain(services.engine, replica)  # it may have left meanwhile
    services.engine.drain(replica)
    return _replica(_found(services.engine, replica))


@router.delete("/replicas/{replica}/drain")
async def undo_drain(
    replica: Annotated[str, Path()],
    by: Annotated[Operator, Audited("replica.undrain")],
    services: Services,
) -> ReplicaRow:
    """Give a drained engine requests again."""
    found = _found(services.engine, replica)
    if found.state == "ready":  # nothing is to be undone
        return _replica(found)
    target = f"cluster/replicas/{replica}/drain"
    note = partial(services.audit.note_change, by, "replica.undrain", target, after={"draining": False})
    await services.database.run(note)
    _found(services.engine, replica)  # it may have left meanwhile
    services.engine.drain(replica, False)
    return _replica(_found(services.engine, replica))


def _found(view: Engines, name: str) -> ReplicaReport:
    """The engine of this name. Raises Problem where there is none."""
    for report in view.reports():
        if report.id == name:
            return report
    raise Problem("replica_not_found", f"There is no engine {shown(name)}; GET /admin/v1/cluster lists them.")


def _check_drain(view: Engines, name: str) -> None:
    """Raises Problem where there is no engine of this name, or no other one takes requests."""
    _found(view, name)
    if not any(report.state == "ready" for report in view.reports() if report.id != name):
        raise Problem(
            "conflict", f"No engine but {shown(name)} takes requests; drain it when another one does."
        )


def _replica(report: ReplicaReport) -> ReplicaRow:
    info = report.info
    return ReplicaRow(
        id=report.id,
        node=report.node,
        pid=report.pid,
        state=report.state,
        reason=report.reason,
        restarts=report.num_restarts,
        live_requests=report.num_live,
        places=None if info is None else info.max_num_seqs,
        max_model_len=None if info is None else info.max_model_len,
        mean_request_seconds=report.mean_s,
        adapters=ReplicaAdapters(hot=report.num_hot, warm=report.num_warm),
        numerics=None if info is None else info.numerics,
        base_fingerprint=None if info is None else info.base_fingerprint,
        device=None if info is None else info.device,
    )


def _placed(version: PlacedVersion) -> PlacedRow:
    ref = version.ref
    return PlacedRow(
        digest=ref.digest,
        tenant_id=ref.tenant_id,
        name=ref.name,
        version=f"v{ref.version}",
        places=[PlaceRow(replica=replica, reason=reason) for replica, reason in version.places],
    )
