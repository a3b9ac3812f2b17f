"""An OpenAPI document as one page of HTML for people: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

from loraplex.http.document_examples import example_request, resolve

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:1rem;margin:0}h4{margin:.8rem 0 .2rem}"
    "section{border-top:1px solid #ccc;padding:.8rem 0}code,pre{font:13px/1.45 ui-monospace,monospace}"
    "pre{background:#f3f3f3;padding:.6rem;overflow-x:auto;margin:.3rem 0}b.m{display:inline-block;min-width:4.5rem}"
    "p{margin:.2rem 0}table{border-collapse:collapse;margin:.3rem 0;width:100%}"
    "th,td{padding:.15rem .8rem .15rem 0;vertical-align:top;text-align:left;border-bottom:1px solid #eee}"
    "th{font-weight:600;color:#666}td:first-child{white-space:nowrap}i{color:#a33;font-style:normal}"
    "nav a{display:inline-block;margin-right:1rem}summary{cursor:pointer}"
    "@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}section,th,td{border-color:#333}"
    "pre{background:#222}a{color:#8bf}i{color:#f99}th{color:#999}}"
)
_BOUNDS = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "more than {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "less than {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} fields"),
    ("multipleOf", "a multiple of {}"),
)


def render_page(document: Mapping[str, Any], errors: Iterable[tuple[int, str, str]]) -> str:
    """The operations with their parameters, bodies, answers and an example, then the schemas, then the `errors`:
    status, code and what it is."""
    schemas = document["components"]["schemas"]
    operations = list(operations_of(document))
    title = escape(document["info"]["title"])
    about = escape(document["info"].get("description") or "")
    links = "".join(
        f"<a href='#{_anchor(method, path)}'><code>{method} {escape(path)}</code></a> "
        for method, path, _ in operations
    )
    rows = (
        (str(status), f"<code>{escape(code)}</code>", escape(what)) for status, code, what in sorted(errors)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><p>{about}</p>"
        "<p>JSON over HTTP. The same for programs: <a href=openapi.json>openapi.json</a>. In the examples <code>URL"
        "</code> is this server's address and <code>KEY</code> a secret. An <i>*</i> marks what is required.</p>"
        f"<nav>{links}</nav><h2>Routes</h2>{''.join(_section(*one, schemas) for one in operations)}"
        f"<h2>Schemas</h2>{''.join(_schema(name, schema) for name, schema in sorted(schemas.items()))}"
        f"<h2 id=errors>Errors</h2>{_table(('status', 'code', 'what it is'), rows)}</html>"
    )


def operations_of(document: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and operation, in the document's order."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield method.upper(), path, operation


def _section(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    scopes = sorted(
        {scope for way in operation.get("security", ()) for names in way.values() for scope in names}
    )
    parts = [
        f"<section id='{_anchor(method, path)}'><h3><b class=m>{method}</b><code>{escape(path)}</code></h3>",
        f"<p>{escape(operation.get('summary', ''))} {escape(operation.get('description', ''))}</p>",
    ]
    if scopes:
        parts.append(
            f"<p>Scope of the key: {', '.join(f'<code>{escape(scope)}</code>' for scope in scopes)}</p>"
        )
    if operation.get("parameters"):
        rows = (
            (
                _name(p["name"], bool(p.get("required"))),
                p["in"],
                _type(p["schema"]),
                _default(p["schema"]),
                escape(p.get("description") or p["schema"].get("description") or ""),
            )
            for p in operation["parameters"]
        )
        parts.append(f"<h4>Parameters</h4>{_table(('name', 'in', 'type', 'default', 'what it is'), rows)}")
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h4>Body: <code>{escape(media_type)}</code></h4>{_body(content['schema'], schemas)}")
    parts.append(f"<h4>Example</h4><pre>{escape(example_request(method, path, operation, schemas))}</pre>")
    answers = ((status, *_answer(answer)) for status, answer in operation["responses"].items())
    parts.append(
        f"<h4>Answers</h4>{_table(('status', 'body', 'what it is, and its headers'), answers)}</section>"
    )
    return "".join(parts)


def _answer(answer: Mapping[str, Any]) -> tuple[str, str]:
    bodies = [
        f"{escape(media_type)}: {_type(content.get('schema', {}))}"
        for media_type, content in answer.get("content", {}).items()
    ]
    headers = ", ".join(f"<code>{escape(name)}</code>" for name in answer.get("headers", {}))
    text = escape(answer.get("description", ""))
    return "<br>".join(bodies) or "nothing", f"{text}<br>{headers}" if headers else text


def _body(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    schema = resolve(schema, schemas)
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    ways = schema.get("oneOf") or schema.get("anyOf")
    if ways and "properties" not in schema:
        return about + "<p>or</p>".join(_body(way, schemas) for way in ways)
    return about + _fields(schema)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f"<section id='schema-{escape(name)}'><h3><code>{escape(name)}</code></h3>{about}{_fields(schema)}</section>"


def _fields(schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    rows = (
        (_name(name, name in needed), _type(field), _default(field), escape(field.get("description", "")))
        for name, field in schema["properties"].items()
    )
    depend = schema.keys() & {"allOf", "anyOf", "oneOf"}
    also = "<p>Some fields depend on others: openapi.json has the conditions.</p>" if depend else ""
    return _table(("field", "type", "default", "what it is"), rows) + also


def _type(schema: Mapping[str, Any]) -> str:
    """A type with its allowed values and bounds."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#schema-{name}'>{name}</a>"
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return " | ".join(map(_value, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if schema.keys() == {"description"}:
        return escape(schema["description"])
    kinds = schema.get("type", "any")
    text = " or ".join([kinds] if isinstance(kinds, str) else kinds)
    if "items" in schema and kinds == "array":
        text = f"array of ({_type(schema['items'])})" if schema["items"] else "array"
    elif "properties" in schema:
        text += (
            " {"
            + ", ".join(f"{escape(name)}: {_type(one)}" for name, one in schema["properties"].items())
            + "}"
        )
    elif isinstance(values := schema.get("additionalProperties"), Mapping) and kinds == "object":
        text = f"object of ({_type(values)})"
    if "format" in schema:
        text += f" ({escape(schema['format'])})"
    bounds = [_bound(words, schema[key]) for key, words in _BOUNDS if key in schema]
    if "pattern" in schema:
        bounds.append(f"like <code>{escape(schema['pattern'])}</code>")
    return ", ".join((text, *bounds))


def _bound(words: str, value: float) -> str:
    said = words.format(_number(value))
    return said.removesuffix("s") if value == 1 else said


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def _default(schema: Mapping[str, Any]) -> str:
    return _value(schema["default"]) if "default" in schema else ""


def _value(value: Any) -> str:
    return f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"


def _name(name: str, is_required: bool) -> str:
    return f"<code>{escape(name)}</code>{'<i>*</i>' if is_required else ''}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table without the columns that have no text in any row."""
    columns = [column for column in zip(head, *rows, strict=True) if any(column[1:])]
    shown, *cells = zip(*columns, strict=True) if columns else [()]
    titles = "".join(f"<th>{title}" for title in shown)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".replace("/", "-").replace("{", "").replace("}", ""))
