"""What becomes of every field that the installed openai client can send: decided here, one line a field.

A field that a newer client has fails the first test until it is decided upon.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.api.openai.strict import NEUTRAL
from support.http.data_plane import BASE, DataPlane

KEY = {"Authorization": "Bearer lpx_acme"}
HI = [{"role": "user", "content": "hi"}]
ROUTES = {
    "chat/completions": ({"model": BASE, "messages": HI}, ChatRequest),
    "completions": ({"model": BASE, "prompt": "hi"}, CompletionRequest),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Supported:
    """`good` pass (together with `given`), `bad` are 400 `invalid_value` with this param."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    given: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hint:
    """Changes no output: `good` pass and leave what the engine is asked as it is, `bad` are 400 `invalid_value`."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...] = (5, ["x"], "x" * 600)


@dataclass(frozen=True)
class Refused:
    """`neutral` values pass beside the usual ones; `bad`, as a client means them, are 400 `unsupported_field`."""

    bad: tuple[Any, ...]
    neutral: tuple[Any, ...] = ()


SHARED: dict[str, Any] = {
    "model": Supported((BASE, "pirate"), ("", 5, None)),
    "frequency_penalty": Supported((-2, 0.5, 2, None), (2.1, "1")),
    "presence_penalty": Supported((-2, 0.5, 2, None), (-2.1, True)),
    "logit_bias": Supported(({"5": -100}, {}, None), ({"x": 1}, {"5": 101}, [5])),
    "n": Supported((1, 16, None), (0, 17, 1.5, "2")),
    "seed": Supported((0, -(1 << 63), None), (1 << 63, 0.5)),
    "stop": Supported(("x", ["x"] * 16, [], None), ("", ["x"] * 17, [1], {"a": 1})),
    "stream": Supported((True, False, None), ("yes", 1)),
    "stream_options": Supported(
        (
            {"include_usage": True, "continuous_usage_stats": True},
            {"continuous_usage_stats": True, "include_usage": None},
            {"include_usage": False, "continuous_usage_stats": False},
            {"include_usage": None, "include_obfuscation": False},
            {},
            None,
        ),
        ({"include_usage": 5}, {"continuous_usage_stats": 1}, "x"),
        {"stream": True},
    ),
    "temperature": Supported((0, 2, None), (-0.1, 2.1, "1")),
    "top_p": Supported((0, 0.01, 1, None), (-0.1, 1.1)),
    "user": Hint(("ann", None)),
}
DECIDED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **SHARED,
        "messages": Supported((HI,), ([], "hi", None)),
        "max_tokens": Supported((1, None), (0, -1, 1.5)),
        "max_completion_tokens": Supported((1, None), (0, "1")),
        "logprobs": Supported((True, False, None), (1, "true")),
        "top_logprobs": Supported((0, 20, None), (-1, 21, 1.5, "1"), {"logprobs": True}),
        "metadata": Hint(({"k": "v"}, {}, None), ({"k": 1}, "x", {str(i): "" for i in range(17)})),
        "service_tier": Hint(("auto", "default", "flex", None)),
        "prompt_cache_key": Hint(("tenant-7", None)),
        "prompt_cache_retention": Hint(("24h", "in_memory", None)),
        "safety_identifier": Hint(("5f2c", None)),
        "audio": Refused(({"voice": "alloy", "format": "mp3"},)),
        "function_call": Refused(({"name": "f"},), ("none",)),
        "functions": Refused(([{"name": "f"}],)),
        "modalities": Refused((["audio"], ["text", "audio"]), (["text"],)),
        "moderation": Refused(({"model": "x"},)),
        "parallel_tool_calls": Supported(
            (True, False, None), (1, "yes"), {"tools": [TOOL], "tool_choice": "none"}
        ),
        "prediction": Refused(({"type": "content", "content": "x"},)),
        "prompt_cache_options": Refused(({"ttl": "30m"},)),  # asks to be kept, which nobody promises
        "reasoning_effort": Hint(("none", None), ("loud", 3)),  # others: tests/api/dialects/test_effort.py
        "response_format": Supported(
            (
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
                None,
            ),
            (
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {"schema": {}}},
                {"type": "json_schema", "json_schema": {"name": "a"}},
                {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
                {"type": "json_schema", "json_schema": {"name": "a", "schema": True}},
                {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
                "json",
                5,
            ),
        ),
        "store": Refused((True, 0, 0.0)),
        "tool_choice": Supported(
            ("none", None), ("sometimes", 5, {"type": "function", "function": {"name": "g"}})
        ),
        "tools": Supported(
            ([TOOL], [], None),
            ([TOOL] * 129, [{**TOOL, "type": "x"}], [{"type": "function"}], [5], {"f": TOOL}, "x"),
            {"tool_choice": "none"},
        ),
        "verbosity": Refused(("low", "high"), ("medium",)),
        "web_search_options": Refused(({"search_context_size": "low"},)),
    },
    "completions": {
        **SHARED,
        "prompt": Supported(
            ("hi", ["hi", "ho"], [5, 6], [[5], [6, 7]]),
            ("", [], [[]], [5, "hi"], [[260]], ["x"] * 17, 5, None),
        ),
        "max_tokens": Supported((1, None), (0, -1)),
        "best_of": Supported((2, None), (0, 17, "2"), {"n": 2}),
        "echo": Supported((True, False, None), (1, "true")),
        "logprobs": Supported((0, 5, None), (-1, 6, True, 1.5)),
        "suffix": Refused(("the end",), ("",)),
    },
}
CASES = [(route, name) for route, decided in DECIDED.items() for name in decided]


def fields_of(params: Any) -> set[str]:
    kinds = typing.get_args(params)
    return {name for kind in kinds for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize(
    ("route", "params"),
    [
        ("chat/completions", chat_create_params.CompletionCreateParams),
        ("completions", completion_create_params.CompletionCreateParams),
    ],
)
def test_every_field_of_the_client_is_decided(route: str, params: Any) -> None:
    assert DECIDED[route].keys() == fields_of(params)
    _, schema = ROUTES[route]
    for name, decision in DECIDED[route].items():
        assert (name in schema.UNSUPPORTED) == isinstance(decision, Refused), name
        assert (name in schema.model_fields) != isinstance(decision, Refused), name


def post(plane: DataPlane, route: str, **fields: Any) -> httpx.Response:
    body, _ = ROUTES[route]
    return plane.http.post(f"{plane.url}/v1/{route}", json={**body, **fields}, headers=KEY)


def asked(plane: DataPlane) -> Any:
    """What the engine was asked last, without the id and the seed, which are new each time."""
    request = plane.engine.requests[-1]
    return request.prompt_ids, {
        name: getattr(request.sampling, name) for name in request.sampling.__slots__ if name != "seed"
    }


@pytest.mark.parametrize(("route", "name"), CASES)
def test_each_field(plane: DataPlane, route: str, name: str) -> None:
    decision = DECIDED[route][name]
    given = decision.given if isinstance(decision, Supported) else {}
    post(plane, route)
    plain = asked(plane)
    if isinstance(decision, Refused):
        for value in (*NEUTRAL, *decision.neutral):
            answer = post(plane, route, **{name: value})
            assert answer.status_code == 200, (value, answer.text)
            assert asked(plane) == plain
    else:
        for value in decision.good:
            answer = post(plane, route, **given, **{name: value})
            assert answer.status_code == 200, (value, answer.text)
            assert isinstance(decision, Supported) or asked(plane) == plain
    code = "unsupported_field" if isinstance(decision, Refused) else "invalid_value"
    before = len(plane.engine.requests)
    for value in decision.bad:
        answer = post(plane, route, **given, **{name: value})
        assert answer.status_code == 400, (value, answer.text)
        error = answer.json()["error"]
        assert (error["param"].split(".")[0].split("[")[0], error["code"]) == (name, code), (value, error)
    assert len(plane.engine.requests) == before, "refused, and yet computed"


@pytest.mark.parametrize(
    ("route", "fields", "param", "code"),
    [
        ("chat/completions", {"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ("chat/completions", {"top_logprobs": 1, "logprobs": False}, "top_logprobs", "invalid_value"),
        ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ("chat/completions", {"echo": True}, "echo", "unsupported_field"),
        ("chat/completions", {"best_of": 1}, "best_of", "unsupported_field"),
        ("chat/completions", {"prompt_cache_kye": "x"}, "prompt_cache_kye", "unsupported_field"),
        ("chat/completions", {"tools": [TOOL]}, "tools", "unsupported_field"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "auto"}, "tools", "unsupported_field"),
        ("chat/completions", {"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            "chat/completions",
            {"tools": [{**TOOL, "x": 1}], "tool_choice": "none"},
            "tools[0].x",
            "unsupported_field",
        ),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "invalid_value",
        ),
        (
            "completions",
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "invalid_value",
        ),
        ("completions", {"top_logprobs": 1}, "top_logprobs", "unsupported_field"),
        ("completions", {"max_completion_tokens": 1}, "max_completion_tokens", "unsupported_field"),
        ("completions", {"best_of": 2}, "best_of", "unsupported_field"),
        ("completions", {"best_of": 2, "n": 3}, "best_of", "unsupported_field"),
        ("completions", {"max_tokens": 0, "echo": False}, "max_tokens", "invalid_value"),
        ("completions", {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ],
)
def test_fields_that_do_not_fit_together(
    plane: DataPlane, route: str, fields: dict[str, Any], param: str, code: str
) -> None:
    error = post(plane, route, **fields).json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert plane.engine.requests == []


def test_neutral_values_of_fields_that_were_not_supported_once_still_pass(plane: DataPlane) -> None:
    once = {"chat/completions": ["logprobs", "top_logprobs", "prompt_cache_key", "prompt_cache_retention"]}
    once["chat/completions"] += ["safety_identifier", "tools", "tool_choice", "parallel_tool_calls"]
    once["chat/completions"] += ["response_format", "structured_outputs", "reasoning_effort"]
    once["completions"] = ["best_of", "echo", "logprobs"]
    for route, names in once.items():
        for name in names:
            for value in NEUTRAL:
                assert post(plane, route, **{name: value}).status_code == 200, (route, name, value)
    assert post(plane, "completions", best_of=1).status_code == 200


def test_each_choice_has_its_own_noise_of_one_seed(plane: DataPlane) -> None:
    assert post(plane, "completions", n=3, seed=-5, prompt=["a", "b"]).status_code == 200
    drawn = [(request.sampling.seed, request.sampling.choice) for request in plane.engine.requests]
    assert drawn == [(drawn[0][0], choice) for choice in (0, 1, 2, 0, 1, 2)]
    assert post(plane, "completions", seed=-5).status_code == 200
    assert plane.engine.requests[-1].sampling.seed == drawn[0][0]
