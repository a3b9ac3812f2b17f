"""The way of spans to a collector that is well, refuses, hangs, or is not there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from loraplex.app.settings import Settings, SettingsInvalid, load_settings
from loraplex.app.tracing.export import CountedSpans
from loraplex.app.tracing.setup import start_tracing, traces_url
from support.http.admin_plane import ADMIN_TOKEN
from support.http.otlp_collector import OtlpCollector, port_without_a_listener
from support.http.quiet import all_levels
from support.http.whole_server import bearer, whole_server
from support.waiting import eventually


class Counts:
    def __init__(self) -> None:
        self.num_exported = self.num_failed = self.num_dropped = 0

    def exported(self, number: int) -> None:
        self.num_exported += number

    def failed(self, number: int) -> None:
        self.num_failed += number

    def dropped(self, number: int) -> None:
        self.num_dropped += number

    @property
    def total(self) -> int:
        return self.num_exported + self.num_failed + self.num_dropped


class HeldExporter(SpanExporter):
    """Hangs in each export until it is released."""

    def __init__(self, *results: SpanExportResult) -> None:
        self.released = threading.Event()
        self.entered = threading.Event()
        self.results = list(results)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.released.wait()
        return self.results.pop(0) if self.results else SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


def finish_spans(spans: CountedSpans, number: int) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(spans)
    tracer = provider.get_tracer("test")
    for _ in range(number):
        tracer.start_span("span").end()


def test_what_waits_for_a_collector_that_hangs_is_bounded_and_the_rest_is_counted() -> None:
    counts, exporter = Counts(), HeldExporter()
    spans = CountedSpans(exporter, counts, max_waiting=8, batch=4, delay_ms=1)
    finish_spans(spans, 4)
    assert exporter.entered.wait(10)
    finish_spans(spans, 20)  # 4 of them wait beside those that are being sent
    assert (counts.num_exported, counts.num_dropped) == (0, 16)
    exporter.released.set()
    eventually(lambda: counts.num_exported == 8)
    finish_spans(spans, 3)  # there is room again
    spans.close(10)
    assert (counts.num_exported, counts.num_failed, counts.num_dropped) == (11, 0, 16)


def test_an_end_waits_for_a_collector_that_hangs_for_a_bounded_time() -> None:
    counts, exporter = Counts(), HeldExporter()
    spans = CountedSpans(exporter, counts, max_waiting=8, batch=4, delay_ms=1)
    finish_spans(spans, 6)
    assert exporter.entered.wait(10)
    with all_levels(), capture_logs() as logs:
        spans.close(0.05)
    assert (counts.num_dropped, counts.total) == (6, 6)
    assert [(line["event"], line["spans"]) for line in logs] == [("traces_dropped", 6)]
    exporter.released.set()  # what it says then changes nothing
    finish_spans(spans, 1)
    assert (counts.num_dropped, counts.total) == (7, 7)


def test_an_outage_of_the_collector_is_two_lines_of_the_log() -> None:
    results = [SpanExportResult.FAILURE] * 3
    counts, exporter = Counts(), HeldExporter(*results)
    exporter.released.set()
    spans = CountedSpans(exporter, counts, max_waiting=8, batch=1, delay_ms=1)
    with all_levels(), capture_logs() as logs:
        finish_spans(spans, 5)
        spans.close(10)
    assert (counts.num_failed, counts.num_exported) == (3, 2)
    assert [line["event"] for line in logs] == ["trace_export_failed", "trace_export_back"]


def test_headers_path_and_resource_reach_the_collector(
    collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the standard variables, only the resource's attributes count.
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-scope=a=b")
    tracing = start_tracing(Settings(otlp_endpoint=collector.url), "base", Counts(), delay_ms=1)
    trace = tracing.requests.begin("POST", "/v1/completions", [], 0.0)
    assert trace is not None
    trace.end(
        request_id="r",
        internal_id="i",
        principal=None,
        model=None,
        adapter=None,
        resolved=False,
        prompt_tokens=0,
        completion_tokens=0,
        status=None,
        outcome=None,
    )
    asyncio.run(tracing.close())
    root = collector.root()
    assert root.attributes["error.type"] == "cancelled"
    assert collector.paths == ["/v1/traces"]
    assert collector.headers[0]["authorization"] == "Bearer abc"
    assert collector.headers[0]["x-scope"] == "a=b"
    assert "content-encoding" not in collector.headers[0]
    assert root.resource["service.name"] == "llm"
    assert root.resource["deployment.environment.name"] == "prod"
    assert root.resource["service.instance.id"]


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/api/otlp/v1/traces", "https://c/api/otlp/v1/traces"),
    ],
)
def test_an_address_gets_otlps_path(endpoint: str, expected: str) -> None:
    assert traces_url(Settings(otlp_endpoint=endpoint).otlp_endpoint) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"otlp_endpoint": "collector:4317"},
        {"otlp_endpoint": "grpc://c:4317"},
        {"otlp_endpoint": "http://"},
        {"otlp_endpoint": "http://c:99999"},
        {"otlp_endpoint": "http://c/v1?x=1"},
        {"otlp_endpoint": "http://user:hunter2@c:4318"},
        {"trace_sample_ratio": 1.5},
        {"trace_sample_ratio": "nan"},
    ],
)
def test_wrong_settings_stop_the_start(given: dict[str, Any]) -> None:
    with pytest.raises(SettingsInvalid) as error:
        load_settings(given)
    assert "--" in error.value.message


@pytest.mark.parametrize("headers", ["hunter2", "bad name=hunter2", "x=hunter2%0d%0ay: z"])
def test_wrong_headers_stop_the_start_and_are_not_repeated(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    with pytest.raises(SettingsInvalid, match="OTEL_EXPORTER_OTLP_HEADERS: ") as error:
        load_settings({"otlp_endpoint": "http://c:4318"})
    assert "hunter2" not in error.value.message
    load_settings({})  # without a collector nobody reads them


def chat(server: Any, key: str) -> int:
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    body["model"] = server.installation.served_name
    url = f"{server.data_url}/v1/chat/completions"
    return int(server.http.post(url, json=body, headers=bearer(key)).status_code)


def counted(server: Any, outcome: str) -> float:
    text = server.http.get(f"{server.admin_url}/metrics", headers=bearer(ADMIN_TOKEN)).text
    name = f'loraplex_trace_spans_total{{outcome="{outcome}"}} '
    return next(float(line.split(" ")[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("failure", ["absent", "refusing", "hanging"])
def test_no_request_waits_for_the_collector(failure: str, tmp_path: Path, collector: OtlpCollector) -> None:
    """The answers come while the collector is held, which an export in a request's way would wait for."""
    url = collector.url
    if failure == "absent":
        url = f"http://127.0.0.1:{port_without_a_listener()}"
    elif failure == "refusing":
        collector.status = 400
    else:
        collector.held.clear()
    with whole_server(tmp_path, otlp_endpoint=url) as server:
        server.plane.make_tenant()
        key = server.plane.make_key("acme", "inference")
        assert [chat(server, key) for _ in range(5)] == [200] * 5
        if failure == "hanging":
            eventually(lambda: collector.asked > 0)
            assert [chat(server, key) for _ in range(5)] == [200] * 5
            collector.held.set()
            eventually(lambda: counted(server, "exported") > 0)
        else:
            eventually(lambda: counted(server, "failed") > 0)
        server.settle()


def test_an_orderly_end_sends_what_waits(tmp_path: Path, collector: OtlpCollector) -> None:
    with whole_server(tmp_path, otlp_endpoint=collector.url) as server:
        server.plane.make_tenant()
        key = server.plane.make_key("acme", "inference")
        assert chat(server, key) == 200
    assert len(collector.roots(1)) == 1


def test_a_server_without_a_collector_imports_no_tracing() -> None:
    """OpenTelemetry's API is not counted: another library imports it."""
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "google.protobuf", "loraplex.api.tracing.spans")
    program = (
        "import sys, loraplex.app.serve, loraplex.app.planes, loraplex.api.generation.endpoints;"
        f"print([name for name in sys.modules if name.startswith({heavy})])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
