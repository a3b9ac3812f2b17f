"""Traces of `loraplex serve` with a tiny model: the phases that the engine process measures, and the server's end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.http.otlp_collector import CollectedSpan, OtlpCollector
from support.servers.live_server import (
    TINY_TORCH,
    LiveServer,
    checked,
    write_tiny_adapter,
    write_tiny_model,
)
from support.waiting import eventually

pytestmark = pytest.mark.slow

CHAT: Any = {"messages": [{"role": "user", "content": "hello there"}], "ignore_eos": True}


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


def show(collector: OtlpCollector, span: CollectedSpan, depth: int = 0) -> list[str]:
    """A span and those below it, as a tree."""
    lines = [f"{'  ' * depth}{span.name:{32 - 2 * depth}}{span.seconds * 1000:8.1f} ms"]
    for child in collector.children(span):
        lines += show(collector, child, depth + 1)
    return lines


def test_a_server_traces_its_requests_until_its_end(tmp_path: Path, collector: OtlpCollector) -> None:
    model = write_tiny_model(tmp_path / "model")
    server = LiveServer(model, tmp_path / "data", otlp_endpoint=collector.url, **TINY_TORCH)
    with server:
        server.create_tenant("acme")
        key = server.create_key("acme")
        for version in (1, 2):
            server.upload("acme", "bot", write_tiny_adapter(tmp_path / f"v{version}", seed=version))
        # A start prefetches what is released: version 1. So the first request for version 2 has to wait.
        assert server.stop() == 0
        server.start()
        server.wait(lambda: server.residency()["bot@v1"] == ["device", "host", "disk"])
        with server.client(key) as client:
            headers = {"x-request-id": "cold-one"}
            url = "/v1/chat/completions"
            asked = {**CHAT, "model": "bot@v2", "max_tokens": 12}
            answer = checked(client.post(url, json=asked, headers=headers))
            (first,) = collector.roots(1)
            queue, prefill, decode = collector.children(first)
            (load,) = collector.children(queue)
            print("\n".join(show(collector, first)))  # docs/tracing.md shows one
            assert [queue.name, load.name, prefill.name, decode.name] == [
                *("queue", "adapter_load", "prefill", "decode"),
            ]
            times = [first.start, queue.start, load.end, prefill.start, decode.start, decode.end, first.end]
            assert times == sorted(times)
            assert queue.start == load.start
            assert queue.end == prefill.start
            assert load.seconds > 0
            assert first.attributes["loraplex.adapter.state"] == "cold"
            assert first.attributes["gen_ai.response.model"] == "bot@v2"
            assert first.attributes["gen_ai.usage.output_tokens"] == 12
            assert decode.attributes["loraplex.completion_tokens"] == 12
            assert first.attributes["gen_ai.response.id"] == answer["id"]

            # Now it is there: nothing is loaded.
            with client.stream("POST", url, json={**asked, "stream": True}) as stream:
                stream.read()
            second = collector.roots(2)[1]
            assert [span.name for span in collector.children(second)] == ["queue", "prefill", "decode"]
            assert collector.children(collector.children(second)[0]) == []

            # A client that hangs up: the phase that it was in has failed.
            with client.stream("POST", url, json={**asked, "max_tokens": 100_000, "stream": True}) as stream:
                next(stream.iter_lines())
            third = collector.roots(3)[2]
            assert third.failed
            phases = {span.name: span for span in collector.children(third)}
            assert phases["decode"].attributes["error.type"] == "cancelled"
            assert not phases["prefill"].failed
            eventually(server.idle)

            (line,) = [line for line in server.logged("request") if line["request_id"] == "cold-one"]
            assert line["trace_id"] == first.trace_id

            # The last one is sent by the orderly end.
            checked(client.post(url, json=asked))
        assert server.stop() == 0
        assert len(collector.roots(4)) == 4
    assert b"hello there" not in b"".join(collector.bodies)
