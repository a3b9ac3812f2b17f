"""The OpenAPI document of the routes, and an HTML page of it: no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, get_args

from fastapi import FastAPI

from loraplex.adapters.sources.urls import MAX_URL_CHARS
from loraplex.adapters.store.files import CHAT_FILE_BYTES, CONFIG_NAME, TENSORS_NAME
from loraplex.admin.problem import ANSWERS, MEDIA_TYPE
from loraplex.admin.uploads.multipart import ARCHIVE_NAME, MAX_SERVING_BYTES, SERVING_NAME
from loraplex.http.document import REF, describe, refusals
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
    "description": "JSON: how the version is served. Its fields are tool_format and reasoning_format.",
    "contentMediaType": "application/json",
}
_FORMAT_NAMES = {
    name: {"enum": [None, *get_args(formats)]}
    for name, formats in (("tool_format", ToolFormatName), ("reasoning_format", ReasoningFormatName))
}
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
                    "with those two. The chat template and the ends of answers that a fine-tune brings may come beside "
                    "them.",
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
                            ((CONFIG_NAME, TENSORS_NAME), tuple(CHAT_FILE_BYTES)),
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
    for _, _, operation in _operations(document):
        for parameter in operation.get("parameters", ()):
            if parameter["schema"].get("type") == "array":
                parameter |= {"style": "form", "explode": False}  # one value, separated by commas
    return document


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.4rem}section{border-top:1px solid #ddd;padding:.6rem 0}h2{font-size:1rem;margin:0}"
    "code{font-family:ui-monospace,monospace}b.m{display:inline-block;min-width:4.5rem}p{margin:.2rem 0}"
    "table{border-collapse:collapse;margin:.3rem 0}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}section{border-color:#333}a{color:#8bf}}"
)


def openapi_page(document: dict[str, Any]) -> str:
    """The document's operations for people: what each needs, takes and answers."""
    schemas = document["components"]["schemas"]
    sections = "".join(_section(*operation, schemas) for operation in _operations(document))
    errors = "".join(
        f"<tr><td>{status}</td><td><code>{escape(code)}</code></td><td>{escape(title)}</td></tr>"
        for code, (status, title) in sorted(ANSWERS.items(), key=lambda item: (item[1][0], item[0]))
    )
    title = escape(document["info"]["title"])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        "<p>JSON over HTTP with <code>Authorization: Bearer</code>. The same for programs: "
        f"<a href=openapi.json>openapi.json</a>.</p>{sections}"
        f"<section><h2>Errors ({MEDIA_TYPE})</h2><table>{errors}</table></section></html>"
    )


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def _section(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    rows = [("", escape(operation["description"]))]
    for place in ("query", "header"):
        names = [item["name"] for item in operation.get("parameters", ()) if item["in"] == place]
        if names:
            rows.append((place, ", ".join(f"<code>{escape(name)}</code>" for name in names)))
    if "requestBody" in operation:
        rows.append(("body", _content(operation["requestBody"], schemas)))
    for status, response in operation["responses"].items():
        if status < "300":
            rows.append((f"answers {status}", _content(response, schemas)))
    table = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in rows)
    return (
        f"<section><h2><b class=m>{method}</b><code>{escape(path)}</code></h2>"
        f"<p>{escape(operation['summary'])}</p><table>{table}</table></section>"
    )


def _content(part: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The fields of a body, a question mark behind those that may be left out."""
    for media_type, content in part.get("content", {}).items():
        schema = content["schema"]
        schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
        if "properties" not in schema:
            return escape(schema.get("description", media_type))
        needed = schema.get("required", ())
        return ", ".join(
            f"<code>{escape(name)}{'' if name in needed else '?'}</code>" for name in schema["properties"]
        )
    return "nothing"
