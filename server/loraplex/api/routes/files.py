"""`/v1/files`: what batches read, and what they wrote."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any, Literal

import anyio
from fastapi import Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from loraplex.api.auth import actor_of
from loraplex.api.batches.form import FileForm
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.route import Caller, DataRoute, Services
from loraplex.control.batches.files import FileInfo, Upload
from loraplex.control.batches.lines import MAX_FILE_BYTES, PART_BYTES
from loraplex.control.db.database import Database
from loraplex.http.body import chunks, declared_length, refuse_encoding
from loraplex.http.errors import BodyTooLarge

FORM_BYTES = 16 << 10
"""Bytes of a form beside its file."""
MAX_LISTED = 10_000
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "additionalProperties": False,
                    "properties": {
                        "purpose": {"enum": ["batch"]},
                        "file": {"format": "binary", "maxLength": MAX_FILE_BYTES},
                    },
                }
            }
        },
    }
}
FileId = Annotated[str, Path(alias="id")]


class File(BaseModel):
    """A file. Times are in seconds since the epoch."""

    id: str
    object: Literal["file"] = "file"
    bytes: Annotated[int, Field(ge=0)]
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class UploadRoute(DataRoute):
    """Holds one of its tenant's requests while the file comes."""

    def __init__(self, capacity: TenantCapacity) -> None:
        super().__init__(
            "/v1/files",
            create_file,
            methods=["POST"],
            operation_id="createFile",
            response_model=File,
            refusals=(400, 408, 413, 415, 500, 503),
            openapi_extra=_UPLOAD,
        )
        self._capacity = capacity

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        async with super().asked(request) as body:
            with self._capacity.request(context_of(request.scope).tenant_id):
                yield body


def file_routes(capacity: TenantCapacity) -> list[DataRoute]:
    found = {"refusals": (400, 404, 500, 503)}
    return [
        UploadRoute(capacity),
        DataRoute(
            "/v1/files", list_files, methods=["GET"], operation_id="listFiles", refusals=(400, 500, 503)
        ),
        DataRoute("/v1/files/{id}", get_file, methods=["GET"], operation_id="getFile", **found),
        DataRoute("/v1/files/{id}", delete_file, methods=["DELETE"], operation_id="deleteFile", **found),
        DataRoute(
            "/v1/files/{id}/content",
            get_file_content,
            methods=["GET"],
            operation_id="getFileContent",
            response_class=Response,
            responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
            **found,
        ),
    ]


async def create_file(caller: Caller, services: Services, request: Request) -> File:
    """Upload a file of requests.

    Each line is one request as JSON. What is wrong with a line is told in the error file of its batch.
    """
    refuse_encoding(request.scope)
    most = MAX_FILE_BYTES + FORM_BYTES
    if (declared_length(request.scope) or 0) > most:
        raise BodyTooLarge(most)
    form, run = FileForm(request.headers.get("content-type", "")), services.database.run
    upload: Upload | None = None
    waiting, size, made = bytearray(), 0, None
    try:
        async for chunk in chunks(request.receive, silence_s=services.stall_timeout):
            size += len(chunk)
            if size > most:
                raise BodyTooLarge(most)
            waiting += form.feed(chunk)
            if len(waiting) >= PART_BYTES:
                upload = upload or await _begin(services, caller.tenant_id or "", form)
                await run(upload.add, bytes(waiting))
                waiting.clear()
        expires_s = form.finish()
        upload = upload or await _begin(services, caller.tenant_id or "", form)
        await run(upload.add, bytes(waiting))
        made = await run(upload.finish, expires_s, actor_of(request, caller))
        return _shown(made)
    finally:
        if upload is not None and made is None:
            with anyio.CancelScope(shield=True):
                await run(upload.discard)


async def _begin(services: ApiServices, tenant_id: str, form: FileForm) -> Upload:
    return await services.database.run(services.files.begin, tenant_id, form.filename or "")


async def list_files(
    caller: Caller,
    services: Services,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """List the tenant's files."""

    def read() -> FileList:
        page = services.files.list(
            caller.tenant_id or "", limit=limit, after=after, purpose=purpose, newest_first=order == "desc"
        )
        data = [_shown(file) for file in page.items]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=page.has_more)

    return await services.database.look_up(read)


async def get_file(file_id: FileId, caller: Caller, services: Services) -> File:
    """One of them."""
    return _shown(await _found(services, caller.tenant_id, file_id))


async def delete_file(file_id: FileId, caller: Caller, services: Services, request: Request) -> FileDeleted:
    """Delete a file with its content.

    A batch that reads it fails.
    """
    tenant = caller.tenant_id or ""
    await services.database.run(services.files.delete, tenant, file_id, actor_of(request, caller))
    return FileDeleted(id=file_id)


async def get_file_content(file_id: FileId, caller: Caller, services: Services) -> Response:
    """The content of a file, as it was uploaded or written."""
    file = await _found(services, caller.tenant_id, file_id)
    pieces = _read(services.database, services.files.content(file))
    return StreamingResponse(pieces, media_type="application/octet-stream")


async def _found(services: ApiServices, tenant_id: str | None, file_id: str) -> FileInfo:
    return await services.database.look_up(services.files.get, tenant_id or "", file_id)


async def _read(database: Database, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await database.look_up(next, pieces, None)) is not None:
        yield piece


def _shown(file: FileInfo) -> File:
    return File(
        id=file.id,
        bytes=file.bytes,
        created_at=_seconds(file.created_at),
        expires_at=_seconds(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,  # type: ignore[arg-type]
    )


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
