"""W3C trace context in and out, and who decides what is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http.data_plane import DataPlane
from support.http.otlp_collector import OtlpCollector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: Any = {"model": "pirate", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def ask(plane: DataPlane, *headers: tuple[str, str]) -> httpx.Response:
    given = [("authorization", "Bearer lpx_acme"), *headers]
    answer = plane.http.post(f"{plane.url}/v1/chat/completions", json=BODY, headers=given)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_request_joins_its_callers_trace(plane: DataPlane, collector: OtlpCollector) -> None:
    answer = ask(plane, ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "vendor=a1,other=b"))
    root = collector.root()
    assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, PARENT, "vendor=a1,other=b")
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root.span_id}-01"
    assert {span.trace_id for span in collector.spans} == {TRACE}


def test_without_a_context_a_trace_begins(plane: DataPlane, collector: OtlpCollector) -> None:
    answers = [ask(plane), ask(plane)]
    first, second = collector.roots(2)
    assert first.trace_id != second.trace_id
    for answer, root in zip(answers, (first, second), strict=True):
        version, trace_id, span_id, flags = answer.headers["traceresponse"].split("-")
        assert (version, trace_id, span_id) == ("00", root.trace_id, root.span_id)
        assert int(flags, 16) & 1


HOSTILE: dict[str, list[tuple[str, str]]] = {
    "no hex": [("traceparent", f"00-{'g' * 32}-{PARENT}-01")],
    "capitals": [("traceparent", f"00-{TRACE.upper()}-{PARENT}-01")],
    "zero trace": [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
    "zero parent": [("traceparent", f"00-{TRACE}-{'0' * 16}-01")],
    "version ff": [("traceparent", f"ff-{TRACE}-{PARENT}-01")],
    "longer": [("traceparent", f"00-{TRACE}-{PARENT}-01-more")],
    "huge": [("traceparent", f"01-{TRACE}-{PARENT}-01-" + "x" * 20_000)],
    "twice": [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("traceparent", f"00-{TRACE}-{PARENT}-01")],
    "empty": [("traceparent", "")],
    "state alone": [("tracestate", "vendor=a")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_context_that_is_none_counts_as_not_given(
    case: str, plane: DataPlane, collector: OtlpCollector
) -> None:
    ask(plane, *HOSTILE[case])
    root = collector.root()
    assert (root.parent_id, root.trace_state) == ("", "")
    assert root.trace_id != TRACE


@pytest.mark.parametrize("state", ["x" * 600, ",".join(f"k{n}=v" for n in range(200)), "=,=!", "a=b,a=c"])
def test_a_state_that_is_none_is_left_out(state: str, plane: DataPlane, collector: OtlpCollector) -> None:
    ask(plane, ("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", state))
    root = collector.root()
    assert (root.trace_id, root.trace_state) == (TRACE, "")


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_callers_flag_neither_forces_nor_prevents_a_record(
    flags: str, traced: Callable[..., DataPlane], collector: OtlpCollector
) -> None:
    """Also of a trace id for which a sampler by trace id would record everything."""
    context = ("traceparent", f"00-{TRACE[:16]}{'0' * 15}1-{PARENT}-{flags}")
    unrecorded = traced(trace_sample_ratio=0.0)
    for _ in range(5):
        assert "traceresponse" not in ask(unrecorded, context).headers
    recorded = traced()
    assert "traceresponse" in ask(recorded, context).headers
    assert len(collector.roots(1)) == 1


def test_a_gateways_flag_decides_where_the_operator_says_so(
    traced: Callable[..., DataPlane], collector: OtlpCollector
) -> None:
    plane = traced(trace_sample_ratio="caller")
    assert "traceresponse" in ask(plane, ("traceparent", f"00-{TRACE}-{PARENT}-01")).headers
    assert "traceresponse" not in ask(plane, ("traceparent", f"00-{TRACE}-{PARENT}-00")).headers
    assert "traceresponse" not in ask(plane).headers
    assert collector.root().trace_id == TRACE


def test_a_share_is_recorded(traced: Callable[..., DataPlane]) -> None:
    plane = traced(trace_sample_ratio=0.5)
    recorded = sum("traceresponse" in ask(plane).headers for _ in range(60))
    assert 10 <= recorded <= 50  # beyond it once in 10 million runs


MARKS = {
    name: f"marker-{name}-{'0123456789abcdef'[index] * 8}"
    for index, name in enumerate(
        (
            "user",
            "system",
            "answer",
            "stop",
            "tool",
            "tooltext",
            "person",
            "metadata",
            "cache",
            "header",
            "name",
        )
    )
}


@pytest.mark.parametrize("stream", [False, True])
def test_no_text_and_no_secret_is_exported(
    stream: bool, tmp_path: Path, plane: DataPlane, collector: OtlpCollector
) -> None:
    from support.engine.fake_engine import Reply

    plane.engine.default = Reply(text=MARKS["answer"])
    function = {"name": MARKS["tool"], "description": MARKS["tooltext"], "parameters": {"type": "object"}}
    body = {
        **BODY,
        "max_tokens": 200,
        "messages": [
            {"role": "system", "content": MARKS["system"]},
            {"role": "user", "content": MARKS["user"], "name": MARKS["name"]},
        ],
        "stop": [MARKS["stop"]],
        "user": MARKS["person"],
        "metadata": {MARKS["metadata"]: MARKS["metadata"]},
        "prompt_cache_key": MARKS["cache"],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "none",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": stream,
    }
    headers = {"authorization": "Bearer lpx_acme", "x-secret": MARKS["header"], "user-agent": MARKS["header"]}
    url = f"{plane.url}/v1/chat/completions"
    answer = plane.http.post(f"{url}?{MARKS['header']}", json=body, headers=headers)
    assert answer.status_code == 200
    assert stream or MARKS["answer"] in answer.text
    # And refused: an error names what is wrong, so its message must not be there.
    refused = {**body, MARKS["user"]: 1, "temperature": MARKS["system"]}
    assert plane.http.post(url, json=refused, headers=headers).status_code == 400
    broken = json.dumps(body)[:-1].encode()
    assert plane.http.post(url, content=broken, headers=headers).status_code == 400
    plane.authenticator.broken = True
    assert plane.http.post(url, json=body, headers=headers).status_code == 500
    assert len(collector.roots(4)) == 4
    everything = b"".join(collector.bodies)
    assert b"chat pirate" in everything
    found = [
        name
        for name, mark in MARKS.items()
        if mark.encode() in everything or mark[:12].encode() in everything
    ]
    assert found == []
    assert b"lpx_acme" not in everything
    assert b"hunter2" not in everything
