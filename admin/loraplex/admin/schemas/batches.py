"""Batches of all tenants."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from loraplex.admin.schemas.fields import OmittedNull, PageQuery, PlainText, ResponseBody, Timestamp
from loraplex.control.batches.batches import Endpoint, Status


class BatchQuery(PageQuery):
    """`tenant`: the batches of this one."""

    tenant: Annotated[Annotated[PlainText, Field(min_length=1, max_length=64)] | None, OmittedNull()] = None


class BatchCounts(ResponseBody):
    total: int
    completed: int
    failed: int


class BatchRow(ResponseBody):
    """A batch. `errors` say why it failed as a whole."""

    id: str
    tenant: str
    endpoint: Endpoint
    status: Status
    counts: BatchCounts
    created_at: Timestamp
    expires_at: Timestamp
    errors: list[str]


class BatchPage(ResponseBody):
    data: list[BatchRow]
    next_cursor: str | None
