"""The OpenAPI document of an application: what the framework knows, without its own errors and with our headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REF = "#/components/schemas/{model}"
X_REQUEST_ID = {
    "required": True,
    "description": "The client's own, cut to 128 safe characters, or one of the server's.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}
_SECONDS = {"type": "string", "pattern": "^[1-9][0-9]*$"}
_FRAMEWORKS = frozenset({"HTTPValidationError", "ValidationError"})


def describe(app: FastAPI, schemas: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An OpenAPI 3.1 document of the routes of `app`, with further `schemas` that its routes name by reference."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description or None,
        routes=app.routes,
        servers=[{"url": "/"}],
    )
    known = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _FRAMEWORKS:
        known.pop(name, None)
    known.update(schemas or {})
    for operations in document["paths"].values():
        for operation in operations.values():
            responses = operation["responses"]
            if _is_frameworks(responses.get("422")):
                del responses["422"]
            for response in responses.values():
                response["headers"] = {"x-request-id": X_REQUEST_ID} | response.get("headers", {})
    return document


def refusals(
    answers: Mapping[str, tuple[int, str]],
    statuses: Iterable[int],
    content: Mapping[str, Any],
    *,
    maybe_retried: frozenset[int] = frozenset(),
) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for its `responses`. `answers` gives each code's status; `maybe_retried` are
    statuses of 429, 503 and 529 whose Retry-After may be absent."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        headers: dict[str, Any] = {}
        if status == 401:
            headers["WWW-Authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
        if status in (429, 503, 529):
            needed = status not in maybe_retried
            headers["Retry-After"] = {"required": needed, "description": "Seconds.", "schema": _SECONDS}
        codes = ", ".join(code for code, (of, _) in answers.items() if of == status)
        described[status] = {"description": codes, "headers": headers, "content": dict(content)}
    return described


def _is_frameworks(response: Any) -> bool:
    """Whether this is the answer that the framework would give to a body that is not valid."""
    if response is None:
        return False
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return bool(schema.get("$ref", "").rpartition("/")[2] in _FRAMEWORKS)
