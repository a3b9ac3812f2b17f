"""/audit."""

from __future__ import annotations

from functools import partial

from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import AuditEntry, AuditPage, AuditQuery
from loraplex.admin.services import AdminServices
from loraplex.control import audit_log
from loraplex.control.audit_log import AuditFilter


def audit_operations(services: AdminServices) -> list[Operation]:
    async def list_audit(call: Call) -> Answer:
        query = call.query(AuditQuery)
        chosen = AuditFilter(query.tenant, query.actor, query.action, query.outcome, query.start, query.end)
        read = partial(services.audit.list, chosen, limit=query.limit, cursor=query.cursor)
        page = await services.report_gate.run(call.principal.tenant_id or "", read)
        return Answer(AuditPage(data=[_show(entry) for entry in page.items], next_cursor=page.next_cursor))

    return [
        Operation(
            "GET",
            "/audit",
            "operator",
            list_audit,
            "List who changed what, and who was refused, the latest first.",
            {200: AuditPage},
            query=AuditQuery,
        )
    ]


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
