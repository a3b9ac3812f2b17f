"""The export of traces to an OpenTelemetry collector. Imported only where `--otlp-endpoint` is set.

- `setup.start_tracing`: the tracing of a server by its settings, with `close` for its end.
- `export.CountedSpans`: the bounded way of spans to the collector.
"""
