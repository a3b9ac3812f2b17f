"""/audit."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from loraplex.admin.framework.dependencies import Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.audit import AuditEntry, AuditPage, AuditQuery, AuditVerdict, AuditVerifyQuery
from loraplex.control.audit import log as audit_log
from loraplex.control.audit.log import AuditFilter
from loraplex.control.audit.verification import read_anchor, verify

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


@router.get("/audit/verify")
async def verify_audit(
    query: Annotated[AuditVerifyQuery, Query()], caller: Operator, services: Services
) -> AuditVerdict:
    """Check that no row of the audit log was changed and none is missing, as `loraplex audit verify` does.

    The whole log is read, which takes seconds for 100,000 rows. With an `anchor` of an earlier time, a log that was
    rewritten since then, up to its last row, is found too.
    """
    anchor = None if query.anchor is None else read_anchor(query.anchor)
    check = partial(verify, services.database, anchor)
    verdict = await services.report_gate.run(caller.tenant_id or "", check)
    return AuditVerdict(
        whole=verdict.whole,
        rows=verdict.num_rows,
        anchor=None if verdict.head is None else str(verdict.head),
        broken_at=verdict.broken_at,
        reason=verdict.reason,
    )


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
