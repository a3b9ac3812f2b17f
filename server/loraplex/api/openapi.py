"""The data plane's OpenAPI document: requests from their schemas, answers and errors from the tables of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from loraplex.api.answer_schemas import ANSWER_SCHEMAS
from loraplex.api.deadline import HEADER, MAX_MS
from loraplex.api.errors import ANSWERS, NEEDS_RETRY_AFTER
from loraplex.api.schemas import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "OpenAI's API for the base model and the adapters of the key's tenant, and what a tenant administers itself. "
    "What is no HTTP is a 400, and a head of more than 32 KiB or 128 fields a 431, both in plain text."
)
_KEYED = (401, 403, 500, 503)
_GENERATION = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_STRING = {"type": "string"}
_VERSION = {"type": "object", "required": ["version"], "properties": {"version": _STRING}}
_X_REQUEST_ID = {
    "required": True,
    "description": "The client's own, cut to 128 safe characters, or one of the server's.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}
_ADAPTER = {
    "x-loraplex-adapter": {"description": "NAME@vN; absent for the base model.", "schema": _STRING},
    "x-loraplex-adapter-state": {
        "description": "Where it was when the request arrived: device, host memory, disk.",
        "schema": {"enum": ["hot", "warm", "cold"]},
    },
}
_LIMITS = {
    f"x-ratelimit-{what}-{kind}": {
        "description": f"Of the limit on {kind}, where one is set.",
        "schema": {
            "type": "string",
            "pattern": "^([0-9]+h)?([0-9]+m)?[0-9]+s$" if what == "reset" else "^[0-9]+$",
        },
    }
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
}


def openapi(*, metrics: bool, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `metrics`: whether this port has them. The paths and schemas of the document `extra`
    are taken over; raises ValueError where it calls something else by one of our schemas' names."""
    _, requests = models_json_schema(
        [(ChatRequest, "validation"), (CompletionRequest, "validation")], ref_template=_REF
    )
    schemas: dict[str, Any] = {**requests["$defs"], **ANSWER_SCHEMAS}
    paths = {
        "/v1/chat/completions": {
            "post": _generation("createChatCompletion", "Answer a conversation.", "Chat", "ChatCompletion")
        },
        "/v1/completions": {
            "post": _generation("createCompletion", "Continue a text.", "Completion", "Completion")
        },
        "/v1/models": {
            "get": _operation("listModels", "What this key may use.", _json("ModelList"), _KEYED),
        },
        "/v1/models/{id}": {"get": _one_model()},
        **{f"/{name}": {"get": _probe(name)} for name in ("livez", "readyz", "startupz", "health")},
        "/version": {"get": _open("showVersion", "The server's version.", "application/json", _VERSION)},
        "/openapi.json": {
            "get": _open("showDocument", "This document.", "application/json", {"type": "object"})
        },
    }
    if metrics:
        paths["/metrics"] = {"get": _open("scrape", "The vllm:* metrics.", "text/plain", _STRING)}
    if extra is not None:
        others = extra["components"]["schemas"]
        clash = next((name for name in others if others[name] != schemas.get(name, others[name])), None)
        if clash is not None:
            raise ValueError(f"both documents have a schema {clash}")
        schemas |= others
        paths |= {path: _refused_at_the_door(operations) for path, operations in extra["paths"].items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loraplex API", "version": version("loraplex"), "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _refused_at_the_door(operations: Mapping[str, Any]) -> dict[str, Any]:
    """What another app answers, behind ours: a server that drains or has too much to do refuses in our shape."""
    taken = {}
    for method, operation in operations.items():
        busy = operation["responses"]["503"]
        busy = busy | {"content": busy["content"] | _json("Error")}
        taken[method] = operation | {"responses": operation["responses"] | {"503": busy}}
    return taken


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def _operation(
    name: str,
    summary: str,
    content: Mapping[str, Any],
    errors: Iterable[int],
    headers: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    answered = {"x-request-id": _X_REQUEST_ID, **(headers or {})}
    responses = {"200": {"description": "Done", "headers": answered, "content": content}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": responses | {str(status): _error(status) for status in errors},
    }


def _error(status: int) -> dict[str, Any]:
    headers = {"x-request-id": _X_REQUEST_ID}
    if status == 401:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
    if status in NEEDS_RETRY_AFTER:
        # A spent budget has none: trying again does not help.
        seconds = {"type": "string", "pattern": "^[1-9][0-9]*$"}
        headers["Retry-After"] = {"required": status == 503, "description": "Seconds.", "schema": seconds}
    codes = ", ".join(code for code, (of, _) in ANSWERS.items() if of == status)
    return {"description": codes, "headers": headers, "content": _json("Error")}


def _generation(name: str, summary: str, kind: str, answer: str) -> dict[str, Any]:
    events = "Server-sent events: each one's data is a chunk as JSON, the last one's is [DONE]."
    stream = {"text/event-stream": {"schema": {"description": events}}}
    described = _operation(name, summary, _json(answer) | stream, _GENERATION, {**_ADAPTER, **_LIMITS})
    described["requestBody"] = {"required": True, "content": _json(f"{kind}Request")}
    described["parameters"] = [
        {
            "name": HEADER,
            "in": "header",
            "description": "Milliseconds that the whole request may take.",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_MS},
        }
    ]
    return described


def _one_model() -> dict[str, Any]:
    described = _operation("getModel", "One of them, by any of its names.", _json("Model"), (*_KEYED, 404))
    described["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": _STRING}]
    return described


def _open(name: str, summary: str, media_type: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """An operation without a key."""
    return _operation(name, summary, {media_type: {"schema": schema}}, (500, 503)) | {"security": []}


def _probe(name: str) -> dict[str, Any]:
    described = _operation(name, "A probe.", _json("Probe"), ()) | {"security": []}
    headers = {"x-request-id": _X_REQUEST_ID}
    described["responses"]["503"] = {
        "description": "Not now; why.",
        "headers": headers,
        "content": _json("ProbeFailure"),
    }
    return described
