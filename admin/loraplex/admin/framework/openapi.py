"""The OpenAPI document of the routes, and its page."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import FastAPI

from loraplex.adapters.sources.urls import MAX_URL_CHARS
from loraplex.adapters.store.files import CONFIG_NAME, TENSORS_NAME, TENSORS_NAMES, UPLOAD_FILE_BYTES
from loraplex.admin.problem import ANSWERS, MEDIA_TYPE
from loraplex.admin.uploads.multipart import ARCHIVE_NAME, MAX_SERVING_BYTES, SERVING_NAME
from loraplex.admin.uploads.push_form import AGREEMENT_NAME, MAX_AGREEMENT_BYTES
from loraplex.admin.uploads.receive import FORM_TYPE, PUSH_TYPE
from loraplex.admin.uploads.serving_field import ALORA
from loraplex.http.document import REF, describe, refusals
from loraplex.http.document_page import operations_of, render_page
from loraplex.serving.output.formats import ReasoningFormatName, ToolFormatName

Responses = dict[int | str, dict[str, Any]]
"""A route's `responses`."""
LOCATION: dict[str, Any] = {
    "headers": {"Location": {"description": "Where it is.", "schema": {"type": "string"}}}
}
WITH_ETAG: Responses = {
    200: {
        "headers": {
            "ETag": {
                "required": True,
                "description": "The revision, quoted.",
                "schema": {"type": "string", "pattern": '^"[0-9]+"$'},
            }
        }
    }
}
_SERVING: dict[str, Any] = {
    "type": "string",
    "maxLength": MAX_SERVING_BYTES,
    "description": "JSON: how the version is served. Its fields are tool_format, reasoning_format and alora.",
    "contentMediaType": "application/json",
}
_FORMAT_NAMES = {
    name: {"enum": [None, *get_args(formats)]}
    for name, formats in (("tool_format", ToolFormatName), ("reasoning_format", ReasoningFormatName))
} | {"alora": {"enum": [None, *ALORA]}}
_IMPORT: dict[str, Any] = {
    "type": "object",
    "description": "source and serving: import from a place that the operator allowed.",
    "properties": {
        "source": {"type": "string", "minLength": 1, "maxLength": MAX_URL_CHARS},
        "serving": {"type": "object", "properties": _FORMAT_NAMES, "additionalProperties": False},
    },
    "required": ["source"],
    "additionalProperties": False,
}
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "description": f"{CONFIG_NAME} and {TENSORS_NAME}, or one {ARCHIVE_NAME} (.tar, .tar.gz, .zip) "
                    "with those two. The tokenizer, the chat template and the ends of answers that a fine-tune "
                    "brings may come beside them.",
                    "oneOf": [
                        {
                            "type": "object",
                            "properties": {
                                name: {"type": "string", "format": "binary"} for name in (*names, *others)
                            }
                            | {SERVING_NAME: _SERVING},
                            "required": list(names),
                            "additionalProperties": False,
                        }
                        for names, others in (
                            *(
                                ((CONFIG_NAME, tensors), tuple(UPLOAD_FILE_BYTES))
                                for tensors in TENSORS_NAMES
                            ),
                            ((ARCHIVE_NAME,), ()),
                        )
                    ],
                }
            },
            "application/json": {"schema": _IMPORT},
        },
    }
}
"""`openapi_extra` of a route that reads the stream of its body itself."""
PUSH: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            PUSH_TYPE: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": f"The bytes of {TENSORS_NAME}. The config is that of the series.",
                }
            },
            FORM_TYPE: {
                "schema": {
                    "type": "object",
                    "description": "The same, and what the trainer computed: where the series has agree_within.",
                    "properties": {
                        TENSORS_NAME: {"type": "string", "format": "binary"},
                        AGREEMENT_NAME: {
                            "type": "string",
                            "maxLength": MAX_AGREEMENT_BYTES,
                            "description": "JSON: tokens and logprobs, as the agreement of a version takes them.",
                        },
                    },
                    "required": [TENSORS_NAME, AGREEMENT_NAME],
                    "additionalProperties": False,
                }
            },
        },
    }
}
"""The request body of a route that takes the tensors alone, or beside what their trainer computed."""
_PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "A problem document (RFC 9457).",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "enum": sorted(ANSWERS)},
        "param": {"type": "string"},
        "report": {"type": ["object", "null"]},
        "feature": {"type": "string"},
        "version": {"type": "string"},
    },
}


def refused(*statuses: int) -> Responses:
    """Problem documents with these statuses."""
    return refusals(ANSWERS, statuses, {MEDIA_TYPE: {"schema": {"$ref": REF.format(model="Problem")}}})


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the application's routes."""
    document = describe(app, {"Problem": _PROBLEM})
    for _, _, operation in operations_of(document):
        for parameter in operation.get("parameters", ()):
            if parameter["schema"].get("type") == "array":
                parameter |= {"style": "form", "explode": False}  # one value, separated by commas
    return document


def openapi_page(document: dict[str, Any]) -> str:
    """The document for people."""
    errors = ((status, code, title) for code, (status, title) in ANSWERS.items())
    return render_page(document, errors)
