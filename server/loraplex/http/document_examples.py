"""An example request for each operation of an OpenAPI document, as a curl command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

_QUESTION = "Where is my parcel?"
_BY_NAME: Mapping[str, Any] = {
    "model": "support",
    "messages": [{"role": "user", "content": _QUESTION}],
    "prompt": _QUESTION,
    "input": _QUESTION,
    "text": _QUESTION,
    "tokens": [1, 2, 3],
    "logprobs": [-1.5, -0.25],
    "source": "s3://checkpoints/acme/step-100",
    "lora_name": "support",
    "lora_path": "/srv/checkpoints/acme/step-100",
    "version": "v1",
    "group_by": ["tenant"],
    "max_tokens": 64,
    "display_name": "Acme",
    "name": "ci",
    "grace_seconds": 3600,
}
"""Values of fields and parameters whose types do not tell a good one."""
_IN_PATHS: Mapping[str, str] = {
    "tenant": "acme",
    "replica": "replica-1",
    "name": "support",
    "version": "v1",
    "id": "support",
    "key": "key-0123456789abcdef",
    "batch": "batch_0123456789abcdef",
    "session_id": "session-0123456789abcdef",
    "sampler_id": "sampling-abcdefghijk-c3VwcG9ydA",
}
_MAX_DEPTH = 6


def resolve(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference leads to, or itself."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> Any:
    """A value of the schema: of an object its required fields, or its first one where none is."""
    schema = resolve(schema, schemas)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return next((value for value in schema["enum"] if value is not None), None)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            branch = next((one for one in schema[key] if one.get("type") != "null"), schema[key][0])
            if schema.get("type") == "object":
                fields = schema.get("properties", {}) | branch.get("properties", {})
                rest = {name: value for name, value in schema.items() if name != key}
                needed = [*rest.get("required", ()), *branch.get("required", ())]
                branch = {**rest, **branch, "properties": fields, "required": needed}
            return example_of(branch, schemas, depth)
    kind = schema.get("type")
    if kind == "array":
        return [example_of(schema.get("items", {}), schemas, depth + 1)]
    if kind == "object":
        return _object(schema, schemas, depth)
    if kind in ("integer", "number"):
        return max(1, schema.get("minimum", 1))
    if kind == "boolean":
        return True
    return "acme" if "pattern" in schema or kind == "string" else {}


def _object(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> dict[str, Any]:
    fields = schema.get("properties", {})
    chosen = schema.get("required") or list(fields)[:1]
    if depth > _MAX_DEPTH:
        return {}
    return {name: _field(name, fields.get(name, {}), schemas, depth) for name in chosen}


def _field(name: str, schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> Any:
    if name in _BY_NAME and resolve(schema, schemas).get("type") != "object":
        return _BY_NAME[name]
    return example_of(schema, schemas, depth + 1)


def example_request(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Commands of a shell in which URL is the server's address and KEY a secret: one for each kind of body."""
    for name, value in _IN_PATHS.items():
        path = path.replace(f"{{{name}}}", value)
    needed = [p for p in operation.get("parameters", ()) if p.get("required")]
    query = "&".join(f"{p['name']}={_parameter(p, schemas)}" for p in needed if p["in"] == "query")
    line = [f'curl {"" if method == "GET" else f"-X {method} "}"$URL{path}{"?" + query if query else ""}"']
    if any(operation.get("security", ())):
        line.append('-H "Authorization: Bearer $KEY"')
    line += [f'-H "{p["name"]}: {_parameter(p, schemas)}"' for p in needed if p["in"] == "header"]
    commands = []
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        if media_type == "application/json":
            body = json.dumps(example_of(content["schema"], schemas), ensure_ascii=False)
            options = ['-H "Content-Type: application/json"', f"-d {shlex.quote(body)}"]
            commands.append(line + options)
        elif media_type == "application/octet-stream":
            options = [
                '-H "Content-Type: application/octet-stream"',
                "--data-binary @adapter_model.safetensors",
            ]
            commands.append(line + options)
        else:
            forms = content["schema"].get("oneOf", [content["schema"]])
            commands += [
                line
                + [f"-F {name}=@{'adapter.tar.gz' if '.' not in name else name}" for name in form["required"]]
                for form in forms
            ]
    return "\n".join(" \\\n  ".join(command) for command in commands or [line])


def _parameter(parameter: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    name, schema = parameter["name"], parameter["schema"]
    value = _BY_NAME[name] if name in _BY_NAME else example_of(schema, schemas)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
