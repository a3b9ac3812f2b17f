"""The spans of requests over a scripted engine, as a collector gets them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from loraplex.control.errors import RateLimited
from loraplex.engine.types import Timing
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.otlp_collector import CollectedSpan, OtlpCollector
from support.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "hello"}]


def chat(plane: DataPlane, **fields: Any) -> httpx.Response:
    headers = {"authorization": "Bearer lpx_acme", **fields.pop("headers", {})}
    body = {"model": "pirate", "messages": MESSAGES, "max_tokens": 8, **fields}
    return plane.http.post(f"{plane.url}/v1/chat/completions", json=body, headers=headers)


def assert_nested(spans: list[CollectedSpan], parent: CollectedSpan) -> None:
    """Queue, prefill and decode follow each other within the request."""
    assert [span.name for span in spans] == ["queue", "prefill", "decode"]
    times = [parent.start, *(time for span in spans for time in (span.start, span.end)), parent.end]
    assert times == sorted(times)
    assert spans[0].end == spans[1].start
    assert spans[1].end == spans[2].start
    assert {span.trace_id for span in spans} == {parent.trace_id}


def test_a_chat_is_a_span_with_its_phases_below(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.engine.script(Reply(text="abc", cached_tokens=2))
    answer = chat(plane, temperature=0.5, top_p=0.9, seed=7)
    assert answer.status_code == 200
    root = collector.root()
    assert (root.name, root.parent_id, root.failed) == ("chat pirate", "", False)
    digest = plane.engine.requests[0].adapter.digest  # type: ignore[union-attr]
    internal = answer.json()["id"].removeprefix("chatcmpl-")
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": "pirate",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": f"chatcmpl-{internal}",
        "gen_ai.response.model": "pirate@v2",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "loraplex.tenant": "acme",
        "loraplex.key": "key-acme",
        "loraplex.adapter": "pirate",
        "loraplex.adapter.version": 2,
        "loraplex.adapter.digest": digest,
        "loraplex.adapter.state": "hot",
        "loraplex.request_id": answer.headers["x-request-id"],
        "loraplex.id": internal,
    }
    phases = collector.children(root)
    assert_nested(phases, root)
    assert phases[1].attributes == {
        "loraplex.prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "loraplex.cached_tokens": 2,
    }
    assert phases[2].attributes == {"loraplex.completion_tokens": 4}


def test_every_name_of_the_conventions_exists_there(plane: DataPlane, collector: OtlpCollector) -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    chat(plane, n=2, top_k=3, presence_penalty=1, frequency_penalty=1, temperature=1, top_p=1, seed=1)
    chat(plane, stream=True)
    sent = {name for root in collector.roots(2) for name in root.attributes if name.startswith("gen_ai.")}
    assert sent <= known
    assert len(sent) >= 18


def test_times_are_the_engines_own(plane: DataPlane, collector: OtlpCollector) -> None:
    """The request lasts, because its client reads late; the phases end when the engine said."""
    timing = Timing(0.01, 0.03, 0.07, last_token_s=0.06, num_preemptions=2, adapter_s=0.004)
    plane.engine.script(Reply(text="abc", hold=True, timing=timing, adapter_state="cold"))

    async def release_late() -> None:
        await asyncio.sleep(0.1)  # the times above have to be over: a span never ends after its request
        plane.engine.release()

    with plane.http.stream(
        "POST",
        f"{plane.url}/v1/chat/completions",
        json={"model": "pirate", "messages": MESSAGES, "stream": True},
        headers={"authorization": "Bearer lpx_acme"},
    ) as answer:
        plane.server.call(release_late)
        answer.read()
    root = collector.root()
    assert root.attributes["gen_ai.request.stream"] is True
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] < root.seconds
    assert root.attributes["loraplex.adapter.state"] == "cold"
    queue, prefill, decode = phases = collector.children(root)
    assert_nested(phases, root)
    assert [round(span.seconds, 6) for span in phases] == [0.01, 0.02, 0.03]
    assert decode.attributes["loraplex.preemptions"] == 2
    (load,) = collector.children(queue)
    assert (load.name, load.start, round(load.seconds, 6)) == ("adapter_load", queue.start, 0.004)
    assert prefill.start >= load.end


def test_each_choice_has_its_phases(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.engine.script(Reply(text="ab"), Reply(text="abcdefghijkl"), Reply(text="c"))
    chat(plane, model=BASE, n=3)
    root = collector.root()
    assert root.attributes["gen_ai.request.choice.count"] == root.attributes["loraplex.sequences"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop", "length", "stop"]
    assert root.attributes["gen_ai.response.model"] == BASE
    assert "loraplex.adapter" not in root.attributes
    for index in range(3):
        found = [s for s in collector.children(root) if s.attributes["loraplex.choice"] == index]
        assert_nested(found, root)
    decodes = [span for span in collector.children(root) if span.name == "decode"]
    assert sorted(span.attributes["loraplex.completion_tokens"] for span in decodes) == [2, 3, 8]


def test_spans_of_one_request_are_bounded(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.client().completions.create(model=BASE, prompt=["a"] * 16, n=2, max_tokens=1)
    root = collector.root()
    assert root.name == f"text_completion {BASE}"
    assert root.attributes["loraplex.sequences"] == 32
    assert {span.attributes["loraplex.choice"] for span in collector.children(root)} == set(range(16))


REFUSALS = {
    "no key": (401, "invalid_api_key", {"headers": {"authorization": "Bearer nobody"}}),
    "unknown model": (404, "model_not_found", {"model": "nothing"}),
    "unknown field": (400, "unsupported_field", {"audio": {"voice": "x"}}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_spans_without_phases(case: str, plane: DataPlane, collector: OtlpCollector) -> None:
    status, code, fields = REFUSALS[case]
    assert chat(plane, **fields).status_code == status
    root = collector.root()
    assert root.failed
    assert root.attributes["error.type"] == code
    assert root.attributes["http.response.status_code"] == status
    assert root.name == "chat"
    assert collector.children(root) == []
    assert root.attributes.get("loraplex.tenant") == (None if status == 401 else "acme")


def test_a_request_over_a_limit_is_a_span(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.limiter.refuse_admission_with.append(RateLimited("too many", retry_after_s=3))
    assert chat(plane).status_code == 429
    root = collector.root()
    assert root.attributes["error.type"] == "rate_limit_exceeded"
    assert root.attributes["loraplex.tenant"] == "acme"


def test_a_server_that_drains_is_a_span(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.on_loop(plane.drain.refuse)
    assert chat(plane).status_code == 503
    assert collector.root().attributes["error.type"] == "draining"


def test_a_sequence_that_fails_marks_the_phase_that_it_was_in(
    plane: DataPlane, collector: OtlpCollector
) -> None:
    plane.engine.script(Reply(text="ab", hold=True, hold_after=1, adapter_state="hot"))
    with (
        pytest.raises(openai.APIError),
        plane.client().chat.completions.create(model="pirate", messages=MESSAGES, stream=True) as stream,
    ):
        next(stream)
        plane.on_loop(plane.engine.kill)
        list(stream)
    root = collector.root()
    assert root.attributes["error.type"] == "engine_restarting"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert collector.children(root) == []  # the engine that knew the times is gone


def test_a_client_that_hangs_up_is_a_failed_span(plane: DataPlane, collector: OtlpCollector) -> None:
    plane.engine.script(Reply(text="ab", hold=True, hold_after=1))
    with plane.http.stream(
        "POST",
        f"{plane.url}/v1/chat/completions",
        json={"model": "pirate", "messages": MESSAGES, "stream": True},
        headers={"authorization": "Bearer lpx_acme"},
    ) as answer:
        next(answer.iter_lines())
    root = collector.root()
    assert root.failed
    assert root.attributes["error.type"] == "gone"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    eventually(lambda: plane.drain.in_flight == 0)


def test_nothing_but_generation_is_recorded(plane: DataPlane, collector: OtlpCollector) -> None:
    headers = {"authorization": "Bearer lpx_acme"}
    for path in ("/v1/models", "/livez", "/nowhere", "/v1/chat/completions"):
        assert "traceresponse" not in plane.http.get(f"{plane.url}{path}", headers=headers).headers
    chat(plane)
    assert len(collector.roots(1)) == 1
