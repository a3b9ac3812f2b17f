"""What one tenant does to the others inside the API process."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from loraplex.api.application import MAX_BODIES
from loraplex.api.generation import endpoints
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.openai.parsing import parse_request
from loraplex.serving.text.processor import TextProcessor
from support.http.data_plane import BASE, MAX_MODEL_LEN, running_data_plane
from support.models.byte_tokenizer import write_byte_tokenizer
from support.waiting import eventually

KEY = {"Authorization": "Bearer lpx_acme"}


async def test_a_tenant_has_half_of_the_threads() -> None:
    capacity = TenantCapacity(max_in_flight=100, max_body_bytes=1, max_kept_logprobs=0, threads=4)
    gate = threading.Event()
    running: list[str] = []

    def work(tenant: str) -> None:
        running.append(tenant)
        gate.wait(60)

    async def until(count: int) -> None:
        with anyio.fail_after(60):
            while len(running) < count:
                await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        try:
            for _ in range(10):
                tasks.start_soon(capacity.in_thread, "greedy", work, "greedy")
            await until(2)
            for _ in range(2):
                tasks.start_soon(capacity.in_thread, "late", work, "late")
            await until(4)
            assert sorted(running) == ["greedy", "greedy", "late", "late"]
        finally:
            gate.set()
    assert len(running) == 12


class CountingText(TextProcessor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_encoded = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_prompts_behind_one_that_is_too_long_are_not_tokenised(tmp_path: Path) -> None:
    text = CountingText(write_byte_tokenizer(tmp_path / "text"), max_model_len=MAX_MODEL_LEN)
    with running_data_plane(tmp_path / "model", text=text) as plane:
        long = "a" * MAX_MODEL_LEN
        body = {"model": BASE, "prompt": ["fits", long, long, long, long], "max_tokens": 1}
        answer = plane.http.post(f"{plane.url}/v1/completions", json=body, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert text.num_encoded == 2


def test_a_large_body_is_checked_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_in: list[int] = []

    def parse_here(*args: Any) -> Any:
        checked_in.append(threading.get_ident())
        return parse_request(*args)

    monkeypatch.setattr(endpoints, "parse_request", parse_here)
    with running_data_plane(tmp_path / "model", max_body=16 << 20) as plane:
        loop_thread = plane.on_loop(threading.get_ident)
        for num_messages in (1, 30):
            # The model's own parts are joined as it wrote them: the prompt stays short.
            turns = [{"role": "assistant", "content": [{"type": "text", "text": ""}] * 1024}] * num_messages
            body = {
                "model": BASE,
                "messages": [{"role": "user", "content": "hi"}, *turns, {"role": "user", "content": "hi"}],
            }
            plane.http.post(f"{plane.url}/v1/chat/completions", json=body, headers=KEY).raise_for_status()
        assert [thread == loop_thread for thread in checked_in] == [True, False]


@pytest.mark.slow
def test_tokenising_leaves_the_interpreter_to_others(real_model_dir: Path) -> None:
    text = TextProcessor(real_model_dir, max_model_len=8192)
    for calls in (3, 12, 48):  # a busy machine may have no turn for this thread for a while

        def encode(calls: int = calls) -> None:
            for _ in range(calls):
                text.encode("ab cd" * 50_000)

        worker = threading.Thread(target=encode)
        turns = 0
        worker.start()
        while worker.is_alive():
            time.sleep(0.0001)
            turns += 1
        # With the lock held, there would be a turn or two between the calls.
        if turns > 17 * calls:
            break
    assert turns > 17 * calls


def test_bodies_of_one_tenant_leave_room_for_others(tmp_path: Path) -> None:
    """The server keeps what has come, also of those that never end."""
    largest, sent, asked = 64 << 10, 60_000, 100
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lpx_acme\r\n"
        f"Content-Length: {largest}\r\n\r\n"
    ).encode()
    most = MAX_BODIES * largest // 2 // sent
    with running_data_plane(tmp_path / "model", max_body=largest) as plane, contextlib.ExitStack() as clients:
        sockets = [clients.enter_context(plane.server.connect()) for _ in range(asked)]
        for sock in sockets:
            sock.sendall(head + b" " * sent)
        eventually(lambda: len(answered(sockets)) >= asked - most)
        refused = answered(sockets)
        assert len(refused) < asked, "some have room"
        for sock in refused:
            answer = sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"server_overloaded" in answer
            assert b"retry-after: 1" in answer.lower()
        body = {"model": BASE, "prompt": "x" * 1000}
        rival = {"Authorization": "Bearer lpx_rival"}
        assert plane.http.post(f"{plane.url}/v1/completions", json=body, headers=rival).status_code == 200
        clients.close()
        eventually(lambda: plane.drain.in_flight == 0)
        assert plane.http.post(f"{plane.url}/v1/completions", json=body, headers=KEY).status_code == 200


def answered(sockets: Sequence[socket.socket]) -> list[socket.socket]:
    return select.select(sockets, [], [], 0)[0]
