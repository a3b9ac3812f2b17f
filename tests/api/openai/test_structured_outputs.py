"""`response_format` and `structured_outputs`: the grammar that reaches the engine, or the field that is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from loraplex.serving.errors import GrammarRefused, GrammarsUnavailable, GrammarTimeSpent
from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.process import ForkProcess
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.checker import GrammarChecker, GrammarLimits
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.models.byte_tokenizer import write_byte_tokenizer
from support.models.matching import takes

KEY = {"Authorization": "Bearer lpx_acme"}
CHAT = ("chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "hi"}]})
TEXT = ("completions", {"model": BASE, "prompt": "hi"})
BOTH = pytest.mark.parametrize(("route", "body"), [CHAT, TEXT])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def post(plane: DataPlane, route: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
    return plane.http.post(f"{plane.url}/v1/{route}", json={**body, **fields}, headers=KEY)


def grammar_of(plane: DataPlane, route: str, body: dict[str, Any], **fields: Any) -> str:
    """The grammar that the engine is asked to follow, in each of its sequences. It was built on trial before."""
    before = len(plane.grammars.checked)
    answer = post(plane, route, body, **fields)
    assert answer.status_code == 200, answer.text
    grammars = {request.grammar for request in plane.engine.requests}
    assert len(grammars) == 1
    grammar = grammars.pop()
    assert grammar is not None
    checked = plane.grammars.checked[before:]
    assert checked in ([[("acme", grammar)], [("acme", grammar.removeprefix("lark of "))]])
    return grammar


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@BOTH
@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_free_answers_have_no_grammar(plane: DataPlane, route: str, body: Any, fields: Any) -> None:
    assert post(plane, route, body, **fields).status_code == 200
    assert plane.engine.requests[-1].grammar is None
    assert plane.grammars.checked == []


@BOTH
@pytest.mark.parametrize("strict", [True, False, None])
def test_schema_is_enforced_whatever_strict_says(
    plane: DataPlane, route: str, body: Any, strict: Any
) -> None:
    wanted = by_schema(SCHEMA, strict=strict, description="what a is")
    grammar = grammar_of(plane, route, body, response_format=wanted, n=2)
    assert len(plane.engine.requests) == 2
    assert takes(grammar, '{"a": 5}')
    assert not takes(grammar, '{"a": "5"}')


@BOTH
def test_json_object_is_any_object(plane: DataPlane, route: str, body: Any) -> None:
    for fields in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": {"type": "object"}, "disable_fallback": True}},
    ):
        grammar = grammar_of(plane, route, body, **fields)
        assert takes(grammar, '{"a": [1]}')
        assert not takes(grammar, "[1]")


@BOTH
@pytest.mark.parametrize(
    ("structure", "fits", "not_"),
    [
        ({"json": SCHEMA}, '{"a": 5}', '{"a": "5"}'),
        ({"json": json.dumps(SCHEMA)}, '{"a": 5}', '{"a": "5"}'),
        ({"json": SCHEMA, "disable_any_whitespace": True}, '{"a":5}', '{"a": 5}'),
        ({"json": SCHEMA, "regex": None, "json_object": False}, '{"a": 5}', "5"),
        ({"json": {"type": "string", "pattern": "^[a-c]{2}$"}}, '"ab"', '"abc"'),
        ({"regex": "[a-c]{2}"}, "ab", "abc"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"grammar": 'start: "a" | "b"'}, "b", "c"),
    ],
)
def test_each_structure(
    plane: DataPlane, route: str, body: Any, structure: Any, fits: str, not_: str
) -> None:
    grammar = grammar_of(plane, route, body, structured_outputs=structure)
    assert takes(grammar, fits)
    assert not takes(grammar, not_)


def test_gbnf_is_converted(plane: DataPlane) -> None:
    text = 'root ::= "a" | "b"'
    assert grammar_of(plane, *CHAT, structured_outputs={"grammar": text}) == f"lark of {text}"


@BOTH
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"json": [5]}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "invalid_value"),
        ({"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex", "invalid_value"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "invalid_value"),
        ({"structured_outputs": {"choice": ["a"] * 4097}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"grammar": "a" * 70_000}}, "structured_outputs.grammar", "invalid_value"),
        (
            {"structured_outputs": {"grammar": 'root ::= "\\u0041"'}},
            "structured_outputs.grammar",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]*"}},
            "structured_outputs.whitespace_pattern",
            "unsupported_field",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "unsupported_field",
        ),
        ({"structured_outputs": {"jsn": {"a": 1}}}, "structured_outputs.jsn", "unsupported_field"),
        ({"guided_json": SCHEMA}, "guided_json", "unsupported_field"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            "response_format.schema",
            "unsupported_field",
        ),
        (
            {"response_format": by_schema({"properties": {"a": {"x": 1, "minProperties": 3}}})},
            "response_format.json_schema.schema.properties.a.minProperties",
            "invalid_value",
        ),
        (
            {"structured_outputs": {"json": {"x-guidance": {"lenient": True}}}},
            "structured_outputs.json.x-guidance",
            "invalid_value",
        ),
    ],
)
def test_what_is_refused_by_its_field(
    plane: DataPlane, route: str, body: Any, fields: Any, param: str, code: str
) -> None:
    answer = post(plane, route, body, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert plane.grammars.checked == []
    assert plane.engine.requests == []


def test_form_of_an_answer_that_is_not_generated_is_refused(plane: DataPlane) -> None:
    for fields in ({"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}):
        answer = post(plane, *TEXT, max_tokens=0, echo=True, **fields)
        assert answer.json()["error"]["param"] == next(iter(fields))


def test_form_of_an_answer_beside_tools(plane: DataPlane) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    fields = {
        "tools": [{"type": "function", "function": function}],
        "response_format": {"type": "json_object"},
    }
    grammar_of(plane, *CHAT, **fields, tool_choice="none")
    for choice in ({}, {"tool_choice": "auto"}):
        error = post(plane, *CHAT, **fields, **choice).json()["error"]
        assert (error["param"], error["code"]) in [
            ("response_format", "unsupported_field"),
            ("tools", "unsupported_field"),  # this model has no format for calls
        ]


@BOTH
def test_options_that_go_with_a_grammar(plane: DataPlane, route: str, body: Any) -> None:
    options = {"n": 2, "stop": ["x"], "min_tokens": 1, "ignore_eos": True, "seed": 5, "logit_bias": {"5": 1}}
    options |= {"logprobs": True} if route == CHAT[0] else {"logprobs": 1, "echo": True}
    grammar_of(plane, route, body, response_format={"type": "json_object"}, **options)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (GrammarRefused("look-around is not supported"), 400, "invalid_value", "structured_outputs.regex"),
        (GrammarTimeSpent("too much time", 7.2), 429, "rate_limit_exceeded", None),
        (GrammarsUnavailable("lost"), 503, "server_overloaded", None),
    ],
)
def test_refusal_of_the_checker_is_an_answer_and_costs_a_request_where_the_caller_is_the_cause(
    plane: DataPlane, error: Exception, status: int, code: str, param: str | None
) -> None:
    plane.grammars.refuse_with.append(error)
    answer = post(plane, *CHAT, structured_outputs={"regex": "a"})
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], told["param"]) == (status, code, param)
    assert ("retry-after" in answer.headers) == (status != 400)
    assert plane.engine.requests == []
    assert plane.limiter.reserved == {}
    assert plane.ledger.accepted == []
    plane.settle_all()
    assert [used for _, used in plane.limiter.costs] == [None if status == 503 else 0]


def test_grammar_is_checked_for_who_may_ask_for_the_model(plane: DataPlane) -> None:
    answer = post(plane, CHAT[0], {**CHAT[1], "model": "secret"}, response_format={"type": "json_object"})
    assert answer.status_code == 404
    assert plane.grammars.checked == []


class Weather(BaseModel):
    city: str
    degrees: float


def test_client_parses_into_its_own_class(plane: DataPlane) -> None:
    plane.engine.script(Reply(text='{"city": "Oslo", "degrees": -3.5}'))
    answer = plane.client().chat.completions.parse(
        model=BASE, messages=[{"role": "user", "content": "hi"}], response_format=Weather
    )
    assert answer.choices[0].message.parsed == Weather(city="Oslo", degrees=-3.5)
    grammar = plane.engine.requests[-1].grammar
    assert grammar is not None
    assert takes(grammar, '{"city": "Oslo", "degrees": -3.5}')
    assert not takes(grammar, '{"city": "Oslo"}')


# With the real checker.


@pytest.fixture(scope="module")
def checked_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    model = write_byte_tokenizer(tmp_path_factory.mktemp("model"))
    checker = GrammarChecker(str(model), limits=GrammarLimits(cpu_s=0.3))
    with running_data_plane(model, grammars=checker) as running:
        yield running
        running.server.call(checker.close)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"response_format": by_schema({"properties": {"a": {"items": {"not": {"const": 1}}}}})},
            "response_format.json_schema.schema.properties.a.items.not",
            "the keyword 'not' is not supported.",
        ),
        (
            {"structured_outputs": {"json": {"anyOf": [{"type": "string", "format": "html"}]}}},
            "structured_outputs.json.anyOf[0].format",
            "the format 'html' is not supported.",
        ),
        (
            {"structured_outputs": {"json": {"properties": {"b": {"pattern": "(?<=a)b"}}}}},
            "structured_outputs.json.properties.b.pattern",
            "look-behind",
        ),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-ahead"),
        ({"structured_outputs": {"grammar": "start: undefined"}}, "structured_outputs.grammar", "undefined"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "'x' not found"),
        (
            {"response_format": by_schema({"$ref": "#"})},
            "response_format.json_schema.schema",
            "no text fits it",
        ),
        (
            {"response_format": by_schema({"type": "x"})},
            "response_format.json_schema.schema.type",
            "'x' is no type of JSON Schema",
        ),
    ],
)
def test_reason_of_the_library_names_keyword_and_place(
    checked_plane: DataPlane, fields: Any, param: str, said: str
) -> None:
    answer = post(checked_plane, *CHAT, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), error
    assert said in error["message"]
    assert error["message"].startswith(f"'{param}' cannot be used: ")


def test_gbnf_reaches_the_engine_as_lark(checked_plane: DataPlane) -> None:
    answer = post(checked_plane, *CHAT, structured_outputs={"grammar": 'root ::= "a" [0-9]+'})
    assert answer.status_code == 200
    grammar = checked_plane.engine.requests[-1].grammar
    assert grammar is not None
    assert takes(grammar, "a12")


def test_others_are_answered_while_hostile_schemas_are_checked(
    checked_plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"type": "string", "allOf": [{"pattern": f"x{chr(97 + i) * 2}"} for i in range(22)]}
    check, others_answered = ForkProcess.run, asyncio.Event()

    async def slower(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        done = await check(process, body, owner=owner, weight=weight)
        if b"allOf" in body:  # whatever the machine does meanwhile, it takes longer than all of the others
            await others_answered.wait()
        return done

    monkeypatch.setattr(ForkProcess, "run", slower)

    async def both() -> list[str]:
        ended: list[str] = []

        async def ask(key: str, number: int, **fields: Any) -> None:
            client = checked_plane.async_client(key, timeout=120)
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(
                    model=BASE, messages=[{"role": "user", "content": "hi"}], extra_body=fields
                )
            ended.append(f"{key} {number}")

        hostile = [
            asyncio.create_task(ask("lpx_acme", i, structured_outputs={"json": {**slow, "title": str(i)}}))
            for i in range(4)
        ]
        await asyncio.gather(
            *(ask("lpx_rival", i, structured_outputs={"regex": f"{i}+"}) for i in range(4)),
            *(ask("lpx_rival", 9, max_tokens=3) for _ in range(4)),
        )
        assert not any(task.done() for task in hostile)
        checked_plane.on_loop(others_answered.set)
        await asyncio.gather(*hostile)
        return ended

    ended = asyncio.run(both())
    assert [name.startswith("lpx_acme") for name in ended] == [False] * 8 + [True] * 4, ended


def test_schema_that_the_document_describes(checked_plane: DataPlane) -> None:
    document = checked_plane.http.get(f"{checked_plane.url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"type", "json_schema"} <= schemas["ResponseFormat"]["properties"].keys()
    assert {"name", "schema", "strict"} <= schemas["JsonSchema"]["properties"].keys()
    assert {"json", "regex", "choice", "grammar"} <= schemas["StructuredOutputs"]["properties"].keys()


def test_fragments_and_whole_schemas_refuse_the_same() -> None:
    for build in (builders.json_schema, builders.json_schema_fragment):
        with pytest.raises(GrammarRefused):
            build({"minProperties": 2})


def test_no_path_of_the_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    model = write_byte_tokenizer(tmp_path / "model")
    checker = GrammarChecker(str(tmp_path))
    with running_data_plane(model, grammars=checker) as plane:
        answer = post(plane, *CHAT, response_format={"type": "json_object"})
        plane.server.call(checker.close)
    assert answer.status_code == 400
    assert str(tmp_path) not in answer.text
