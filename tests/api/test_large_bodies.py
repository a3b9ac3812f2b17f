"""What a body may ask for in good faith does not hold the event loop, and what is too long is not tokenised."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from loraplex.api.generation import endpoints
from loraplex.api.openai import messages
from loraplex.serving.text.chat_encoder import MAX_CHARS_PER_TOKEN
from loraplex.serving.text.processor import TextProcessor
from support.http.data_plane import BASE, MAX_MODEL_LEN, running_data_plane
from support.http.whole_server import bearer
from support.models.byte_tokenizer import write_byte_tokenizer

USER = {"role": "user", "content": "x"}


class NotingText(TextProcessor):
    """Remembers the threads in which it worked, and how much it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.threads: set[int] = set()
        self.encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        tokens = super().encode(text, add_special_tokens=add_special_tokens)
        self.encoded += len(text)
        return tokens

    def encode_chat(self, *args: Any, **kwargs: Any) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode_chat(*args, **kwargs)


WIDE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {f"k{n}": [n] for n in range(1000)}}}
LARGEST: dict[str, tuple[str, Any]] = {
    "one prompt": ("/v1/completions", {"model": BASE, "prompt": "a" * (MAX_MODEL_LEN * MAX_CHARS_PER_TOKEN)}),
    "many prompts": (
        "/v1/completions",
        {"model": BASE, "prompt": ["a" * (MAX_MODEL_LEN - 8)] * 16, "max_tokens": 1},
    ),
    "token ids": ("/v1/completions", {"model": BASE, "prompt": [1] * 200_000}),
    "lists of token ids": ("/v1/completions", {"model": BASE, "prompt": [[1] * 10_000] * 16}),
    "messages": ("/v1/chat/completions", {"model": BASE, "messages": [USER] * messages.MAX_MESSAGES}),
    "parts": (
        "/v1/chat/completions",
        {
            "model": BASE,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}] * 28,
        },
    ),
    "tools": (
        "/v1/chat/completions",
        {"model": BASE, "messages": [USER], "tool_choice": "none", "tools": [WIDE_TOOL] * 128},
    ),
    "a wide object": ("/v1/chat/completions", {"model": BASE, **{f"k{n}": 0 for n in range(40_000)}}),
}


@pytest.mark.parametrize("name", list(LARGEST))
def test_the_largest_bodies_are_worked_on_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Reading JSON, checking and tokenising: none of it in the event loop's thread."""
    worked: set[int] = set()

    def noting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            worked.add(threading.get_ident())
            return function(*args)

        return call

    monkeypatch.setattr(endpoints, "parse_json", noting(endpoints.parse_json))
    monkeypatch.setattr(endpoints, "parse_request", noting(endpoints.parse_request))
    text = NotingText(write_byte_tokenizer(tmp_path / "text"), max_model_len=MAX_MODEL_LEN)
    path, body = LARGEST[name]
    with running_data_plane(tmp_path / "model", text=text) as plane:
        loop = plane.on_loop(threading.get_ident)
        answer = plane.http.post(plane.url + path, json=body, headers=bearer("lpx_acme"))
        assert answer.status_code in (200, 400), answer.text
        assert worked
        assert loop not in text.threads
        # A small body is read where it is: that takes less time than to hand it over.
        assert loop not in worked or len(json.dumps(body)) <= endpoints.INLINE_BYTES
        plane.settle_all()


def test_a_text_too_long_is_not_tokenised(tmp_path: Path) -> None:
    text = NotingText(write_byte_tokenizer(tmp_path / "text"), max_model_len=MAX_MODEL_LEN)
    with running_data_plane(tmp_path / "model", text=text) as plane:
        body = {"model": BASE, "prompt": "a" * (MAX_MODEL_LEN * MAX_CHARS_PER_TOKEN + 1)}
        answer = plane.http.post(f"{plane.url}/v1/completions", json=body, headers=bearer("lpx_acme"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert text.encoded == 0
