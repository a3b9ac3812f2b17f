"""`x-loraplex-timeout-ms`: the time that the whole of a request may take, wherever it spends it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, running_data_plane
from support.waiting import eventually

KEY = {"Authorization": "Bearer lpx_acme"}

DEADLINES_MS = (100, 400, 1600, 6400, 25_600)
"""Tried by turns where something has to be reached before the deadline: a busy machine needs longer ones."""


class _Log:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.rows.append(fields)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path_factory.mktemp("deadlines"), access_log=_Log()) as plane:
        yield plane


@pytest.fixture
def plane(shared: DataPlane) -> Iterator[DataPlane]:
    shared.reset()
    shared.services.access_log.rows.clear()  # type: ignore[attr-defined]
    yield shared
    shared.settle_all()


def ask(plane: DataPlane, timeout_ms: Any, **body: Any) -> httpx.Response:
    body = {"model": BASE, "prompt": "xyz"} | body
    headers = KEY | {"x-loraplex-timeout-ms": str(timeout_ms)}
    return plane.http.post(f"{plane.url}/v1/completions", json=body, headers=headers)


def ask_what_waits(plane: DataPlane, reply: Reply, streams: int, **body: Any) -> tuple[httpx.Response, int]:
    """What a request gets whose `streams` all wait in the engine when its deadline passes, and the milliseconds that it
    gave. They have to wait there before half of them are over."""
    for timeout_ms in DEADLINES_MS:
        plane.reset()
        plane.services.access_log.rows.clear()  # type: ignore[attr-defined]
        plane.engine.default = reply
        began = time.monotonic()
        answer = ask(plane, timeout_ms, **body)
        assert timeout_ms / 1000 <= time.monotonic() - began < timeout_ms / 1000 + 5
        plane.settle_all()
        held_at = plane.engine.held_at
        if len(held_at) == streams and max(held_at) < began + timeout_ms / 2000:
            return answer, timeout_ms
    raise AssertionError(f"{len(held_at)} of {streams} streams wait in the engine after {timeout_ms} ms")


def check_exceeded(answer: httpx.Response, timeout_ms: int = 100) -> None:
    assert answer.status_code == 504, answer.text
    error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert f"{timeout_ms} ms" in error["message"]
    assert "x-loraplex-timeout-ms" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


def logged(plane: DataPlane) -> dict[str, Any]:
    (row,) = plane.services.access_log.rows  # type: ignore[attr-defined]
    found: dict[str, Any] = row
    return found


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "1.5", "1e3", "soon", "86400001", "9" * 5000, "²", "1 2", "0x10", "+5"]
)
def test_invalid_milliseconds_are_refused_by_name(plane: DataPlane, value: str) -> None:
    headers = [(b"authorization", b"Bearer lpx_acme"), (b"x-loraplex-timeout-ms", value.encode("latin-1"))]
    answer = plane.http.post(
        f"{plane.url}/v1/completions", json={"model": BASE, "prompt": "x"}, headers=headers
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "x-loraplex-timeout-ms")
    plane.settle_all()
    assert plane.engine.requests == []


def test_given_twice_it_is_refused(plane: DataPlane) -> None:
    headers = [*KEY.items(), ("x-loraplex-timeout-ms", "5"), ("x-loraplex-timeout-ms", "6")]
    answer = plane.http.post(
        f"{plane.url}/v1/completions", json={"model": BASE, "prompt": "x"}, headers=headers
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-loraplex-timeout-ms")


def test_the_key_is_looked_at_before_the_deadline(plane: DataPlane) -> None:
    answer = plane.http.post(
        f"{plane.url}/v1/completions", json={}, headers={"x-loraplex-timeout-ms": "soon"}
    )
    assert answer.status_code == 401


def test_an_answer_in_time_is_as_without_and_the_engine_is_told_what_is_left(plane: DataPlane) -> None:
    answer = ask(plane, 60_000)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "ok")
    (request,) = plane.engine.requests
    assert request.deadline is not None
    assert 50 < request.deadline <= 60
    plane.http.post(f"{plane.url}/v1/completions", json={"model": BASE, "prompt": "x"}, headers=KEY)
    assert plane.engine.requests[-1].deadline is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 3), (2, 2)])
def test_before_the_first_token_it_is_a_504_and_nothing_runs_on(
    plane: DataPlane, stream: bool, prompts: int, n: int
) -> None:
    reply = Reply(text="abc", hold=True, hold_after=0)
    check_exceeded(*ask_what_waits(plane, reply, prompts * n, prompt=["xyz"] * prompts, n=n, stream=stream))
    assert sorted(plane.engine.aborted) == sorted(request.request_id for request in plane.engine.requests)
    (row,) = plane.ledger.rows
    assert (row.status, row.completion_tokens) == ("deadline_exceeded", 0)
    assert (logged(plane)["status"], logged(plane)["outcome"]) == (504, "deadline_exceeded")


def test_a_whole_answer_that_was_begun_is_a_504_and_bills_what_was_drawn(plane: DataPlane) -> None:
    reply = Reply(text="abcdef", hold=True, hold_after=4)
    check_exceeded(*ask_what_waits(plane, reply, 2, n=2, max_tokens=6))
    (row,) = plane.ledger.rows
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("deadline_exceeded", 3, 8)
    assert plane.limiter.settled == [("r0", 3 + 8)]


@pytest.mark.parametrize("n", [1, 2])
def test_once_text_was_sent_an_error_event_and_the_end_follow(plane: DataPlane, n: int) -> None:
    reply = Reply(text="abcdef", hold=True, hold_after=4)
    answer, _ = ask_what_waits(plane, reply, n, stream=True, n=n, max_tokens=6)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-2]]
    assert sorted("".join(texts)) == sorted("abcd" * n)
    (row,) = plane.ledger.rows
    assert (row.status, row.prompt_tokens, row.completion_tokens) == ("deadline_exceeded", 3, 4 * n)
    assert plane.limiter.settled == [("r0", 3 + 4 * n)]
    assert (logged(plane)["status"], logged(plane)["outcome"]) == (200, "deadline_exceeded")


def test_the_engines_own_word_that_it_has_passed_is_told_the_same_way(plane: DataPlane) -> None:
    plane.engine.script(Reply(error=("deadline_exceeded", "not finished within 0.0123 s"), refused=True))
    check_exceeded(ask(plane, 60_000), 60_000)


def test_a_body_that_comes_slowly_counts(plane: DataPlane) -> None:
    for timeout_ms in DEADLINES_MS:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
            f"x-loraplex-timeout-ms: {timeout_ms}\r\nContent-Length: 1000\r\n\r\n{{"
        )
        with plane.server.connect() as sock:
            sock.sendall(head.encode())
            sock.settimeout(60)
            assert sock.recv(1000).startswith(b"HTTP/1.1 504 ")
        plane.settle_all()
        if plane.limiter.admitted:
            break
    assert [used for _, used in plane.limiter.costs] == [0], "one request of its rate, and nothing else"


def test_tokenising_counts_and_its_thread_stays_counted(tmp_path: Path) -> None:
    """The answer does not wait for a thread that cannot be ended; nor does the tenant get another in its place."""
    go_on, inside = threading.Event(), []
    with running_data_plane(tmp_path, tokenizer_threads=2) as plane:
        text = plane.services.text
        encode = text.encode

        def slow(*args: Any, **named: Any) -> list[int]:
            inside.append(threading.get_ident())
            go_on.wait(60)
            return encode(*args, **named)

        text.encode = slow  # type: ignore[method-assign]
        try:
            for timeout_ms in DEADLINES_MS:
                check_exceeded(ask(plane, timeout_ms), timeout_ms)
                plane.settle_all()
                if inside:
                    break
            check_exceeded(ask(plane, 100))
            assert len(inside) == 1, "a tenant has one of two threads, and it is busy"
        finally:
            go_on.set()
        assert ask(plane, 60_000).status_code == 200
        assert len(inside) == 2, "who waited for the thread has gone"


def test_the_wait_for_the_limits_counts(plane: DataPlane) -> None:
    for timeout_ms in DEADLINES_MS:
        held, answered = asyncio.Event(), threading.Event()
        plane.limiter.held = held
        releasing = threading.Thread(target=_let_go, args=(plane, held, answered, timeout_ms / 1000))
        releasing.start()
        check_exceeded(ask(plane, timeout_ms), timeout_ms)
        answered.set()
        releasing.join()
        plane.settle_all()
        if plane.limiter.asked:
            break
    assert plane.engine.requests == []
    assert plane.limiter.settled == [("r0", 0)]


def _let_go(plane: DataPlane, held: asyncio.Event, answered: threading.Event, after_s: float) -> None:
    """A deadline of `after_s` has passed then: it counts from before the limits were asked."""
    eventually(lambda: plane.limiter.asked > 0 or answered.is_set())
    time.sleep(after_s)
    plane.on_loop(held.set)


def test_a_thread_that_fails_after_its_caller_has_gone_is_no_error(tmp_path: Path) -> None:
    go_on = threading.Event()
    with running_data_plane(tmp_path) as plane:

        def fails(*_: Any, **__: Any) -> list[int]:
            go_on.wait(10)
            raise RuntimeError("nobody hears this")

        encode, plane.services.text.encode = plane.services.text.encode, fails  # type: ignore[method-assign]
        check_exceeded(ask(plane, 100))
        go_on.set()
        plane.services.text.encode = encode  # type: ignore[method-assign]
        eventually(lambda: ask(plane, 60_000).status_code == 200)
