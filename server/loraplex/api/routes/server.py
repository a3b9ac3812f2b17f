"""`/version`, `/openapi.json` and `/docs`: the same for all callers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from loraplex.api.documents import Document
from loraplex.api.route import DataRoute
from loraplex.http.document_page import PAGE_HEADERS

router = APIRouter(route_class=DataRoute)
_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}}
}


class ServerVersion(BaseModel):
    version: str


@router.get("/version", operation_id="showVersion")
async def show_version(request: Request) -> ServerVersion:
    """The server's version."""
    return ServerVersion(version=request.app.version)


@router.get("/openapi.json", operation_id="showDocument", response_class=Response, responses=_OBJECT)
async def show_document(request: Request) -> Response:
    """This document."""
    document: Document = request.app.state.document
    return Response(await document.text(), media_type="application/json")


@router.get("/docs", operation_id="showPage", response_class=HTMLResponse)
async def show_page(request: Request) -> HTMLResponse:
    """This document for people."""
    document: Document = request.app.state.document
    return HTMLResponse(await document.page(), headers=PAGE_HEADERS)
