"""`stream_options`: what has been used so far in every chunk, and what was used in the last one."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane

KEY = {"authorization": "Bearer lpx_acme"}
CHAT = ("chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "hi"}]})
TEXT = ("completions", {"model": BASE, "prompt": ["hi", "hello"]})
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def chunks(plane: DataPlane, route: str, body: Any, options: Any) -> list[Any]:
    answer = plane.http.post(
        f"{plane.url}/v1/{route}", json={**body, "stream": True, "stream_options": options}, headers=KEY
    )
    assert answer.status_code == 200, answer.text
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (CHAT, {}),
        (CHAT, {"n": 3, "logprobs": True}),
        (TEXT, {}),
        (TEXT, {"n": 2, "stop": "cd"}),
        (TEXT, {"n": 2, "echo": True}),
        (TEXT, {"n": 2, "echo": True, "logprobs": 1}),
        (TEXT, {"echo": True, "logprobs": 0, "max_tokens": 0}),
    ],
)
@pytest.mark.parametrize("options", [CONTINUOUS, {"continuous_usage_stats": True}])
def test_every_chunk_has_what_its_choice_has_used(
    plane: DataPlane, kind: tuple[str, Any], extra: Any, options: Any
) -> None:
    plane.engine.script(*[Reply(text="abcdef")] * 6)
    *told, last = chunks(plane, kind[0], {**kind[1], **extra}, options)
    n, sizes = extra.get("n", 1), [len(request.prompt_ids) for request in plane.engine.requests]
    assert last["choices"] == []
    told.sort(key=lambda chunk: chunk["choices"][0]["index"])
    completion_tokens = 0
    for index, group in groupby(told, key=lambda chunk: chunk["choices"][0]["index"]):
        counts, text = [], 0
        for chunk in group:
            usage = chunk["usage"]
            assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
            assert usage["prompt_tokens"] == sizes[index]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            counts.append(usage["completion_tokens"])
            choice = chunk["choices"][0]
            text += len(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
            if not extra.get("echo"):
                assert usage["completion_tokens"] >= text
        assert counts == sorted(counts)
        assert counts[0] in (0, 1)
        completion_tokens += counts[-1]
    assert last["usage"]["completion_tokens"] == completion_tokens
    assert last["usage"]["prompt_tokens"] == sum(sizes[::n])
    assert "prompt_tokens_details" in last["usage"]


@pytest.mark.parametrize("kind", [CHAT, TEXT])
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}, {"continuous_usage_stats": False}])
def test_stream_without_the_option_has_no_usage(
    plane: DataPlane, kind: tuple[str, Any], options: Any
) -> None:
    assert all("usage" not in chunk for chunk in chunks(plane, *kind, options))
