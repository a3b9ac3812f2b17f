"""Answers that must have a form: what the dialects say of it becomes a grammar, and a refusal names their fields."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.serving.errors import GrammarRefused
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def ask(plane: DataPlane, path: str, form: dict[str, Any]) -> Any:
    body: dict[str, Any] = {"model": BASE}
    if path == "/v1/responses":
        body |= {"input": "hi", "text": {"format": form}}
    else:
        body |= {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 99,
            "output_config": {"format": form},
        }
    headers = {"authorization": "Bearer lpx_acme"}
    return plane.http.post(plane.url + path, json=body, headers=headers)


def json_schema(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    name = {"name": "thing"} if path == "/v1/responses" else {}
    return {"type": "json_schema", "schema": schema, **name}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_schema_becomes_a_grammar(plane: DataPlane, path: str) -> None:
    plane.engine.script(Reply(text='{"a": 1}'))
    answer = ask(plane, path, json_schema(path, SCHEMA))
    assert answer.status_code == 200, answer.text
    grammar = plane.engine.requests[-1].grammar
    assert grammar is not None
    assert "integer" in grammar
    assert '{\\"a\\": 1}' in answer.text


def test_an_object_becomes_a_grammar(plane: DataPlane) -> None:
    assert ask(plane, "/v1/responses", {"type": "json_object"}).status_code == 200
    assert plane.engine.requests[-1].grammar is not None
    assert ask(plane, "/v1/responses", {"type": "text"}).status_code == 200
    assert plane.engine.requests[-1].grammar is None


def test_a_refusal_names_the_field(plane: DataPlane) -> None:
    refusal = GrammarRefused("the keyword 'not' is not supported")
    tried = {"type": "string", "pattern": "^a+$"}
    plane.on_loop(lambda: plane.services.grammars.refuse_with.extend([refusal, refusal]))  # type: ignore[attr-defined]
    error = ask(plane, "/v1/responses", json_schema("/v1/responses", tried)).json()["error"]
    assert error["param"].startswith("text.format.schema"), error
    assert "response_format" not in error["message"]
    error = ask(plane, "/v1/messages", json_schema("/v1/messages", tried)).json()["error"]
    assert "output_config.format.schema" in error["message"], error
    assert "response_format" not in error["message"]
