"""The OpenAPI document and its page, made from the operations. No script, and nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from loraplex.adapters.files import CONFIG_NAME, TENSORS_NAME
from loraplex.admin.described import PATH_PARAMETERS
from loraplex.admin.multipart import ARCHIVE_NAME
from loraplex.admin.operation import Operation
from loraplex.admin.problem import ANSWERS, MEDIA_TYPE

PREFIX = "/admin/v1"
_REF = "#/components/schemas/{model}"

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
    },
}
_HEADERS: dict[str, Any] = {
    "x-request-id": {
        "required": True,
        "description": "The client's own, cut to 128 safe characters, or one of the server's.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 128},
    }
}
_FILE_HEADERS: dict[str, Any] = {
    name: {"required": True, "schema": {"type": "string"}}
    for name in ("Content-Length", "Content-Disposition")
}
_UPLOAD: dict[str, Any] = {
    "description": f"{CONFIG_NAME} and {TENSORS_NAME}, or one {ARCHIVE_NAME} (.tar, .tar.gz, .zip) with those two.",
    "oneOf": [
        {
            "type": "object",
            "properties": {name: {"type": "string", "format": "binary"} for name in names},
            "required": list(names),
            "additionalProperties": False,
        }
        for names in ((CONFIG_NAME, TENSORS_NAME), (ARCHIVE_NAME,))
    ],
}


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of `operations`."""
    inputs = {row.body for row in operations if row.body is not None}
    outputs = {model for row in operations for model in row.answers.values() if model is not None}
    _, definitions = models_json_schema(
        [(model, "validation") for model in sorted(inputs, key=lambda m: m.__name__)]
        + [(model, "serialization") for model in sorted(outputs, key=lambda m: m.__name__)],
        ref_template=_REF,
    )
    paths: dict[str, dict[str, Any]] = {}
    for row in operations:
        paths.setdefault(PREFIX + row.path, {})[row.method.lower()] = _describe(row)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Loraplex admin API", "version": version("loraplex")},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {"Problem": _PROBLEM, **definitions.get("$defs", {})},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(row: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": row.summary,
        "description": f"Needs {_access(row)}.",
        "operationId": row.handler.__name__.rstrip("_"),
        "parameters": [*_path_parameters(row), *_query_parameters(row), *_header_parameters(row)],
        "responses": {str(status): _answer(row, status, model) for status, model in row.answers.items()}
        | {str(status): _error(status) for status in sorted(_errors(row))},
    }
    if row.upload:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    elif row.body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=row.body.__name__)}}}
        described["requestBody"] = {"required": not row.body_optional, "content": content}
    return described


def _access(row: Operation) -> str:
    if row.access == "operator":
        return "the admin token"
    return f"the admin token, or a key of the tenant with the scope {row.access}"


def _errors(row: Operation) -> set[int]:
    """The statuses that a call may be refused with. Also a GET may come with a body, and be refused for it."""
    statuses = {400, 401, 403, 408, 413, 415, 500, 503}
    if row.path_parameters:
        statuses.add(404)
    if row.method != "GET":
        statuses |= {409, 507}
    if row.action is not None and row.access != "operator":
        statuses.add(429)
    if row.upload:
        statuses.add(422)
    if row.etagged and row.method != "GET":
        statuses.add(412)
    return statuses


def _error(status: int) -> dict[str, Any]:
    headers: dict[str, Any] = dict(_HEADERS)
    if status == 401:
        headers["WWW-Authenticate"] = {"required": True, "schema": {"const": "Bearer"}}
    if status in (429, 503):
        seconds = {"type": "string", "pattern": "^[1-9][0-9]*$"}
        headers["Retry-After"] = {"required": True, "description": "Seconds.", "schema": seconds}
    return {
        "description": ", ".join(code for code, (of, _) in ANSWERS.items() if of == status),
        "headers": headers,
        "content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}}},
    }


def _path_parameters(row: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": PATH_PARAMETERS[name]},
        }
        for name in row.path_parameters
    ]


def _query_parameters(row: Operation) -> list[dict[str, Any]]:
    if row.query is None:
        return []
    properties = row.query.model_json_schema()["properties"]
    schemas = {name: _without_null(schema) for name, schema in properties.items()}
    return [
        {"name": name, "in": "query", "schema": schema}
        | ({"style": "form", "explode": False} if schema.get("type") == "array" else {})
        for name, schema in schemas.items()
    ]


def _header_parameters(row: Operation) -> list[dict[str, Any]]:
    if not row.etagged or row.method == "GET":
        return []
    said = "The ETag of the state that is to be changed, or several; any other state is a 412."
    return [{"name": "If-Match", "in": "header", "description": said, "schema": {"type": "string"}}]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query has no way to say null: what may be null may be left out."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else schema


def _answer(row: Operation, status: int, model: type[BaseModel] | None) -> dict[str, Any]:
    if row.file_type is not None:
        content = {row.file_type: {"schema": {"type": "string", "format": "binary"}}}
        return {"description": "The file", "headers": _HEADERS | _FILE_HEADERS, "content": content}
    if model is None:
        return {"description": "Done", "headers": _HEADERS}
    headers = dict(_HEADERS)
    if status == 201 and model.__name__ == "Version":
        headers["Location"] = {"description": "Where it is.", "schema": {"type": "string"}}
    if row.etagged:
        etag = {"type": "string", "pattern": '^"[0-9]+"$'}
        headers["ETag"] = {"required": True, "description": "The revision, quoted.", "schema": etag}
    schema = {"$ref": _REF.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    if row.also_as is not None:
        content[row.also_as] = {"schema": {"type": "string"}}
        next_page = {
            "description": "The cursor of the next page, where there is one.",
            "schema": {"type": "string"},
        }
        headers["X-Next-Cursor"] = next_page
    return {"description": model.__name__, "headers": headers, "content": content}


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.4rem}section{border-top:1px solid #ddd;padding:.6rem 0}h2{font-size:1rem;margin:0}"
    "code{font-family:ui-monospace,monospace}b.m{display:inline-block;min-width:4.5rem}p{margin:.2rem 0}"
    "table{border-collapse:collapse;margin:.3rem 0}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}section{border-color:#333}a{color:#8bf}}"
)


def docs_page(operations: Sequence[Operation]) -> str:
    """The operations for people: what each needs, takes and answers."""
    sections = "".join(_section(row) for row in operations)
    errors = "".join(
        f"<tr><td>{status}</td><td><code>{escape(code)}</code></td><td>{escape(title)}</td></tr>"
        for code, (status, title) in sorted(ANSWERS.items(), key=lambda item: (item[1][0], item[0]))
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Loraplex admin API</title><style>{_STYLE}</style><h1>Loraplex admin API</h1>"
        "<p>JSON over HTTP with <code>Authorization: Bearer</code>. The same for programs: "
        f"<a href=openapi.json>openapi.json</a>.</p>{sections}"
        f"<section><h2>Errors ({MEDIA_TYPE})</h2><table>{errors}</table></section></html>"
    )


def _section(row: Operation) -> str:
    rows = [("needs", escape(_access(row)))]
    if row.query is not None:
        rows.append(("query", ", ".join(f"<code>{escape(name)}</code>" for name in row.query.model_fields)))
    if row.upload:
        rows.append(("body", escape(_UPLOAD["description"])))
    elif row.body is not None:
        rows.append(("body", _fields(row.body)))
    for status, model in row.answers.items():
        shown = row.file_type or "nothing" if model is None else _fields(model)
        rows.append((f"answers {status}", shown))
    table = "".join(f"<tr><td>{name}</td><td>{text}</td></tr>" for name, text in rows)
    return (
        f"<section><h2><b class=m>{row.method}</b><code>{escape(PREFIX + row.path)}</code></h2>"
        f"<p>{escape(row.summary)}</p><table>{table}</table></section>"
    )


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(
        f"<code>{escape(name)}{'' if field.is_required() else '?'}</code>"
        for name, field in model.model_fields.items()
    )
