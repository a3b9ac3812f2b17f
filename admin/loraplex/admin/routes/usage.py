"""/usage, /history and /requests, and a tenant's own."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from loraplex.admin.framework.dependencies import Operator, Services, TenantId, UsageReader
from loraplex.admin.framework.openapi import Responses
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.usage import (
    History,
    HistoryFigures,
    HistoryQuery,
    HistoryRow,
    HistoryServer,
    HistorySlice,
    OwnHistoryQuery,
    OwnRequestQuery,
    OwnUsageQuery,
    RequestPage,
    RequestQuery,
    RequestRow,
    RequestSeconds,
    RequestTokens,
    UsagePage,
    UsageQuery,
    UsageSum,
)
from loraplex.admin.services import AdminServices
from loraplex.control import rules
from loraplex.control.audit.recorder import Actor
from loraplex.control.history.history import ReportRow
from loraplex.control.recent_requests import EndedRequest
from loraplex.control.types import Page
from loraplex.control.usage import report
from loraplex.control.usage.columns import COUNTS
from loraplex.control.usage.csv_text import csv_text

CSV = "text/csv"
DEFAULT_PERIOD = timedelta(days=30)
MAX_DIGITS = 18
"""Digits of a request's number in a cursor."""
_ALSO_CSV: Responses = {
    200: {
        "content": {CSV: {"schema": {"type": "string"}}},
        "headers": {
            "X-Next-Cursor": {
                "description": "The cursor of the next page, where there is one.",
                "schema": {"type": "string"},
            }
        },
    }
}

router = APIRouter(route_class=AdminRoute)
tenant_router = APIRouter(route_class=AdminRoute)


@router.get("/usage", response_model=UsagePage, responses=_ALSO_CSV)
async def get_usage(
    query: Annotated[UsageQuery, Query()],
    caller: Operator,
    services: Services,
    request: Request,
    response: Response,
) -> UsagePage | Response:
    """Sum up what was used, of all tenants or one; as CSV where Accept asks for text/csv."""
    page = await _sums(services, caller, query, query.tenant)
    return _as_csv(page, query) if _wants_csv(request) else _as_json(page, response)


@tenant_router.get("/tenants/{tenant}/usage", response_model=UsagePage, responses=_ALSO_CSV)
async def get_tenant_usage(
    tenant: TenantId,
    query: Annotated[OwnUsageQuery, Query()],
    caller: UsageReader,
    services: Services,
    request: Request,
    response: Response,
) -> UsagePage | Response:
    """Sum up what a tenant used; as CSV where Accept asks for text/csv."""
    page = await _sums(services, caller, query, tenant)
    return _as_csv(page, query) if _wants_csv(request) else _as_json(page, response)


@router.get("/requests")
async def list_requests(
    query: Annotated[RequestQuery, Query()], _: Operator, services: Services
) -> RequestPage:
    """List the last requests to this server that failed, were refused or were slow, the newest first."""
    return _recent(services, query, query.tenant)


@tenant_router.get("/tenants/{tenant}/requests")
async def list_tenant_requests(
    tenant: TenantId, query: Annotated[OwnRequestQuery, Query()], _: UsageReader, services: Services
) -> RequestPage:
    """List a tenant's last requests to this server that failed, were refused or were slow, the newest first."""
    await services.database.run(services.tenants.get, tenant)  # an unknown one is a 404
    return _recent(services, query, tenant)


def _recent(services: AdminServices, query: OwnRequestQuery, tenant: str | None) -> RequestPage:
    found = services.recent.find(
        tenant=tenant,
        adapter=query.adapter,
        status=query.status,
        kind=query.kind,
        request_id=query.id,
        before=_place(query.cursor),
    )
    page = rules.make_page(
        found, query.limit, lambda request: ":".join(map(str, request.place)), _show_request
    )
    return RequestPage(data=list(page.items), next_cursor=page.next_cursor)


def _show_request(request: EndedRequest) -> RequestRow:
    return RequestRow(
        request_id=request.label,
        id=request.id,
        time=datetime.fromtimestamp(request.at, UTC),
        kind=request.kind,
        tenant=request.tenant_id or None,
        key=request.key_id or None,
        route=request.route,
        model=request.model,
        adapter=request.adapter,
        version=f"v{request.version}" if request.version else None,
        status=request.status,
        code=request.code,
        seconds=RequestSeconds(
            queue=request.queue_s,
            load=request.load_s,
            first_token=request.first_token_s,
            total=request.total_s,
        ),
        tokens=RequestTokens(
            prompt=request.prompt_tokens, cached=request.cached_tokens, completion=request.completion_tokens
        ),
        trace_id=request.trace_id,
    )


def _place(cursor: str | None) -> tuple[int, str] | None:
    """The place of the last request of the page before. Raises InvalidCursor."""
    after = rules.read_cursor(cursor)
    if after is None:
        return None
    time, _, own_id = after.partition(":")
    if not (after.isascii() and time.isdigit() and len(time) <= MAX_DIGITS and own_id.isalnum()):
        raise rules.InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    return int(time), own_id


async def _sums(
    services: AdminServices, caller: Actor, query: OwnUsageQuery, tenant: str | None
) -> Page[report.UsageSum]:
    end = query.end or datetime.now(UTC)
    earliest = datetime.min.replace(tzinfo=UTC)
    before = end - min(DEFAULT_PERIOD, end - earliest)
    read = partial(
        report.UsageReports(services.database).sums,
        start=query.start or before,
        end=end,
        bucket=query.bucket,
        group_by=query.groups,
        tenant=tenant,
        limit=query.limit,
        cursor=query.cursor,
    )
    return await services.report_gate.run(caller.tenant_id or "", read)


def _wants_csv(request: Request) -> bool:
    asked = ",".join(request.headers.getlist("accept"))
    return CSV in {part.partition(";")[0].strip().lower() for part in asked.split(",")}


def _as_json(page: Page[report.UsageSum], response: Response) -> UsagePage:
    response.headers["Vary"] = "Accept"
    return UsagePage(data=[_show(row) for row in page.items], next_cursor=page.next_cursor)


def _as_csv(page: Page[report.UsageSum], query: OwnUsageQuery) -> Response:
    columns = [*(["start"] if query.bucket != "none" else []), *query.groups, *COUNTS]
    shown = [_show(row).model_dump(mode="json") for row in page.items]
    headers = {"Vary": "Accept"}
    if page.next_cursor is not None:
        headers["X-Next-Cursor"] = page.next_cursor
    text = csv_text(columns, [[row[name] for name in columns] for row in shown])
    return Response(text, 200, headers, "text/csv; charset=utf-8")


def _show(row: report.UsageSum) -> UsageSum:
    return UsageSum(
        start=row.start,
        tenant=row.tenant,
        key=row.key,
        adapter=row.adapter,
        version=f"v{row.version}" if row.version else None,
        status=row.status,
        requests=row.requests,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
    )


@router.get("/history")
async def get_history(
    caller: Operator, query: Annotated[HistoryQuery, Query()], services: Services
) -> History:
    """Show the last minutes or the last hour of this server's requests, of all tenants or one."""
    return await _read_history(services, caller, query, query.tenant)


@tenant_router.get("/tenants/{tenant}/history")
async def get_tenant_history(
    tenant: TenantId,
    query: Annotated[OwnHistoryQuery, Query()],
    caller: UsageReader,
    services: Services,
) -> History:
    """Show the last minutes or the last hour of a tenant's requests to this server."""
    return await _read_history(services, caller, query, tenant)


async def _read_history(
    services: AdminServices, caller: Actor, query: OwnHistoryQuery, tenant: str | None
) -> History:
    past = services.history.past(query.range)
    report = await services.report_gate.run(
        caller.tenant_id or "",
        partial(past.report, tenant=tenant, adapter=query.adapter, sort=query.sort, limit=query.limit),
    )
    return History(
        server=HistoryServer(
            id=report.server.id,
            # A tenant is not told where the server runs.
            node=None if caller.tenant_id else report.server.node,
            since=report.server.since,
        ),
        slice_seconds=report.slice_s,
        slices=[
            HistorySlice(start=start, figures=HistoryFigures.of(figures)) for start, figures in report.slices
        ],
        total=HistoryFigures.of(report.total),
        tenants=_history_rows(report.tenants),
        other_tenants=HistoryFigures.of(report.other_tenants),
        adapters=_history_rows(report.adapters),
        other_adapters=HistoryFigures.of(report.other_adapters),
        exact=report.exact,
    )


def _history_rows(rows: Iterable[ReportRow]) -> list[HistoryRow]:
    return [
        HistoryRow(
            tenant=row.tenant,
            adapter=row.adapter or None,
            version=f"v{row.version}" if row.version else None,
            figures=HistoryFigures.of(row.figures),
        )
        for row in rows
    ]
