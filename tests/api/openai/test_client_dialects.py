"""What clients other than OpenAI's read out of our answers, and what they send back. The clients themselves hold
whole conversations in tests/clients, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest

from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane

LITELLM = "this model's maximum context length is"
LANGCHAIN = "prompt is too long"
"""The words by which each knows an error of the context's length from other bad requests."""


def post(plane: DataPlane, **body: Any) -> Any:
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], **body}
    return plane.http.post(
        f"{plane.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer lpx_acme"}
    )


@pytest.mark.parametrize(
    ("prompt", "asked", "shorter_prompt_helps"),
    [
        (MAX_MODEL_LEN, None, True),
        (MAX_MODEL_LEN, MAX_MODEL_LEN, True),
        (MAX_MODEL_LEN * 200, None, True),  # refused by its characters, before it is tokenised
        (MAX_MODEL_LEN - 100, 200, True),
        (2, MAX_MODEL_LEN, False),
    ],
)
def test_clients_know_a_context_that_is_too_long(
    plane: DataPlane, prompt: int, asked: int | None, shorter_prompt_helps: bool
) -> None:
    message = {"role": "user", "content": "x" * prompt}
    answer = post(plane, messages=[message], max_tokens=asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert LITELLM in error["message"].lower()
    assert (LANGCHAIN in error["message"]) == shorter_prompt_helps
    assert str(MAX_MODEL_LEN) in error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"provider_specific_fields": {"refusal": None}, "tool_calls": None, "function_call": None},  # LiteLLM
        {"provider_specific_fields": None},
        {"refusal": None, "annotations": [], "audio": None},  # OpenAI
    ],
)
def test_an_answer_may_come_back_as_a_client_keeps_it(plane: DataPlane, extra: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "Hello", **extra}
    messages = [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "and?"}]
    assert post(plane, messages=messages).status_code == 200


@pytest.mark.parametrize(
    "extra",
    [
        {"provider_specific_fields": {"refusal": "no"}},
        {"provider_specific_fields": {"citations": ["a"]}},
        {"annotations": [{"type": "url_citation"}]},
    ],
)
def test_returned_answer_with_more_than_text_is_refused(plane: DataPlane, extra: dict[str, Any]) -> None:
    (name,) = extra
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello", **extra}]
    error = post(plane, messages=messages).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", f"messages[1].{name}")
