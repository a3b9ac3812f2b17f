"""`/v1/batches` over HTTP: OpenAI's client unchanged; lines are answered as their routes answer."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import openai
import pytest
from sqlalchemy import update

from loraplex.adapters.pooled import Head
from loraplex.api.batches.lines import MOST_TAKES, Lines
from loraplex.control.batches.work import BatchWork
from loraplex.control.db.database import utc_now
from loraplex.control.db.tables import ApiKey, Tenant
from loraplex.lifecycle.batches.runner import BatchRunner, Later
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane, Refused
from support.waiting import eventually

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def running(plane: DataPlane) -> Iterator[None]:
    """The plane's server runs batches."""
    work = BatchWork(plane.services.database, uuid.uuid4().hex, ttl_s=5.0)
    run = plane.services.database.run
    tasks: list[asyncio.Task[None]] = []

    async def start() -> None:
        runner = BatchRunner(work, Lines(plane.services), run, look_s=0.01)
        tasks.append(asyncio.create_task(runner.run()))

    async def stop() -> None:
        tasks[0].cancel()
        await asyncio.wait(tasks)

    plane.server.call(start)
    yield
    plane.server.call(stop)


def request(custom_id: str, body: Any, **changes: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes
    return json.dumps(line).encode() + b"\n"


def chat(custom_id: str, model: str = BASE, **fields: Any) -> bytes:
    return request(custom_id, {"model": model, "messages": MESSAGES, "max_tokens": 4} | fields)


def create(plane: DataPlane, data: bytes, endpoint: Any = CHAT, key: str = "lpx_acme", **fields: Any) -> Any:
    client = plane.client(key)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    fields = {"completion_window": "24h", **fields}
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)


def finished(plane: DataPlane, batch: Any, key: str = "lpx_acme") -> Any:
    client = plane.client(key)
    eventually(lambda: client.batches.retrieve(batch.id).status in ("completed", "cancelled"), 60)
    return client.batches.retrieve(batch.id)


def lines(plane: DataPlane, file_id: str | None) -> dict[Any, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in plane.client().files.content(file_id).text.splitlines()]
    return {line["custom_id"] or line["error"]["line"]: line for line in found}


def test_openais_client(plane: DataPlane, running: None) -> None:
    plane.engine.default = Reply(text="Hi")
    made = create(plane, b"".join(chat(f"r{number}") for number in range(200)), metadata={"job": "nightly"})
    assert (made.object, made.status, made.metadata) == ("batch", "in_progress", {"job": "nightly"})
    assert made.expires_at - made.created_at == 86_400
    done = finished(plane, made)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 200, 200, 0)
    assert done.error_file_id is None
    written = lines(plane, done.output_file_id)
    assert list(written) == [f"r{number}" for number in range(200)], "in the order of the input"
    answer = written["r7"]["response"]
    assert answer["status_code"] == 200
    assert answer["body"]["choices"][0]["message"]["content"] == "Hi"
    assert all(asked.background for asked in plane.engine.requests)
    assert {row.endpoint for row in plane.ledger.rows} == {f"batch:{CHAT}"}
    assert made.id in [batch.id for batch in plane.client().batches.list(limit=2)]
    with pytest.raises(openai.NotFoundError) as caught:
        plane.client("lpx_rival").batches.retrieve(made.id)
    assert caught.value.code == "batch_not_found"


@pytest.mark.parametrize(
    ("endpoint", "body", "object_"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}, "response"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        *((path, {"input": ["a", "b"]}, "list") for path in ("/classify", "/v1/classify")),
        *((path, {"text_1": "a", "text_2": ["b", "c"]}, "list") for path in ("/score", "/v1/score")),
        *(
            (path, {"query": "a", "documents": ["b", "c"]}, "list")
            for path in ("/v1/rerank", "/rerank", "/v2/rerank")
        ),
    ],
)
def test_every_endpoint(
    plane: DataPlane, running: None, endpoint: str, body: dict[str, Any], object_: str
) -> None:
    """A line is answered as its route answers the same body."""
    body = {"model": BASE} | body
    if "classify" in endpoint:
        body["model"] = "pirate"
        plane.resolver.heads["pirate"] = Head("classify", ("a", "b", "c"), "single_label_classification")
    elif "score" in endpoint or "rerank" in endpoint:
        body["model"] = "json"
        plane.resolver.heads["json"] = Head("classify", ("LABEL_0",), "regression")
    made = create(plane, request("a", body, url=endpoint), endpoint)
    written = lines(plane, finished(plane, made).output_file_id)
    answer = written["a"]["response"]["body"]
    assert answer["object"] == object_
    key = {"authorization": "Bearer lpx_acme"}
    direct = plane.http.post(f"{plane.url}{endpoint}", json=body, headers=key).json()
    assert direct.keys() == answer.keys()
    for name in ("data", "results", "usage"):
        assert direct.get(name) == answer.get(name)
    assert {row.endpoint for row in plane.ledger.rows} == {f"batch:{endpoint}", endpoint}


def test_a_line_decides_with_one_sequence_at_a_time(plane: DataPlane, running: None) -> None:
    """The engine takes 256 sequences of batches: with several of each line it would refuse others."""
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 1, "logprobs": True}
    body["structured_outputs"] = {"choice": ["a", "bc", "de"]}
    plane.engine.script(Reply(text="a"), Reply(text="", hold=True, chunk=1))
    made = create(plane, request("a", body))
    eventually(lambda: len(plane.engine.requests) == 2, 10)
    plane.engine.release(plane.engine.requests[1].request_id)
    written = lines(plane, finished(plane, made).output_file_id)
    (choice,) = written["a"]["response"]["body"]["choices"]
    assert [told["choice"] for told in choice["choice_probabilities"]] == ["a", "bc", "de"]
    assert len(plane.engine.requests) == 3
    assert all(asked.batch for asked in plane.engine.requests)


def test_no_line_of_an_output_looks_like_two(plane: DataPlane, running: None) -> None:
    """Clients cut lines by `splitlines` and `iter_lines`, which know further ends than JSON escapes."""
    odd = "a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b\r\n"
    plane.engine.default = Reply(text=odd)
    made = create(plane, chat("a", max_tokens=50) + chat("\u2028"))
    output = plane.client().files.content(finished(plane, made).output_file_id)
    assert len(list(output.iter_lines())) == len(output.text.splitlines()) == 2
    written = lines(plane, finished(plane, made).output_file_id)
    assert written["a"]["response"]["body"]["choices"][0]["message"]["content"] == odd
    assert "\u2028" in written


def test_bad_lines_are_told_by_number_and_stop_nobody(plane: DataPlane, running: None) -> None:
    data = b"".join(
        [
            chat("good"),
            b"not JSON\n",
            b"[]\n",
            b"\n",
            chat("good"),
            chat("wrong url", BASE).replace(b"/v1/chat", b"/v1/chap"),
            chat("stream", stream=True),
            chat("other", "secret"),
            chat("unknown field", frobnicate=1),
            request("no body", []),
            request("", {}),
            chat("last"),
        ]
    )
    done = finished(plane, create(plane, data))
    assert set(lines(plane, done.output_file_id)) == {"good", "last"}
    bad = lines(plane, done.error_file_id)
    told = {name: (line["error"] or {}).get("code") for name, line in bad.items()}
    assert told == {
        2: "invalid_json_line",
        3: "invalid_json_line",
        5: "duplicate_custom_id",
        "wrong url": "invalid_url",
        "stream": "invalid_body",
        "other": None,
        "unknown field": None,
        "no body": "invalid_body",
        11: "invalid_custom_id",
    }
    other, unknown = bad["other"]["response"], bad["unknown field"]["response"]
    assert (other["status_code"], other["body"]["error"]["code"]) == (404, "model_not_found")
    assert (unknown["status_code"], unknown["body"]["error"]["param"]) == (400, "frobnicate")
    assert "Line 2:" in bad[2]["error"]["message"]


def test_what_is_refused_for_now_is_answered_later(plane: DataPlane, running: None) -> None:
    plane.limiter.refuse_with = [Refused("rate_limit_exceeded", "later", 1.0)] * 2
    done = finished(plane, create(plane, chat("a") + chat("b") + chat("c")))
    assert set(lines(plane, done.output_file_id)) == {"a", "b", "c"}
    assert len(plane.engine.requests) == 3, "none was computed twice"


def test_lines_of_a_suspended_tenant_wait_for_its_return(plane: DataPlane) -> None:
    """Those that a server had taken, too, however often."""

    def suspend(since: datetime | None) -> None:
        with plane.services.database.write() as session:
            session.execute(update(Tenant).where(Tenant.id == "acme").values(suspended_at=since))

    worker, made = BatchWork(plane.services.database, "one"), create(plane, chat("a"))
    work = worker.take({}, 3)
    assert work is not None
    assert work.batch_id == made.id
    worn, (line,) = replace(work, takes=MOST_TAKES), work.lines
    suspend(utc_now())
    try:
        with pytest.raises(Later):
            plane.server.call(lambda: Lines(plane.services).answer(worn, line))
    finally:
        suspend(None)
    answer = plane.server.call(lambda: Lines(plane.services).answer(worn, line))
    worker.write(work, [answer])
    worker.release(work, done=True)
    assert not answer.failed


def test_a_key_that_ended_answers_no_more_lines(plane: DataPlane, running: None) -> None:
    def scopes(found: list[str]) -> None:
        with plane.services.database.write() as session:
            session.execute(update(ApiKey).where(ApiKey.id == "key-acme").values(scopes=found))

    scopes(["usage:read"])
    try:
        done = finished(plane, create(plane, chat("a")))
    finally:
        scopes(["inference"])
    assert lines(plane, done.error_file_id)["a"]["response"]["status_code"] == 403


def test_cancelling_ends_what_runs_and_keeps_what_is_done(plane: DataPlane, running: None) -> None:
    plane.engine.script(*[Reply(text="Hi")] * 10)
    plane.engine.default = Reply(text="never", hold=True)
    made = create(plane, b"".join(chat(f"r{number}") for number in range(100)))
    client = plane.client()
    eventually(lambda: client.batches.retrieve(made.id).request_counts.completed == 10, 60)
    assert client.batches.cancel(made.id).status == "cancelling"
    done = finished(plane, made)
    assert done.status == "cancelled"
    assert len(lines(plane, done.output_file_id)) == 10
    assert done.cancelled_at is not None


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": "x" * 600}}, 400, None),
    ],
)
def test_wrong_batches(plane: DataPlane, fields: dict[str, Any], status: int, param: str | None) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        create(plane, chat("a"), **fields)
    assert caught.value.status_code == status
    assert param is None or caught.value.param == param


def test_what_a_batch_wrote_is_its_tenants_and_no_input(plane: DataPlane, running: None) -> None:
    done = finished(plane, create(plane, chat("a") + b"wrong\n"))
    rival = plane.client("lpx_rival")
    for file_id in (done.output_file_id, done.error_file_id):
        for call in (rival.files.retrieve, rival.files.content, rival.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
        for client, refusal in ((rival, openai.NotFoundError), (plane.client(), openai.BadRequestError)):
            with pytest.raises(refusal) as caught:
                client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")  # type: ignore[arg-type]
            assert caught.value.param in ("file_id", "input_file_id")
    with pytest.raises(openai.NotFoundError):
        rival.batches.cancel(done.id)
    assert done.id not in [batch.id for batch in rival.batches.list()]
    assert set(lines(plane, done.output_file_id)) == {"a"}


def test_files_of_others_make_no_batch(plane: DataPlane) -> None:
    file = plane.client("lpx_rival").files.create(file=("in.jsonl", chat("a")), purpose="batch")
    with pytest.raises(openai.NotFoundError) as caught:
        plane.client().batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")  # type: ignore[arg-type]
    assert caught.value.code == "file_not_found"
    plane.client("lpx_rival").files.delete(file.id)


def test_lines_are_in_the_history_without_their_times(plane: DataPlane, running: None) -> None:
    history = plane.services.history
    began = history.clock() + 4000  # what other tests did is forgotten then
    history.clock = lambda: began
    plane.engine.default = Reply(text="Hi")
    finished(plane, create(plane, chat("a") + chat("b") + chat("c", "nothing-like-this")))
    plane.settle_all()
    history.clock = lambda: began + 10
    total = plane.on_loop(lambda: history.past("5m")).report().total
    tokens = sum(row.completion_tokens for row in plane.ledger.rows)
    assert (total.requests, total.errors, total.output_tokens) == (2, 0, tokens)
    assert total.first_token_seconds is None
