"""Finished spans on their way to the collector: bounded, counted, and never waited for by a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from loraplex.api.metrics.part_meters import TraceMeter

MAX_WAITING = 8192
"""Spans that wait for the collector or are being sent; some 3 KB each."""
BATCH = 512
BATCH_DELAY_MS = 1000
EXPORT_TIMEOUT_S = 5.0
"""Longest time for one batch, with its retries."""

log = structlog.get_logger("loraplex.tracing")


class _WatchedExporter(SpanExporter):
    """Logs when the collector stops taking spans and when it takes them again: one line each, not one a batch."""

    def __init__(self, exporter: SpanExporter, sent: Callable[[int, bool], None]) -> None:
        self._exporter = exporter
        self._sent = sent
        self._failing_since: float | None = None
        self._reasons = _LastMessage()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            self._reasons.reason = f"{type(error).__name__}: {error}"
            result = SpanExportResult.FAILURE
        taken = result is SpanExportResult.SUCCESS
        self._sent(len(spans), taken)
        if taken and self._failing_since is not None:
            log.info("trace_export_back", seconds=round(time.monotonic() - self._failing_since, 1))
            self._failing_since = None
        elif not taken and self._failing_since is None:
            self._failing_since = time.monotonic()
            log.warning("trace_export_failed", reason=self._reasons.reason)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._reasons.close()


class _LastMessage(logging.Handler):
    """Takes the exporter library's own log lines, one or more for each batch that fails."""

    NAME = "opentelemetry.exporter.otlp"

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reason = "the collector did not take the spans"
        self._logger = logging.getLogger(self.NAME)
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.reason = " ".join(record.getMessage().split())[:500]

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


class CountedSpans(SpanProcessor):
    """Hands finished spans to a thread that sends them in batches. At most `max_waiting` wait; further ones are
    dropped. Every span ends up in exactly one of the `counts`."""

    def __init__(
        self,
        exporter: SpanExporter,
        counts: TraceMeter,
        *,
        max_waiting: int = MAX_WAITING,
        batch: int = BATCH,
        delay_ms: float = BATCH_DELAY_MS,
    ) -> None:
        self._counts = counts
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False
        # Its own queue is never full, where it would drop spans without a count.
        self._batches = BatchSpanProcessor(
            _WatchedExporter(exporter, self._sent),
            max_queue_size=max_waiting,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=min(batch, max_waiting),
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            room = self._waiting < self._max_waiting and not self._closed
            self._waiting += room
        if room:
            self._batches.on_end(span)
        else:
            self._counts.dropped(1)

    def shutdown(self) -> None:
        """Sends what waits. May take as long as the collector lets it: see `close`."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for at most `timeout_s` seconds; the rest is dropped. Blocks."""
        # The processor's own bound is 30 seconds. Its thread, like this one, does not keep the process from ending.
        flush = threading.Thread(target=self.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        with self._lock:
            left, self._waiting, self._closed = self._waiting, 0, True
        if left:
            self._counts.dropped(left)
            log.warning("traces_dropped", spans=left, reason="the collector did not take them before the end")

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)

    def _sent(self, number: int, taken: bool) -> None:
        with self._lock:
            if self._closed:
                return  # counted as dropped
            self._waiting -= number
        (self._counts.exported if taken else self._counts.failed)(number)
