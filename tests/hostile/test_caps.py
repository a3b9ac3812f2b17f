"""Every size has a cap, and it is looked at before work is done.

The first half walks the schemas of both ports' requests, so that a new field without a cap fails; the second half goes
up to each cap and one beyond it, also of what is in no schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.adapters.store.files import MAX_CONFIG_BYTES
from loraplex.admin.framework.strict_request import MAX_JSON_BYTES, MAX_NAME_CHARS
from loraplex.api.openai import messages, sampling, schemas
from loraplex.api.routes import models
from loraplex.app.ports.connections import Bounds
from loraplex.control.rules import MAX_PAGE
from loraplex.http.bearer import MAX_SECRET_CHARS
from loraplex.http.form import MAX_HEADER_BYTES, MAX_HEADERS
from support.http import multipart
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.dialect_fields import OPEN_FIELDS
from support.http.whole_server import WholeServer, bearer

BY_THE_BODY = {
    "ChatRequest.messages[].content": "32 characters for each token of the context",
    "ChatRequest.messages[].content[].text": "the same, together",
    "ChatRequest.messages[].reasoning": "the same, together",
    "ChatRequest.messages[].reasoning_content": "the same, together",
    "ChatRequest.messages[].tool_calls[].function.arguments": "the same, together",
    "ChatRequest.tools[].function.description": "the same, together",
    "ChatRequest.tools[].function.parameters": "the same, together",
    "ChatRequest.response_format.json_schema.schema": "64 KiB and 64 levels",
    "ChatRequest.structured_outputs.json": "the same",
    "CompletionRequest.response_format.json_schema.schema": "the same",
    "CompletionRequest.structured_outputs.json": "the same",
    "CompletionRequest.prompt": "the same",
    "CompletionRequest.prompt[]": "the same; the context, in tokens",
    "SampleRequest.prompt.chunks[].tokens": "the context, in tokens",
    "TokenizeText.prompt": "32 characters for each token of the context",
    "TokenizeChat.messages[].content": "the same",
    "TokenizeChat.messages[].content[].text": "the same, together",
    "TokenizeChat.messages[].reasoning": "the same, together",
    "TokenizeChat.messages[].reasoning_content": "the same, together",
    "TokenizeChat.messages[].tool_calls[].function.arguments": "the same, together",
    "TokenizeChat.tools[].function.description": "the same, together",
    "TokenizeChat.tools[].function.parameters": "the same, together",
    "Detokenize.tokens": "the context, in tokens",
    "ClassifyRequest.input": "32 characters for each token of the context",
    "ClassifyRequest.input[]": "the same; the context, in tokens",
    "RerankRequest.query": "4,194,304 characters, with the others",
    "RerankRequest.documents[]": "the same, together",
    "ScoreRequest.text_1": "the same, together",
    "ScoreRequest.text_1[]": "the same, together",
    "ScoreRequest.text_2": "the same, together",
    "ScoreRequest.text_2[]": "the same, together",
    "ScoreRequest.data_1": "the same, together",
    "ScoreRequest.data_1[]": "the same, together",
    "ScoreRequest.data_2": "the same, together",
    "ScoreRequest.data_2[]": "the same, together",
    "ScoreRequest.queries": "the same, together",
    "ScoreRequest.queries[]": "the same, together",
    "ScoreRequest.documents": "the same, together",
    "ScoreRequest.documents[]": "the same, together",
    "ScoreRequest.items": "the same, together",
    "ScoreRequest.items[]": "the same, together",
    "upload.file": "200,000,000 bytes",
    **dict.fromkeys(OPEN_FIELDS, "they become a chat, or a completion"),
}
"""What only the body's size and the context bound; tests below show that it is looked at before tokenising."""


def open_ends(schema: dict[str, Any], where: str, definitions: dict[str, Any]) -> Iterator[str]:
    """Every place below `schema` where a value may be of any size. `anyOf`, `oneOf` and `allOf` are looked into where
    they stand for the value; beside a type they are rules between fields, which can only narrow it."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
    if "enum" in schema or "const" in schema:
        return
    kind = schema.get("type")
    if kind is None:
        choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in schema.get(word, ())]
        for choice in choices:
            yield from open_ends(choice, where, definitions)
        if choices:
            return
    if kind == "string":
        fixed = schema.get("format") in ("date-time", "binary") or schema.get("pattern", "").endswith("}$")
        if "maxLength" not in schema and not fixed:
            yield where
    elif kind in ("integer", "number"):
        low, high = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
        if not (low & set(schema) and high & set(schema)):
            yield where
    elif kind == "array":
        different = schema.get("uniqueItems") is True and "enum" in schema["items"]
        if "maxItems" not in schema and not different:
            yield where
        yield from open_ends(schema["items"], where + "[]", definitions)
    elif kind == "object":
        for name, value in schema.get("properties", {}).items():
            yield from open_ends(value, f"{where}.{name}", definitions)
        values = [*schema.get("patternProperties", {}).values()]
        if isinstance(schema.get("additionalProperties"), dict):
            values.append(schema["additionalProperties"])
        counted = "maxProperties" in schema or schema.get("additionalProperties") is False
        if (values or not schema.get("properties")) and not counted:
            yield where
        for value in values:
            yield from open_ends(value, where + "{}", definitions)
    elif kind not in ("boolean", "null"):
        yield where


@pytest.mark.parametrize("port", ["data", "admin"])
def test_every_field_has_a_cap(server: WholeServer, port: str) -> None:
    url = server.data_url if port == "data" else server.admin_url
    document = server.http.get(f"{url}/openapi.json").json()
    definitions = document["components"]["schemas"]
    found, seen = set(), 0
    for operation in (op for methods in document["paths"].values() for op in methods.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            for schema in content["schema"].get("anyOf", [content["schema"]]):
                name = schema.get("$ref", "upload").rsplit("/", 1)[-1]
                found |= set(open_ends(schema, name, definitions))
                seen += 1
        for parameter in operation.get("parameters", ()):
            seen += 1
            if parameter["in"] == "query":
                found |= set(open_ends(parameter["schema"], f"?{parameter['name']}", definitions))
    assert seen > 15
    assert found == (set(BY_THE_BODY) if port == "data" else set())


def test_the_walk_finds_open_ends() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "c": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "d": {},
            "e": {"anyOf": [{"type": "null"}, {"type": "number", "maximum": 1}]},
        },
        "additionalProperties": False,
    }
    assert set(open_ends(schema, "", {})) == {".a", ".b", ".b[]", ".c", ".d", ".e"}


TEXT = {"model": SERVED_NAME, "prompt": "x"}
USER = {"role": "user", "content": "x"}
CHAT = {"model": SERVED_NAME, "messages": [USER]}


def many(count: int) -> dict[str, int]:
    return {str(number % 250): 0 for number in range(count)}


COUNTED: dict[str, tuple[str, int, Any]] = {
    "n": ("/v1/completions", schemas.MAX_CHOICES, lambda size: {**TEXT, "n": size}),
    "prompts": ("/v1/completions", schemas.MAX_PROMPTS, lambda size: {**TEXT, "prompt": ["x"] * size}),
    "stop strings": (
        "/v1/completions",
        schemas.MAX_STOP_STRINGS,
        lambda size: {**TEXT, "stop": [f"s{n}" for n in range(size)]},
    ),
    "a stop string": ("/v1/completions", schemas.MAX_STOP_LENGTH, lambda size: {**TEXT, "stop": "s" * size}),
    "stop token ids": (
        "/v1/completions",
        sampling.MAX_STOP_TOKEN_IDS,
        lambda size: {**TEXT, "stop_token_ids": [1] * size},
    ),
    "metadata entries": (
        "/v1/completions",
        schemas.MAX_METADATA,
        lambda size: {**TEXT, "metadata": {str(n): "x" for n in range(size)}},
    ),
    "a metadata value": ("/v1/completions", 512, lambda size: {**TEXT, "metadata": {"a": "x" * size}}),
    "a metadata key": ("/v1/completions", 512, lambda size: {**TEXT, "metadata": {"a" * size: "x"}}),
    "user": ("/v1/completions", 512, lambda size: {**TEXT, "user": "u" * size}),
    "service_tier": ("/v1/completions", 64, lambda size: {**TEXT, "service_tier": "t" * size}),
    "messages": (
        "/v1/chat/completions",
        messages.MAX_MESSAGES,
        lambda size: {**CHAT, "messages": [USER] * size},
    ),
    "parts": (
        "/v1/chat/completions",
        messages.MAX_MESSAGES,
        lambda size: {
            **CHAT,
            "messages": [
                {
                    **USER,
                    "content": [{"type": "text", "text": ""}] * (size - 1) + [{"type": "text", "text": "x"}],
                }
            ],
        },
    ),
    "items": (
        "/v1/responses",
        messages.MAX_MESSAGES,
        lambda size: {"model": SERVED_NAME, "input": [USER] * size},
    ),
    "blocks": (
        "/v1/messages",
        messages.MAX_MESSAGES,
        lambda size: {
            **CHAT,
            "max_tokens": 1,
            "messages": [{**USER, "content": [{"type": "text", "text": ""}] * size}],
        },
    ),
    "stop sequences": (
        "/v1/messages",
        schemas.MAX_STOP_STRINGS,
        lambda size: {**CHAT, "max_tokens": 1, "stop_sequences": [f"s{n}" for n in range(size)]},
    ),
    "a message's name": (
        "/v1/chat/completions",
        256,
        lambda size: {**CHAT, "messages": [{**USER, "name": "n" * size}]},
    ),
}


@pytest.fixture(scope="module")
def key(server: WholeServer) -> dict[str, str]:
    return bearer(server.plane.make_key("acme", "inference", "adapters:read", "adapters:write"))


@pytest.mark.parametrize("name", list(COUNTED))
def test_counts_and_lengths(server: WholeServer, key: dict[str, str], name: str) -> None:
    path, cap, make = COUNTED[name]
    url = server.data_url + path
    within = server.http.post(url, json=make(cap), headers=key)
    # The most messages are more than this model's context; that is found out behind the cap.
    assert within.status_code == 200 or "maximum context length" in within.text, within.text
    beyond = server.http.post(url, json=make(cap + 1), headers=key)
    assert beyond.status_code == 400
    assert beyond.json()["error"].get("code", "invalid_value") == "invalid_value", beyond.text
    assert "maximum context length" not in beyond.text


def test_entries_of_logit_bias(server: WholeServer, key: dict[str, str]) -> None:
    url = f"{server.data_url}/v1/completions"
    for count, said in (
        (sampling.MAX_LOGIT_BIAS, "beyond the model"),
        (sampling.MAX_LOGIT_BIAS + 1, "at most"),
    ):
        bias = {str(number): 0 for number in range(count)}
        answer = server.http.post(url, json={**TEXT, "logit_bias": bias}, headers=key)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]


def test_the_body_of_the_data_plane(server: WholeServer, key: dict[str, str]) -> None:
    cap = 4 << 20
    body = json.dumps(TEXT).encode()
    url = f"{server.data_url}/v1/completions"
    assert server.http.post(url, content=body.ljust(cap), headers=key).status_code == 200
    for content in (body.ljust(cap + 1), iter([body.ljust(cap), b" "])):
        answer = server.http.post(url, content=content, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_the_body_of_the_admin_plane(server: WholeServer) -> None:
    body = b'{"id": "Not A Name"}'
    for content, status in (
        (body.ljust(MAX_JSON_BYTES), 400),
        (body.ljust(MAX_JSON_BYTES + 1), 413),
        (iter([body.ljust(MAX_JSON_BYTES), b" "]), 413),
    ):
        answer = server.http.post(
            f"{server.admin_url}/admin/v1/tenants", content=content, headers=bearer(ADMIN_TOKEN)
        )
        assert answer.status_code == status, answer.text


def test_heads(server: WholeServer) -> None:
    bounds = Bounds()
    for url in (server.data_url, server.admin_url):
        for headers, status in (
            ({"x": "y" * (bounds.head_bytes - 1000)}, 200),
            ({"x": "y" * bounds.head_bytes}, 431),
            ({f"x-{n}": "y" for n in range(bounds.headers - 10)}, 200),
            ({f"x-{n}": "y" for n in range(bounds.headers)}, 431),
        ):
            assert server.http.get(f"{url}/livez", headers=headers).status_code == status
        assert server.http.get(f"{url}/livez?{'q' * bounds.head_bytes}").status_code == 431


def test_names_in_paths(server: WholeServer, key: dict[str, str]) -> None:
    base = f"{server.data_url}/admin/v1/tenants"
    cases = {
        f"{server.data_url}/v1/models/{'m' * models.MAX_NAME}": "model_not_found",
        f"{server.data_url}/v1/models/{'m' * (models.MAX_NAME + 1)}": "model_not_found",
        f"{base}/{'t' * MAX_NAME_CHARS}/adapters": "tenant_not_found",
        f"{base}/{'t' * (MAX_NAME_CHARS + 1)}/adapters": "not_found",
        f"{base}/acme/adapters/{'n' * MAX_NAME_CHARS}": "adapter_not_found",
        f"{base}/acme/adapters/{'n' * (MAX_NAME_CHARS + 1)}": "not_found",
        f"{base}/acme/adapters/support/versions/v{'1' * MAX_NAME_CHARS}": "not_found",
        f"{base}/acme/adapters/support/versions/v1000000000": "version_not_found",
    }
    for url, code in cases.items():
        answer = server.http.get(url, headers=key)
        told = answer.json()
        assert (answer.status_code, told.get("error", told)["code"]) == (404, code), url[:100]
    upload = f"{base}/acme/adapters/{{}}/versions"
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}
    for name, status in (("n" * 63, 422), ("n" * 64, 400), ("A", 400), (".", 404), ("-a", 400)):
        answer = server.http.post(upload.format(name), files=files, headers=key)
        assert answer.status_code in (status, 405 if name == "." else status), (name[:10], answer.text)


def test_names_in_bodies(server: WholeServer, key: dict[str, str]) -> None:
    for model, status in (("m" * 512, 404), ("m" * 513, 400), ("", 400)):
        answer = server.http.post(
            f"{server.data_url}/v1/completions", json={**TEXT, "model": model}, headers=key
        )
        assert answer.status_code == status


def test_keys(server: WholeServer) -> None:
    for secret in ("x" * MAX_SECRET_CHARS, "x" * (MAX_SECRET_CHARS + 1), "x" * 20_000):
        assert server.http.get(f"{server.data_url}/v1/models", headers=bearer(secret)).status_code == 401
    for secret in ("x" * MAX_SECRET_CHARS, "x" * (MAX_SECRET_CHARS + 1)):
        assert (
            server.http.get(f"{server.admin_url}/admin/v1/tenants", headers=bearer(secret)).status_code == 401
        )


def test_queries(server: WholeServer) -> None:
    url = f"{server.admin_url}/admin/v1/tenants"
    for query, status in (
        (f"limit={MAX_PAGE}", 200),
        (f"limit={MAX_PAGE + 1}", 400),
        ("limit=" + "9" * 5000, 400),
        ("limit=0", 400),
        ("limit=-1", 400),
        ("limit=1e2", 400),
        ("cursor=" + "c" * 513, 400),
        ("cursor=%00", 400),
        ("cursor=%ff%fe", 400),
        ("&".join("limit=1" for _ in range(2000)), 400),
        ("a=1&" * 2000, 400),
    ):
        answer = server.http.get(f"{url}?{query}", headers=bearer(ADMIN_TOKEN))
        assert answer.status_code == status, (query[:40], answer.text)


def test_parts_of_an_upload(server: WholeServer, key: dict[str, str]) -> None:
    url = f"{server.data_url}/admin/v1/tenants/acme/adapters/capped/versions"
    config, tensors = "adapter_config.json", "adapter_model.safetensors"
    many_headers = b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEADERS + 1))
    bodies = {
        "another part": multipart.body(multipart.part("other", b"x")),
        "a part twice": multipart.body(multipart.part(config, b"{}"), multipart.part(config, b"{}")),
        "many parts": multipart.body(*[multipart.part(config, b"{}")] * 1000),
        "many headers": multipart.body(multipart.part(config, b"{}", headers=many_headers)),
        "a long header": multipart.body(
            multipart.part(config, b"{}", headers=b"X: " + b"y" * MAX_HEADER_BYTES + b"\r\n")
        ),
        "a large config": multipart.body(multipart.part(config, b" " * (MAX_CONFIG_BYTES + 1))),
        "large tensors": multipart.body(
            multipart.part(config, b"{}"), multipart.part(tensors, bytes(8 << 20))
        ),
        "much between the parts": b"x" * (128 << 10) + multipart.body(multipart.part(config, b"{}")),
        "much behind the end": multipart.files(b"{}", b"") + b"x" * (128 << 10),
    }
    for name, body in bodies.items():
        answer = server.http.post(url, content=body, headers={**key, "content-type": multipart.CONTENT_TYPE})
        assert answer.status_code in ((413,) if "large" in name else (400, 413)), (name, answer.text)
    assert server.plane.leftovers() == []
