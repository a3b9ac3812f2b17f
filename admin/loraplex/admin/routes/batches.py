"""/batches."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from loraplex.admin.framework.dependencies import Audited, Operator, Services
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.batches import BatchCounts, BatchPage, BatchQuery, BatchRow
from loraplex.control import rules
from loraplex.control.batches.batches import Batches, BatchInfo
from loraplex.control.types import Page

router = APIRouter(prefix="/batches", route_class=AdminRoute)


@router.get("")
async def list_batches(
    query: Annotated[BatchQuery, Query()], caller: Operator, services: Services
) -> BatchPage:
    """List the batches of all tenants, the newest first."""

    def read() -> Page[BatchRow]:
        # One more than the page shows whether there are more.
        after = rules.read_cursor(query.cursor)
        found = Batches(services.database).list(query.tenant, limit=query.limit + 1, after=after)
        return rules.make_page(found.items, query.limit, lambda batch: batch.id, _show)

    page = await services.database.run(read)
    return BatchPage(data=list(page.items), next_cursor=page.next_cursor)


@router.post("/{batch}/cancel")
async def cancel_batch(
    batch: Annotated[str, Path()], by: Annotated[Operator, Audited("batch.cancel")], services: Services
) -> BatchRow:
    """End a batch early; what is answered by then is kept."""
    return _show(await services.database.run(Batches(services.database).cancel, None, batch, by))


def _show(batch: BatchInfo) -> BatchRow:
    return BatchRow(
        id=batch.id,
        tenant=batch.tenant_id,
        endpoint=batch.endpoint,  # type: ignore[arg-type]
        status=batch.status,  # type: ignore[arg-type]
        counts=BatchCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        errors=[] if batch.error is None else [batch.error],
    )
