"""The data plane's OpenAPI document: what FastAPI knows of the routes, and the shapes of answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from loraplex.api.anthropic.answer_schemas import MESSAGE_SCHEMAS
from loraplex.api.anthropic.errors import STATUSES
from loraplex.api.anthropic.headers import KEY_HEADER
from loraplex.api.anthropic.schemas import CountRequest, MessagesRequest
from loraplex.api.batches.schemas import CreateBatch
from loraplex.api.codec import dumps
from loraplex.api.embeddings.schemas import EmbeddingsRequest
from loraplex.api.errors import ANSWERS
from loraplex.api.openai.answer_schemas import ANSWER_SCHEMAS
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.api.responses.answer_schemas import RESPONSE_SCHEMAS
from loraplex.api.responses.compaction import CompactRequest
from loraplex.api.responses.schemas import ResponsesRequest
from loraplex.api.tinker.schemas import (
    CancelFuture,
    ClientConfigRequest,
    CreateSamplingSession,
    CreateSession,
    FinishSession,
    RetrieveFuture,
    SampleRequest,
    SessionHeartbeat,
)
from loraplex.http.document import REF, describe, refusals
from loraplex.http.document_page import render_page

DESCRIPTION = (
    "OpenAI's API for the base model and the adapters of the key's tenant, and what a tenant administers itself. "
    "What is no HTTP is a 400, and a head of more than 32 KiB or 128 fields a 431, both in plain text."
)
_STRING = {"type": "string"}
ANSWER_HEADERS: dict[str, Any] = {
    "x-loraplex-adapter": {"description": "NAME@vN; absent for the base model.", "schema": _STRING},
    "x-loraplex-adapter-state": {
        "description": "Where it was when the request arrived: device, host memory, disk.",
        "schema": {"enum": ["hot", "warm", "cold"]},
    },
    "x-loraplex-fingerprint": {
        "description": "The same fingerprint, seed and request give the same tokens.",
        "schema": {"type": "string", "pattern": "^fp_[0-9a-f]{16}$"},
    },
} | {
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
"""Headers of a generation's answer."""
KEY_IN_EITHER_HEADER: dict[str, Any] = {"security": [{"bearer": []}, {"apiKey": []}]}


def json_of(model: str) -> dict[str, Any]:
    """The `content` of JSON with this schema."""
    return {"application/json": {"schema": {"$ref": REF.format(model=model)}}}


def refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: OpenAI's errors with these statuses."""
    # A spent budget has no Retry-After: trying again does not help.
    return refusals(ANSWERS, statuses, json_of("Error"), maybe_retried=frozenset({429}))


def messages_refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Anthropic's errors with these statuses."""
    return refusals(STATUSES, statuses, json_of("MessagesError"), maybe_retried=frozenset({429}))


def openapi_document(app: FastAPI, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An OpenAPI 3.1 document. The paths and schemas of the document `extra` are taken over; raises ValueError where it
    calls something else by one of our schemas' names."""
    document = describe(app, _request_schemas() | ANSWER_SCHEMAS | RESPONSE_SCHEMAS | MESSAGE_SCHEMAS)
    document["components"]["securitySchemes"]["apiKey"] = {
        "type": "apiKey",
        "in": "header",
        "name": KEY_HEADER,
    }
    if extra is not None:
        schemas, others = document["components"]["schemas"], extra["components"]["schemas"]
        clash = next((name for name in others if others[name] != schemas.get(name, others[name])), None)
        if clash is not None:
            raise ValueError(f"both documents have a schema {clash}")
        schemas |= others
        document["paths"] |= {path: _behind_ours(methods) for path, methods in extra["paths"].items()}
    return document


def _request_schemas() -> dict[str, Any]:
    """From the models that the routes name. FastAPI's own would lack each null, those that stand for a value too."""
    models = (
        ChatRequest,
        CompletionRequest,
        CompactRequest,
        EmbeddingsRequest,
        ResponsesRequest,
        MessagesRequest,
        CountRequest,
        CreateBatch,
        SampleRequest,
        CreateSession,
        CreateSamplingSession,
        SessionHeartbeat,
        FinishSession,
        ClientConfigRequest,
        RetrieveFuture,
        CancelFuture,
    )
    _, made = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Any] = made["$defs"]
    return schemas


def _behind_ours(operations: Mapping[str, Any]) -> dict[str, Any]:
    """The operations of another application, with our refusals added: a server that drains or has too much to do
    refuses in our shape."""
    taken = {}
    for method, operation in operations.items():
        busy = operation["responses"]["503"]
        busy = busy | {"content": busy["content"] | json_of("Error")}
        taken[method] = operation | {"responses": operation["responses"] | {"503": busy}}
    return taken


class Document:
    """An application's document, as JSON and as a page. Both are made when one is first asked for, in a worker thread:
    that takes longer than other requests should wait. `extra` makes the document of what else is served."""

    def __init__(self, app: FastAPI, extra: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._app = app
        self._extra = extra
        self._made: tuple[bytes, str] | None = None
        self._making = asyncio.Lock()

    async def text(self) -> bytes:
        return (await self._get())[0]

    async def page(self) -> str:
        return (await self._get())[1]

    async def _get(self) -> tuple[bytes, str]:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._make)
            return self._made

    def _make(self) -> tuple[bytes, str]:
        document = openapi_document(self._app, None if self._extra is None else self._extra())
        errors = ((status, code, kind) for code, (status, kind) in ANSWERS.items())
        return dumps(document), render_page(document, errors)
