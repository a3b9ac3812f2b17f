"""Metrics of the export of traces."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class TraceMeter:
    """The `SpanCounts` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        spans = Counter(
            "loraplex_trace_spans",
            "Finished spans, by outcome: exported, failed (the collector refused them), dropped (never sent).",
            ["outcome"],
            registry=registry,
        )
        self._exported, self._failed, self._dropped = map(spans.labels, ("exported", "failed", "dropped"))

    def exported(self, number: int) -> None:
        self._exported.inc(number)

    def failed(self, number: int) -> None:
        self._failed.inc(number)

    def dropped(self, number: int) -> None:
        self._dropped.inc(number)
