"""/usage, and a tenant's own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

from loraplex.admin.operation import Answer, Call, Operation
from loraplex.admin.schemas import OwnUsageQuery, UsagePage, UsageQuery, UsageSum
from loraplex.admin.services import AdminServices
from loraplex.control.types import Page
from loraplex.control.usage import report
from loraplex.control.usage.columns import COUNTS
from loraplex.control.usage.csv_text import csv_text

CSV = "text/csv"
DEFAULT_PERIOD = timedelta(days=30)


def usage_operations(services: AdminServices) -> list[Operation]:
    async def sums(call: Call, query: OwnUsageQuery, tenant: str | None) -> Answer:
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
        page = await services.report_gate.run(call.principal.tenant_id or "", read)
        return _as_csv(page, query) if _wants_csv(call) else _as_json(page)

    async def get_usage(call: Call) -> Answer:
        query = call.query(UsageQuery)
        return await sums(call, query, query.tenant)

    async def get_tenant_usage(call: Call) -> Answer:
        return await sums(call, call.query(OwnUsageQuery), call.path["tenant"])

    return [
        Operation(
            "GET",
            "/usage",
            "operator",
            get_usage,
            "Sum up what was used, of all tenants or one; as CSV where Accept asks for text/csv.",
            {200: UsagePage},
            query=UsageQuery,
            also_as=CSV,
        ),
        Operation(
            "GET",
            "/tenants/{tenant}/usage",
            "usage:read",
            get_tenant_usage,
            "Sum up what a tenant used; as CSV where Accept asks for text/csv.",
            {200: UsagePage},
            query=OwnUsageQuery,
            also_as=CSV,
        ),
    ]


def _wants_csv(call: Call) -> bool:
    asked = ",".join(call.request.headers.getlist("accept"))
    return CSV in {part.partition(";")[0].strip().lower() for part in asked.split(",")}


def _as_json(page: Page[report.UsageSum]) -> Answer:
    return Answer(
        UsagePage(data=[_show(row) for row in page.items], next_cursor=page.next_cursor),
        headers={"Vary": "Accept"},
    )


def _as_csv(page: Page[report.UsageSum], query: OwnUsageQuery) -> Answer:
    columns = [*(["start"] if query.bucket != "none" else []), *query.groups, *COUNTS]
    shown = [_show(row).model_dump(mode="json") for row in page.items]
    headers = {"Vary": "Accept"}
    if page.next_cursor is not None:
        headers["X-Next-Cursor"] = page.next_cursor
    text = csv_text(columns, [[row[name] for name in columns] for row in shown])
    return Answer(text=text, media_type="text/csv; charset=utf-8", headers=headers)


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
