"""`SeriesCallback` against a server that is told what to answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.contrib.series import FIGURES, SeriesCallback, SeriesFailed

Answer = tuple[int, dict[str, Any]]
FOUND = dict.fromkeys(FIGURES, 0.25)
MADE = {"version": "v7", "digest": "sha256:00", "report": {"agreement": None}}
HELD = MADE | {"report": {"agreement": FOUND}}
TOKENS = [[1, 2, 3]]


class ScriptedServer(ThreadingHTTPServer):
    """Answers as scripted, in order; keeps the paths and the types of what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        kind = self.headers["content-type"].partition(";")[0]
        self.server.asked.append((self.path.rpartition("/adapters/")[2], kind))
        status, answer = self.server.answers.pop(0)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def refused(status: int, code: str, param: str | None = None) -> Answer:
    return status, {"code": code, "detail": "It is so."} | ({} if param is None else {"param": param})


def test_the_pushes_follow_a_threshold_that_comes_and_goes(server: ScriptedServer) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=1, target_modules=["q_proj"]))
    url = f"http://127.0.0.1:{server.server_port}"
    callback = SeriesCallback("run", agree_on=TOKENS, tenant="acme", url=url, api_key="lpx_key")

    def step(*answers: Answer) -> list[tuple[str, str]]:
        server.answers, server.asked = list(answers), []
        state = SimpleNamespace(global_step=len(callback.pushed) + 1, is_world_process_zero=True)
        callback.on_step_end(None, state, None, model=model)
        assert callback.pushed[-1].agreement == FOUND
        return server.asked

    form = ("run/series/versions", "multipart/form-data")
    alone = ("run/series/versions", "application/octet-stream")
    report = ("run/versions/v7/agreement", "application/json")
    assert step((201, MADE), (200, FOUND)) == [alone, report]
    assert step(refused(422, "agreement_missing"), (201, HELD)) == [alone, form]
    assert step((201, HELD)) == [form]
    taken_away = refused(409, "conflict", "agree_within")
    assert step(taken_away, (201, MADE), (200, FOUND)) == [form, alone, report]
    assert step((201, MADE), (200, FOUND)) == [alone, report]
    for answers in (
        [refused(409, "conflict", "config")],
        [refused(422, "agreement_missing"), taken_away],
    ):
        with pytest.raises(SeriesFailed, match="409 conflict: It is so"):
            step(*answers)


def test_a_threshold_without_tokens_is_refused_before_the_training() -> None:
    with pytest.raises(ValueError, match=r"agree_on names no tokens .* give agree_on="):
        SeriesCallback("run", rules={"agree_within": 0.1}, api_key="lpx_key")
