"""A stand-in for an OpenTelemetry collector: a real HTTP server that decodes OTLP's protobuf.

    with OtlpCollector() as collector:
        …                                   # something that sends traces to collector.url
        collector.trace(trace_id)           # its spans, by name

It can be made to refuse (`status`) or to hang (`held`).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from support.waiting import eventually


@dataclass(frozen=True)
class CollectedSpan:
    """Ids are hex digits; `parent_id` is empty for a root. Times in nanoseconds of the wall clock."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    failed: bool
    trace_state: str
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


class OtlpCollector:
    """`bodies` are the requests' bodies as they came, `headers` theirs. `status` is what it answers; while `held` is
    cleared, it takes requests and does not answer."""

    def __init__(self) -> None:
        self.status = 200
        self.held = threading.Event()
        self.held.set()
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.asked = 0
        self._spans: list[CollectedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                collector.held.wait()
                if collector.status == 200:
                    collector._take(self.path, dict(self.headers.items()), body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="collector", daemon=True
        )

    def __enter__(self) -> OtlpCollector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[CollectedSpan]:
        return list(self._spans)

    def wait(self, condition: Callable[[list[CollectedSpan]], bool], timeout: float = 60.0) -> None:
        eventually(lambda: condition(self.spans), timeout)

    def roots(self, number: int) -> list[CollectedSpan]:
        """Waits for that number of requests; their SERVER spans in the order of their starts."""
        self.wait(lambda spans: sum(span.kind == "SERVER" for span in spans) >= number)
        return sorted((span for span in self.spans if span.kind == "SERVER"), key=lambda span: span.start)

    def root(self) -> CollectedSpan:
        """Waits for the one request that there is."""
        (found,) = self.roots(1)
        return found

    def children(self, parent: CollectedSpan) -> list[CollectedSpan]:
        """In the order of their starts. All spans of a request come before its root."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.start, span.end))

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.paths.append(path)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {pair.key: _value(pair.value) for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self._spans += [_span(span, resource) for span in scope.spans]


def _span(span: Span, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {pair.key: _value(pair.value) for pair in span.attributes},
        span.status.code == Status.STATUS_CODE_ERROR,
        span.trace_state,
        resource,
    )


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_value(item) for item in value.array_value.values]
    return getattr(value, value.WhichOneof("value") or "string_value")


def port_without_a_listener() -> int:
    """A port of the loopback address that refuses connections."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
