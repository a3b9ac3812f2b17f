"""How much the model is to think: chat templates that know it are told, for others it is refused, or a hint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.serving.text.processor import TextProcessor
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.models.byte_tokenizer import CHAT_TEMPLATE, byte_decode, write_byte_tokenizer

EFFORT = "{{ reasoning_effort | default('-') }} {{ enable_thinking | default('-') }}\n"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    directory = tmp_path_factory.mktemp("model")
    model = write_byte_tokenizer(directory / "thinking", chat_template=EFFORT + CHAT_TEMPLATE)
    text = TextProcessor(model, max_model_len=4096)
    with running_data_plane(directory, text=text) as running:
        yield running
        running.settle_all()


def body(path: str, effort: str | None) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    if path == "/v1/responses":
        return {"model": BASE, "input": "hi", "reasoning": {"effort": effort}}
    if path == "/v1/messages":
        thinking = {"thinking": {"type": "disabled"}} if effort == "none" else {}
        effort = None if effort == "none" else effort
        return {
            "model": BASE,
            "max_tokens": 9,
            "messages": messages,
            "output_config": {"effort": effort},
        } | thinking
    return {"model": BASE, "messages": messages, "reasoning_effort": effort}


def ask(plane: DataPlane, path: str, effort: str | None) -> Any:
    headers = {"authorization": "Bearer lpx_acme"}
    return plane.http.post(plane.url + path, json=body(path, effort), headers=headers)


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("effort", "shown"), [(None, "- -"), ("high", "high True"), ("none", "- False")])
def test_the_template_is_told(thinking: DataPlane, path: str, effort: str | None, shown: str) -> None:
    assert ask(thinking, path, effort).status_code == 200
    assert byte_decode(thinking.engine.requests[-1].prompt_ids).startswith(shown + "\n")


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "reasoning_effort"), ("/v1/responses", "reasoning.effort")]
)
def test_a_template_that_knows_none_refuses_it(plane: DataPlane, path: str, field: str) -> None:
    error = ask(plane, path, "high").json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_field")
    assert f"'{field}'" in error["message"]
    assert ask(plane, path, "none").status_code == 200


SWITCHED = [
    ({"chat_template_kwargs": {"enable_thinking": False}}, "- False"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "- True"),
    ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}, "low True"),
    ({"chat_template_kwargs": {"enable_thinking": None}, "reasoning_effort": "low"}, "low True"),
    ({"chat_template_kwargs": {}}, "- -"),
]


@pytest.mark.parametrize(("fields", "shown"), SWITCHED)
def test_thinking_can_be_switched(thinking: DataPlane, fields: dict[str, Any], shown: str) -> None:
    assert ask_chat(thinking, fields).status_code == 200
    assert byte_decode(thinking.engine.requests[-1].prompt_ids).startswith(shown + "\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"custom": 1}}, "chat_template_kwargs.custom"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            "chat_template_kwargs.enable_thinking",
        ),
    ],
)
def test_other_variables_and_contradictions_are_refused(
    thinking: DataPlane, fields: dict[str, Any], param: str
) -> None:
    answer = ask_chat(thinking, fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_switch_that_the_template_does_not_know_is_refused_where_it_asks_for_thoughts(
    plane: DataPlane,
) -> None:
    error = ask_chat(plane, {"chat_template_kwargs": {"enable_thinking": True}}).json()["error"]
    assert (error["param"], error["code"]) == ("chat_template_kwargs.enable_thinking", "unsupported_field")
    assert ask_chat(plane, {"chat_template_kwargs": {"enable_thinking": False}}).status_code == 200


def ask_chat(plane: DataPlane, fields: dict[str, Any]) -> Any:
    asked = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], **fields}
    headers = {"authorization": "Bearer lpx_acme"}
    return plane.http.post(plane.url + "/v1/chat/completions", json=asked, headers=headers)


def test_in_messages_it_is_a_hint(plane: DataPlane) -> None:
    assert ask(plane, "/v1/messages", "high").status_code == 200
    assert ask(plane, "/v1/messages", "none").status_code == 200
