"""Which requests are recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class RequestSampler(Sampler):
    """Records a share `ratio` (0 … 1) of the requests, by chance, whatever their callers ask for: neither the sampled
    flag nor the trace id of a caller can force or prevent a record. With `follow_caller`, a request that brings a trace
    context is recorded if its sampled flag is set. Spans within a request follow it."""

    def __init__(self, ratio: float, *, follow_caller: bool) -> None:
        self._ratio = ratio
        self._follow_caller = follow_caller

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid and (self._follow_caller or not parent.is_remote):
            sampled = parent.trace_flags.sampled
        else:
            sampled = random.random() < self._ratio  # noqa: S311 - no secret
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.DROP
        return SamplingResult(decision, attributes if sampled else None, parent.trace_state)

    def get_description(self) -> str:
        return f"RequestSampler({self._ratio}, follow_caller={self._follow_caller})"
