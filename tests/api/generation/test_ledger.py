"""One row for each request that was accepted, with what the answer says, before the answer's end is sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from loraplex.control.usage.outcome import key_hash
from loraplex.control.usage.records import BASE as BASE_MODEL
from loraplex.control.usage.records import CANCELLED, Ended
from support.control.runs import running_release
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, Refused, ref

KEY = {"Authorization": "Bearer lpx_acme"}


def post(plane: DataPlane, route: str = "completions", **fields: Any) -> httpx.Response:
    prompt = (
        {"messages": [{"role": "user", "content": "x"}]} if route.startswith("chat") else {"prompt": "xyz"}
    )
    body = {"model": BASE, **prompt, **fields}
    return plane.http.post(f"{plane.url}/v1/{route}", json=body, headers=KEY)


def only_row(plane: DataPlane) -> Ended:
    plane.settle_all()
    (row,) = plane.ledger.rows
    return row


def wait_for(plane: DataPlane, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not plane.on_loop(condition):
        assert time.monotonic() < end
        time.sleep(0.002)


def test_row_names_key_adapter_tokens_and_duration(plane: DataPlane) -> None:
    plane.engine.script(*[Reply(text="Hello", cached_tokens=2)] * 2)
    answer = post(plane, model="pirate", n=2)
    row = only_row(plane)
    pirate = ref("acme", "pirate", 2)
    assert (row.tenant_id, row.key_id) == ("acme", "key-acme")
    assert (row.adapter, row.version, row.digest) == ("pirate", 2, pirate.digest)
    assert (row.endpoint, row.streamed, row.n, row.status) == ("/v1/completions", False, 2, "stop")
    usage = answer.json()["usage"]
    assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (3, 2, 12)
    assert row.queue_s == 0.001
    assert row.first_token_s is not None
    assert 0 < row.first_token_s <= row.total_s < 10
    assert timedelta(0) <= datetime.now(UTC) - row.at < timedelta(seconds=10)
    assert row.id != answer.headers["x-request-id"]
    assert answer.json()["id"] == f"cmpl-{row.id}"


def test_a_row_has_the_hash_of_the_key_that_chose_its_version(plane: DataPlane) -> None:
    plane.resolver.releases["pirate"] = running_release("acme", "pirate", control=1, candidate=2)
    post(plane, model="pirate", user="u1")
    assert only_row(plane).key_hash == key_hash("u1")


@pytest.mark.parametrize("model", ["pirate", "pirate@v2", BASE])
def test_a_row_without_such_a_key_has_one_of_its_own_or_none(plane: DataPlane, model: str) -> None:
    plane.resolver.releases["pirate"] = running_release(
        "acme", "pirate", control=1, candidate=2, sticky="none"
    )
    post(plane, model=model, user="u1")
    row = only_row(plane)
    assert row.key_hash == (key_hash(row.id) if model == "pirate" else 0)


def test_the_base_model_has_no_adapter(plane: DataPlane) -> None:
    post(plane, "chat/completions", stream=True)
    row = only_row(plane)
    assert (row.adapter, row.version, row.digest) == (BASE_MODEL, 0, "")
    assert (row.endpoint, row.streamed) == ("/v1/chat/completions", True)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("reply", "fields", "status", "completion"),
    [
        (Reply(text="abc"), {}, "stop", 4),
        (Reply(text="abcdef"), {"max_tokens": 2}, "length", 2),
        (Reply(text="abcdef"), {"stop": ["cd"]}, "stop", 4),
        (Reply(text="abcdef"), {"max_tokens": 0, "echo": True}, "length", 0),
        (Reply(text="ab", error=("adapter_unavailable", "gone")), {}, "adapter_unavailable", 2),
        (Reply(text="", error=("adapter_not_finite", "too large")), {}, "adapter_not_finite", 0),
    ],
)
def test_how_a_request_ended(
    plane: DataPlane, stream: bool, reply: Reply, fields: dict[str, Any], status: str, completion: int
) -> None:
    plane.engine.script(reply)
    post(plane, stream=stream, **fields)
    row = only_row(plane)
    assert (row.status, row.completion_tokens, row.streamed) == (status, completion, stream)


def test_request_with_one_cut_choice_counts_as_cut(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="a"), Reply(text="abcdef"))
    post(plane, n=2, max_tokens=3)
    assert only_row(plane).status == "length"


@pytest.mark.parametrize("drawn", [0, 3])
def test_a_client_that_goes_away_is_told_apart(plane: DataPlane, drawn: int) -> None:
    plane.engine.script(Reply(text="abcdef", hold=True, hold_after=drawn))
    body = json.dumps({"model": BASE, "prompt": "xyz"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Length: {len(body)}"
    with plane.server.connect() as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(
            plane,
            lambda: (
                [s.num_received for s in plane.engine._streams.values()] == [drawn]
                and plane.engine.live != []
            ),
        )
    row = only_row(plane)
    assert (row.status, row.completion_tokens) == (CANCELLED, drawn)


def test_an_engine_that_dies_is_named(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="abcdef", hold=True, hold_after=2))
    with plane.http.stream(
        "POST",
        f"{plane.url}/v1/completions",
        json={"model": BASE, "prompt": "xyz", "stream": True},
        headers=KEY,
    ) as answer:
        wait_for(plane, lambda: [s.num_received for s in plane.engine._streams.values()] == [2])
        plane.on_loop(plane.engine.kill)
        answer.read()
    row = only_row(plane)
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("engine_restarting", 3, 2)


def test_an_engine_that_takes_nothing_ends_what_was_accepted(plane: DataPlane) -> None:
    plane.engine.max_inflight = 0
    assert post(plane).status_code == 503
    row = only_row(plane)
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("server_overloaded", 0, 0)


def test_refused_request_has_no_row(plane: DataPlane) -> None:
    assert post(plane, max_tokens=-1).status_code == 400
    assert post(plane, model="nobody").status_code == 404
    plane.limiter.refuse_with = [Refused("rate_limit_exceeded", retry_after_s=3)]
    assert post(plane).status_code == 429
    assert plane.http.post(f"{plane.url}/v1/completions", json={"model": BASE}).status_code == 401
    plane.settle_all()
    assert plane.ledger.rows == []


def test_request_does_not_run_without_room_for_its_row(plane: DataPlane) -> None:
    plane.ledger.full = True
    answer = post(plane)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    plane.settle_all()
    assert plane.engine.requests == []
    assert plane.limiter.settled == [("r0", None)]


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_an_answer_waits_for_its_row(plane: DataPlane, stream: bool) -> None:
    """All but the end of a stream is sent by then, and nothing of an answer in one piece."""
    held = plane.ledger.held = asyncio.Event()
    body = json.dumps({"model": BASE, "prompt": "xyz", "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\nContent-Length: {len(body)}"
    with plane.server.connect() as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(plane, lambda: len(plane.ledger.rows) == 1)
        before = read_until(sock, b'"text":"k"') if stream else b""
        time.sleep(0.05)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            before += sock.recv(1 << 16)
        assert b"[DONE]" not in before
        assert stream or before == b""
        sock.settimeout(60)
        plane.on_loop(held.set)
        read_until(sock, b"[DONE]" if stream else b'"usage"')
    plane.settle_all()


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        chunk = sock.recv(1 << 16)
        assert chunk, data
        data += chunk
    return data
