"""Settings to a running tracer."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import uuid
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider

from loraplex.api.metrics.part_meters import TraceMeter
from loraplex.api.tracing.spans import RequestTracing
from loraplex.app.settings import Settings, otlp_headers
from loraplex.app.tracing.export import BATCH_DELAY_MS, EXPORT_TIMEOUT_S, CountedSpans
from loraplex.app.tracing.sampling import RequestSampler

FLUSH_S = 3.0
"""How long the end of a server waits for the collector, within the ten seconds that a pod has beyond its drain."""
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_LENGTH = 1024


class Tracing:
    """`requests` begins the traces of requests; `close` at the server's end."""

    def __init__(self, spans: CountedSpans, requests: RequestTracing) -> None:
        self._spans = spans
        self.requests = requests

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Sends what waits, for at most so long."""
        await asyncio.to_thread(self._spans.close, timeout_s)


def start_tracing(
    settings: Settings, base: str, counts: TraceMeter, *, delay_ms: float = BATCH_DELAY_MS
) -> Tracing:
    """`base` is the served name of the base model. Spans wait for at most `delay_ms` for a batch to fill."""
    # Its warnings repeat what clients send as trace context.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    exporter = OTLPSpanExporter(
        endpoint=traces_url(settings.otlp_endpoint),
        headers=otlp_headers(),
        timeout=EXPORT_TIMEOUT_S,
        compression=Compression.NoCompression,
    )
    spans = CountedSpans(exporter, counts, delay_ms=delay_ms)
    version, ratio = importlib.metadata.version("loraplex"), settings.trace_sample_ratio
    provider = TracerProvider(
        sampler=RequestSampler(0.0 if ratio == "caller" else ratio, follow_caller=ratio == "caller"),
        resource=Resource.create(
            {
                SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME") or "loraplex",
                SERVICE_VERSION: version,
                SERVICE_INSTANCE_ID: str(uuid.uuid4()),
            }
        ),
        span_limits=SpanLimits(
            max_span_attributes=MAX_ATTRIBUTES,
            max_span_attribute_length=MAX_ATTRIBUTE_LENGTH,
            max_attribute_length=MAX_ATTRIBUTE_LENGTH,
        ),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(spans)
    return Tracing(spans, RequestTracing(provider.get_tracer("loraplex", version), base))


def traces_url(endpoint: str) -> str:
    """Where traces are sent: a collector's address gets OTLP's path, any other URL stays as it is."""
    return f"{endpoint.rstrip('/')}/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint
