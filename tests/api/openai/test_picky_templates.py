"""Chat templates that refuse some conversations: the client sees the template's own words in a 400."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loraplex.api.responses.compaction import SUMMARY_REQUEST
from loraplex.serving.output.formats import TOOL_FORMATS, OutputFormats
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane, running_data_plane
from support.models.byte_tokenizer import byte_decode, write_byte_tokenizer

# Gemma 2's, its marks apart.
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<|start|>' + role + '\\n' + message['content'] | trim + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|start|>model\\n'}}{% endif %}"
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("gemma"), chat_template=GEMMA)
    with running_data_plane(
        tmp_path_factory.mktemp("other"), text=TextProcessor(path, max_model_len=MAX_MODEL_LEN)
    ) as running:
        yield running


def ask(plane: DataPlane, *turns: tuple[str, Any], **fields: Any) -> httpx.Response:
    messages = [{"role": role, "content": content} for role, content in turns]
    return plane.http.post(
        f"{plane.url}/v1/chat/completions",
        json={"model": BASE, "messages": messages, **fields},
        headers={"Authorization": "Bearer lpx_acme"},
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ((("system", "Be brief."), ("user", "hi")), "System role not supported"),
        ((("developer", "Be brief."), ("user", "hi")), "System role not supported"),
        ((("user", "hi"), ("user", "there")), "must alternate"),
        ((("assistant", "yes?"),), "must alternate"),
    ],
)
def test_refusal_by_the_template_is_a_400_in_its_words(
    gemma: DataPlane, turns: tuple[tuple[str, Any], ...], words: str, stream: bool
) -> None:
    answer = ask(gemma, *turns, stream=stream)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (
        "messages",
        "invalid_value",
        "invalid_request_error",
    )
    assert words in error["message"]
    gemma.settle_all()


def test_conversation_that_the_template_accepts_is_answered(gemma: DataPlane) -> None:
    gemma.engine.script(Reply(text="Hello"))
    answer = ask(gemma, ("user", " hi "), ("assistant", "yes?"), ("user", [{"type": "text", "text": "more"}]))
    assert answer.status_code == 200, answer.text
    gemma.settle_all()


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    """Gemma's template under a format for calls."""
    path = write_byte_tokenizer(tmp_path_factory.mktemp("gemma"), chat_template=GEMMA)
    text = TextProcessor(path, max_model_len=1 << 14)
    with running_data_plane(
        tmp_path_factory.mktemp("other"),
        text=text,
        max_model_len=1 << 14,
        formats=OutputFormats(TOOL_FORMATS["hermes"]),
    ) as running:
        yield running


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = "<tool_response>\nRain.\n</tool_response>"


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        ([], RESULT),
        ([("user", "And?")], f"{RESULT}\nAnd?"),
        ([("tool", "Snow."), ("user", "And?")], f"{RESULT}\n{RESULT.replace('Rain', 'Snow')}\nAnd?"),
    ],
)
def test_results_and_what_the_user_says_behind_them_are_one_message(
    calling: DataPlane, behind: list[tuple[str, str]], words: str
) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "d"}]}
    results = [("tool", "Rain."), *behind]
    said = [
        {"role": role, "content": text} | ({"tool_call_id": "cd"[place]} if role == "tool" else {})
        for place, (role, text) in enumerate(results)
    ]
    answer = calling.http.post(
        f"{calling.url}/v1/chat/completions",
        json={"model": BASE, "messages": [{"role": "user", "content": "hi"}, called, *said]},
        headers={"Authorization": "Bearer lpx_acme"},
    )
    assert answer.status_code == 200, answer.text
    prompt = byte_decode(calling.engine.requests[-1].prompt_ids)
    assert prompt.endswith(f"\nuser\n{words}\nmodel\n")


def test_a_conversation_that_ends_with_a_result_is_compacted(calling: DataPlane) -> None:
    given = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Rain."},
    ]
    calling.client().responses.compact(model=BASE, input=given)  # type: ignore[arg-type]
    prompt = byte_decode(calling.engine.requests[-1].prompt_ids)
    assert prompt.endswith(f"\nuser\n{RESULT}\n{SUMMARY_REQUEST}\nmodel\n")
