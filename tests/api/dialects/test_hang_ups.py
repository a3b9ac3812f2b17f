"""Clients that go away while they are answered, on every route that generates or embeds: the engine is told, the ledger
has one row, and the limits are settled once."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from loraplex.control.usage.records import CANCELLED
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.generated_answers import PATHS
from support.waiting import eventually

ADD = {"type": "object", "properties": {"a": {"type": "string"}}}
THOUGHT, SAID = "<think>Sum!", "<think>Sum.</think>Done!"
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": "one!'
LAST = b'"!"'
"""The last character of each, in an event of its own."""
EMBEDDINGS = "/v1/embeddings"


def body_of(dialect: str, *, calls: bool, **fields: Any) -> dict[str, Any]:
    """A question. `calls`: a tool must be called, so that its arguments are streamed as they come."""
    asked: dict[str, Any] = {"model": BASE, **fields}
    turn = {"role": "user", "content": "?"}
    if dialect == "responses":
        asked |= {"max_output_tokens": 500, "input": "?"}
        if calls:
            tool: dict[str, Any] = {"type": "function", "name": "add", "parameters": ADD}
            asked |= {"tools": [tool], "tool_choice": "required"}
    elif dialect == "messages":
        asked |= {"max_tokens": 500, "messages": [turn]}
        if calls:
            asked |= {"tools": [{"name": "add", "input_schema": ADD}], "tool_choice": {"type": "any"}}
    else:
        asked |= {"max_completion_tokens": 500, "messages": [turn]}
        if calls:
            tool = {"type": "function", "function": {"name": "add", "parameters": ADD}}
            asked |= {"tools": [tool], "tool_choice": "required"}
    return asked


def send(sock: socket.socket, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    sock.sendall(head.encode() + content)


def read_until(sock: socket.socket, end: bytes) -> None:
    data = b""
    while end not in data:
        chunk = sock.recv(65536)
        assert chunk, data
        data += chunk


def check_books(plane: DataPlane, path: str, num_output: int) -> None:
    """All that the engine had was ended, and was counted once."""
    eventually(lambda: len(plane.engine.aborted) >= 1 and not plane.engine.live)
    plane.settle_all()
    (row,) = plane.ledger.rows
    prompt_tokens = sum(len(request.prompt_ids) for request in plane.engine.requests)
    assert (row.endpoint, row.status) == (path, CANCELLED)
    assert (row.prompt_tokens, row.completion_tokens) == (prompt_tokens, num_output)
    assert plane.limiter.settled == [("r0", prompt_tokens + num_output)]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [("", False), (THOUGHT, False), (SAID, False), (CALLED, True)],
    ids=["before the first token", "in reasoning", "in text", "in a call"],
)
def test_in_a_stream(speaking: DataPlane, dialect: str, text: str, calls: bool) -> None:
    path = PATHS[dialect]
    speaking.engine.script(Reply(text=text, hold=True))
    with speaking.server.connect() as sock:
        send(sock, path, body_of(dialect, calls=calls, stream=True))
        if text:
            read_until(sock, LAST)
        eventually(lambda: received(speaking) == [len(text)])
    check_books(speaking, path, len(text))


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_while_a_whole_answer_is_made(speaking: DataPlane, dialect: str) -> None:
    path = PATHS[dialect]
    speaking.engine.script(Reply(text=CALLED, hold=True))
    with speaking.server.connect() as sock:
        send(sock, path, body_of(dialect, calls=True))
        eventually(lambda: received(speaking) == [len(CALLED)])
    check_books(speaking, path, len(CALLED))


def test_between_embeddings(speaking: DataPlane) -> None:
    """One is there, the others are not."""
    speaking.engine.script(Reply(), *[Reply(hold=True)] * 3)
    with speaking.server.connect() as sock:
        send(sock, EMBEDDINGS, {"model": BASE, "input": ["one", "two", "three", "four"]})
        eventually(lambda: len(speaking.engine.live) == 3 and len(speaking.engine.requests) == 4)
    check_books(speaking, EMBEDDINGS, 0)
    assert len(speaking.engine.aborted) == 3


def received(plane: DataPlane) -> list[int]:
    """Tokens of each live sequence that the API has got."""
    return plane.on_loop(lambda: [s.num_received for s in plane.engine._streams.values()])
