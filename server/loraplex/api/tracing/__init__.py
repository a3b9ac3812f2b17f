"""Spans of generation requests, for OpenTelemetry. A server without a collector never imports `spans`.

- `spans.RequestTracing`: begins the trace of a request, or decides that it is not recorded.
- `spans.RequestTrace`: takes what becomes known of the request, and makes its spans when it has ended.

The exporter is in `loraplex.app.tracing`.
"""
