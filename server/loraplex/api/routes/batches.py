"""`/v1/batches`: requests of a file that are answered when there is room for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from pydantic import BaseModel

from loraplex.api.auth import actor_of
from loraplex.api.batches.schemas import CreateBatch
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.openai.body import parse_json, read_json
from loraplex.api.openai.parsing import parse_request
from loraplex.api.route import Caller, DataRoute, Services
from loraplex.control.batches.batches import BatchInfo, Endpoint

BatchId = Annotated[str, Path(alias="id")]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class BatchProblem(BaseModel):
    code: str
    message: str
    line: None = None
    param: None = None


class BatchProblems(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchProblem]


class Batch(BaseModel):
    """A batch. Times are in seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchProblems | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal["in_progress", "cancelling", "cancelled", "completed", "expired", "failed"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CreateRoute(DataRoute):
    """Reads the request's JSON after it is known who calls."""

    def __init__(self, capacity: TenantCapacity) -> None:
        super().__init__(
            "/v1/batches",
            create_batch,
            methods=["POST"],
            operation_id="createBatch",
            response_model=Batch,
            refusals=(400, 404, 408, 413, 415, 500, 503),
        )
        self._capacity = capacity

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        services: ApiServices = request.app.state.services
        async with super().asked(request):
            tenant = context_of(request.scope).tenant_id
            with self._capacity.request(tenant), self._capacity.body(tenant) as take:
                body = await read_json(
                    request.scope,
                    request.receive,
                    max_bytes=64 << 10,
                    timeout_s=services.stall_timeout,
                    take=take,
                )
                yield parse_request(CreateBatch, parse_json(body))


def batch_routes(capacity: TenantCapacity) -> list[DataRoute]:
    one: dict[str, Any] = {"response_model": Batch, "refusals": (400, 404, 500, 503)}
    return [
        CreateRoute(capacity),
        DataRoute(
            "/v1/batches",
            list_batches,
            methods=["GET"],
            operation_id="listBatches",
            response_model=BatchList,
            refusals=(400, 500, 503),
        ),
        DataRoute("/v1/batches/{id}", get_batch, methods=["GET"], operation_id="getBatch", **one),
        DataRoute(
            "/v1/batches/{id}/cancel", cancel_batch, methods=["POST"], operation_id="cancelBatch", **one
        ),
    ]


async def create_batch(caller: Caller, services: Services, asked: CreateBatch, request: Request) -> Batch:
    """Answer the requests of a file, within a day."""
    made = await services.database.run(
        services.batches.create,
        caller.tenant_id or "",
        caller.key_id or "",
        asked.input_file_id,
        asked.endpoint,
        asked.metadata,
        actor_of(request, caller),
    )
    return _shown(made)


async def list_batches(
    caller: Caller,
    services: Services,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> BatchList:
    """List the tenant's batches, the newest first."""

    def read() -> BatchList:
        page = services.batches.list(caller.tenant_id or "", limit=limit, after=after)
        data = [_shown(batch) for batch in page.items]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=page.has_more)

    return await services.database.look_up(read)


async def get_batch(batch_id: BatchId, caller: Caller, services: Services) -> Batch:
    """One of them."""
    return _shown(await services.database.look_up(services.batches.get, caller.tenant_id or "", batch_id))


async def cancel_batch(batch_id: BatchId, caller: Caller, services: Services, request: Request) -> Batch:
    """End a batch early.

    What is answered by then is kept.
    """
    by = actor_of(request, caller)
    return _shown(await services.database.run(services.batches.cancel, caller.tenant_id or "", batch_id, by))


def _shown(batch: BatchInfo) -> Batch:
    def ended(*statuses: str) -> int | None:
        return _seconds(batch.ended_at) if batch.status in statuses else None

    problem = None
    if batch.error is not None:
        code = "token_limit_exceeded" if batch.completed + batch.failed == 0 else "input_file_gone"
        problem = BatchProblems(data=[BatchProblem(code=code, message=batch.error)])
    made = _seconds(batch.created_at) or 0
    return Batch(
        id=batch.id,
        endpoint=batch.endpoint,  # type: ignore[arg-type]
        errors=problem,
        input_file_id=batch.input_file_id,
        status=batch.status,  # type: ignore[arg-type]
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=made,
        in_progress_at=made,
        expires_at=_seconds(batch.expires_at) or 0,
        finalizing_at=ended("completed"),
        completed_at=ended("completed"),
        failed_at=ended("failed"),
        expired_at=ended("expired"),
        cancelling_at=_seconds(batch.cancelling_at),
        cancelled_at=ended("cancelled"),
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        metadata=None if batch.labels is None else dict(batch.labels),
    )


def _seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
