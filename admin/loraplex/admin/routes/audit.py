"""/audit."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from loraplex.admin.framework.dependencies import Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.audit import AuditEntry, AuditPage, AuditQuery
from loraplex.control.audit import log as audit_log
from loraplex.control.audit.log import AuditFilter

router = APIRouter(route_class=AdminRoute)


@router.get("/audit")
async def list_audit(
    query: Annotated[AuditQuery, Query()], caller: Operator, services: Services
) -> AuditPage:
    """List who changed what, and who was refused, the latest first."""
    chosen = AuditFilter(query.tenant, query.actor, query.action, query.outcome, query.start, query.end)
    read = partial(services.audit.list, chosen, limit=query.limit, cursor=query.cursor)
    page = await services.report_gate.run(caller.tenant_id or "", read)
    return AuditPage(data=[_show(entry) for entry in page.items], next_cursor=page.next_cursor)


def _show(entry: audit_log.AuditEntry) -> AuditEntry:
    return AuditEntry(
        seq=entry.seq,
        time=entry.time,
        actor=entry.by.kind,
        actor_tenant_id=entry.by.tenant_id,
        actor_key_id=entry.by.key_id,
        source=entry.by.source,
        request_id=entry.by.request_id,
        action=entry.action,
        tenant_id=entry.tenant_id,
        target=entry.target,
        outcome=entry.outcome,
        code=entry.code,
        before=entry.before,
        after=entry.after,
        hash=entry.hash,
    )
