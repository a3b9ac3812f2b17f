"""Comparisons of pushes by the data plane's own scorer: what an engine that is busy, away or dying leads to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from loraplex.engine.types import EngineRequest
from loraplex.lifecycle import version_checks
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineUnavailable
from support.adapters.drafts import AdapterDraft, draft_adapter
from support.engine.fake_engine import Reply, fake_row
from support.http.admin_plane import ADMIN_TOKEN, ARCH, assert_problem
from support.http.whole_server import WholeServer, bearer, whole_server

SERIES = "/admin/v1/tenants/acme/adapters/run/series"
TOKENS = [104, 105, 200, 33]
NUMBERS = {
    "tokens": TOKENS,
    "logprobs": [None, *(fake_row(one, at, 0)[0] for at, one in enumerate(TOKENS) if at)],
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeServer]:
    for name in ("FIRST_RETRY_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(version_checks, name, 0.02)
    with whole_server(tmp_path) as made:
        made.plane.make_tenant("acme")
        yield made
        made.settle()


def push(server: WholeServer, draft: AdapterDraft) -> httpx.Response:
    rules = {"config": draft.config, "agree_within": 0.01}
    put = server.http.put(f"{server.admin_url}{SERIES}", json=rules, headers=bearer(ADMIN_TOKEN))
    assert put.status_code == 200, put.text
    tensors = draft.write(server.plane.root / "pushed").tensors.read_bytes()
    form: dict[str, Any] = {
        "adapter_model.safetensors": tensors,
        "agreement": (None, json.dumps(NUMBERS).encode()),
    }
    key = server.plane.make_key("acme", "adapters:train")
    return server.http.post(f"{server.data_url}{SERIES}/versions", files=form, headers=bearer(key))


def test_a_busy_engine_is_waited_for(server: WholeServer) -> None:
    busy = Reply(error=("server_overloaded", "1024 requests are waiting already"), refused=True)
    server.plane.engine.script(busy, busy)
    answer = push(server, draft_adapter(ARCH))
    assert answer.status_code == 201, answer.text
    assert answer.json()["report"]["agreement"]["max"] == 0.0
    assert len(server.plane.engine.requests) == 3


def test_an_engine_that_takes_nothing_is_waited_for_and_blames_no_version(
    server: WholeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, left = server.plane.engine.submit, [3]

    def away(*requests: EngineRequest, **options: Any) -> list[RequestStream]:
        if left[0]:
            left[0] -= 1
            raise EngineUnavailable("the engine process is being restarted")
        return submit(*requests, **options)

    monkeypatch.setattr(server.plane.engine, "submit", away)
    answer = push(server, draft_adapter(ARCH))
    assert answer.status_code == 201, answer.text


def test_a_version_that_the_engine_dies_of_twice_is_rejected(server: WholeServer) -> None:
    died = Reply(error=("engine_restarting", "the engine process failed and is being restarted"))
    server.plane.engine.script(died, died)
    assert_problem(push(server, draft_adapter(ARCH)), 422, "numerical_crash")


def test_a_version_that_gives_no_log_probabilities_is_rejected(server: WholeServer) -> None:
    draft = draft_adapter(ARCH, task_type="SEQ_CLS", modules_to_save=["classifier", "score"])
    draft.tensors["base_model.model.score.weight"] = np.ones((3, ARCH.hidden), np.float32)
    problem = assert_problem(push(server, draft), 422, "agreement_failed")
    assert "the server cannot compute the log probabilities of the trainer's tokens" in problem["detail"]
    assert problem["version"] == "v1"
    assert server.plane.engine.requests == []


def test_the_numbers_are_measured_once_however_often_it_is_compared(server: WholeServer) -> None:
    server.plane.engine.script(Reply(error=("adapter_unavailable", "no room")))
    assert_problem(push(server, draft_adapter(ARCH)), 503, "numbers_unchecked")
    assert server.plane.measure.measured == []
    answer = push(server, draft_adapter(ARCH))
    assert (answer.status_code, answer.json()["version"]) == (200, "v1"), answer.text
    assert server.plane.measure.measured == ["run@v1"]
