"""Strict readers of a request. They refuse unknown query parameters and fields, and the message names them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError

from loraplex.adapters.admission.strict_json import parse_object
from loraplex.adapters.store.files import shown
from loraplex.admin.problem import Problem, from_validation
from loraplex.http.body import read_body
from loraplex.http.text import did_you_mean

MAX_JSON_BYTES = 256 << 10
MAX_NAME_CHARS = 256


def check_names(request: Request) -> None:
    """Raises Problem (404) for a path parameter that no object can have as its name: databases differ in the text that
    they accept."""
    for value in request.path_params.values():
        if len(value) > MAX_NAME_CHARS or not value.isprintable():
            raise Problem("not_found", f"There is nothing at {shown(request.url.path, 200)}.")


def check_query(request: Request, known: Collection[str]) -> None:
    """Raises Problem (400) for a query parameter that is not `known`, or that comes twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            allowed = f"Known here: {', '.join(known)}." if known else "None is known here."
            meant = did_you_mean(name, known) or "."
            detail = f"There is no query parameter {shown(name)}{meant} {allowed}"
            raise Problem("unknown_parameter", detail, param=name[:80])
        if name in seen:
            raise Problem("invalid_value", f"The query parameter {name} comes twice.", param=name)
        seen.add(name)


async def refuse_body(request: Request) -> None:
    """Refuse a body where none is taken; an empty object stands for none. Raises Problem and what `read_body` does."""
    raw = await read_body(request.scope, request.receive, max_bytes=MAX_JSON_BYTES)
    if raw.strip() not in (b"", b"{}"):
        raise Problem("invalid_value", "This request takes no body.")


async def read_json(request: Request, model: type[BaseModel], *, optional: bool) -> Any:
    """The body as an object of `model`; None where it is `optional` and there is none. Raises Problem (400, 415) and
    what `read_body` does."""
    raw = await read_body(request.scope, request.receive, max_bytes=MAX_JSON_BYTES)
    if not raw and optional:
        return None
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem("unsupported_media_type", "Send the body as application/json.", param="Content-Type")
    try:
        parse_object(raw)
    except ValueError as error:
        raise Problem("invalid_json", f"The body is not a JSON object that can be read: {error}.") from None
    try:
        # From the text: strict values, but times may be strings, as JSON has no other.
        return model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_context=False), model) from None
