"""The spans of one generation request, by OpenTelemetry's conventions for generative AI.

    chat {model}                 SERVER: from the request's arrival until its answer has ended
      queue                      from arrival in the engine until the first step
        adapter_load             until the adapter could be used; only of a sequence that waited for it
      prefill                    from the first step until the first token
      decode                     from the first token until the last

Times of the children are the engine's own, measured in its process by the clock that all processes of a machine share.
No span holds text of a prompt or an answer, a stop string, a tool, a user's name, or a key. docs/tracing.md has every
attribute; ADR 0033 says why it is so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loraplex.adapters.ref import AdapterRef
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.api.outcome import RequestOutcome, SequenceEnd
from loraplex.control.types import Principal
from loraplex.http.text import printable

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/classify", "/v1/classify"), "classify"),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
}
"""`gen_ai.operation.name` of each route whose requests are traced."""
MAX_SEQUENCES = 16
"""Sequences of a request that get spans of their own. `n` and the number of prompts allow 256."""
MAX_MODEL = 256
MAX_TRACE_HEADER = 512

Headers = Iterable[tuple[bytes, bytes]]


class _Headers(Getter[Mapping[str, list[str]]]):
    def get(self, carrier: Mapping[str, list[str]], key: str) -> list[str] | None:
        return carrier.get(key)

    def keys(self, carrier: Mapping[str, list[str]]) -> list[str]:
        return list(carrier)


class RequestTracing:
    """Begins traces. `base` is the served name of the base model."""

    def __init__(self, tracer: trace.Tracer, base: str) -> None:
        self._tracer = tracer
        self._base = base
        self._propagator = TraceContextTextMapPropagator()
        self._getter = _Headers()

    def begin(self, method: str, path: str, headers: Headers, started: float) -> RequestTrace | None:
        """None for a request that is not recorded. `started` is its arrival by `time.monotonic`."""
        operation = OPERATIONS.get(path)
        if operation is None or method != "POST":
            return None
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            operation,
            self._parent(headers),
            trace.SpanKind.SERVER,
            start_time=_ns(started, offset_ns),
        )
        if not span.is_recording():
            return None
        span.set_attributes(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "loraplex",
                "http.request.method": method,
                "http.route": path,
            }
        )
        return RequestTrace(self._tracer, span, operation, self._base, started=started, offset_ns=offset_ns)

    def _parent(self, headers: Headers) -> Any:
        """The caller's trace context. What is not well-formed, too long or given twice counts as not given."""
        carrier: dict[str, list[str]] = {}
        for name, value in headers:
            if name in (b"traceparent", b"tracestate"):
                carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
        parents = carrier.get("traceparent")
        if parents is None or len(parents) > 1:
            return trace.set_span_in_context(trace.INVALID_SPAN)
        if sum(map(len, carrier.get("tracestate", ()))) > MAX_TRACE_HEADER:
            del carrier["tracestate"]
        return self._propagator.extract(carrier, trace.set_span_in_context(trace.INVALID_SPAN), self._getter)


class RequestTrace:
    """One request that is recorded. `end` must be called, once."""

    def __init__(
        self,
        tracer: trace.Tracer,
        span: trace.Span,
        operation: str,
        base: str,
        *,
        started: float,
        offset_ns: int,
    ) -> None:
        """`offset_ns`: from `time.monotonic` to the wall clock, one for all spans of the request."""
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._base = base
        self._started = started
        self._offset_ns = offset_ns
        self._streams = False
        self._sequences: Sequence[SequenceEnd] = ()
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    @property
    def response_header(self) -> str:
        """The value of `traceresponse`: the trace and this request's span."""
        context = self._span.get_span_context()
        return f"00-{self.trace_id}-{trace.format_span_id(context.span_id)}-{context.trace_flags:02x}"

    def asked(self, request: ChatRequest | CompletionRequest) -> None:
        """The request's numbers. Nothing that can hold text."""
        given = {
            "max_tokens": request.asked_tokens[1],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "seed": request.seed,
            "choice.count": request.n if request.n != 1 else None,
        }
        found = {f"gen_ai.request.{name}": value for name, value in given.items() if value is not None}
        self._streams = bool(request.stream)
        self._span.set_attributes({"gen_ai.request.stream": self._streams, **found})

    def generated(self, answer_id: str, outcome: RequestOutcome) -> None:
        """Record the engine's work."""
        self._sequences = sequences = outcome.sequences
        found: dict[str, Any] = {
            "gen_ai.response.id": answer_id,
            "gen_ai.response.finish_reasons": [sequence.reason for sequence in sequences],
            "gen_ai.usage.cache_read.input_tokens": outcome.usage.cached_tokens,
        }
        if outcome.adapter_state is not None:
            found["loraplex.adapter.state"] = outcome.adapter_state
        if outcome.first_token_at is not None and self._streams:
            found["gen_ai.response.time_to_first_chunk"] = outcome.first_token_at - self._started
        if len(sequences) > 1:
            found["loraplex.sequences"] = len(sequences)
        self._span.set_attributes(found)

    def end(
        self,
        *,
        request_id: str,
        internal_id: str,
        principal: Principal | None,
        model: str | None,
        adapter: AdapterRef | None,
        resolved: bool,
        prompt_tokens: int,
        completion_tokens: int,
        status: int | None,
        outcome: str | None,
    ) -> None:
        """The request has ended. `outcome` is why it ended early, if it did; `status` None: before its answer began."""
        now_ns = time.monotonic_ns() + self._offset_ns
        span = self._span
        found: dict[str, Any] = {
            "loraplex.request_id": request_id,
            "loraplex.id": internal_id,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": completion_tokens,
        }
        if principal is not None:
            found["loraplex.tenant"] = principal.tenant_id or ""
            found["loraplex.key"] = principal.key_id or ""
        if model is not None:
            found["gen_ai.request.model"] = printable(model, MAX_MODEL)
        if resolved and model is not None:
            # Only a model that exists: clients must not be able to invent names of spans.
            span.update_name(f"{self._operation} {printable(model, MAX_MODEL)}")
            found |= _served(adapter, self._base)
        if status is not None:
            found["http.response.status_code"] = status
        error = outcome or (None if status is not None and status < 400 else "cancelled")
        if error is not None:
            found["error.type"] = error
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        span.set_attributes(found)
        parent = trace.set_span_in_context(span)
        for index, sequence in enumerate(self._sequences[:MAX_SEQUENCES]):
            self._phases(parent, index, sequence, now_ns)
        span.end(now_ns)

    def _phases(self, parent: Any, index: int, sequence: SequenceEnd, until_ns: int) -> None:
        timing = sequence.timing
        if timing is None or timing.arrived is None:
            return
        arrived = timing.arrived

        def at(seconds: float) -> int:
            # Within the parent, also where an engine's clock were another one.
            found = max(arrived + seconds, self._started)
            return min(_ns(found, self._offset_ns), until_ns)

        choice = {"loraplex.choice": index} if len(self._sequences) > 1 else {}
        first, last = timing.first_token_s, timing.last_token_s
        error = sequence.error or ("cancelled" if sequence.reason == "abort" else None)
        started = sequence.prompt_tokens > 0
        queue = self._span_of("queue", parent, at(0), choice, None if started else error)
        if timing.adapter_s is not None:
            waiting = trace.set_span_in_context(queue)
            load = self._span_of("adapter_load", waiting, at(0), choice, None if started else error)
            load.end(at(min(timing.adapter_s, timing.queue_s)))
        queue.end(at(timing.queue_s))
        if not started:
            return
        found = {
            **choice,
            "loraplex.prompt_tokens": sequence.prompt_tokens,
            "loraplex.cached_tokens": sequence.cached_tokens,
        }
        preempted = {"loraplex.preemptions": timing.num_preemptions} if timing.num_preemptions else {}
        if first is None:
            self._span_of("prefill", parent, at(timing.queue_s), {**found, **preempted}, error).end(
                at(timing.total_s)
            )
            return
        self._span_of("prefill", parent, at(timing.queue_s), found, None).end(at(first))
        found = {**choice, "loraplex.completion_tokens": sequence.completion_tokens, **preempted}
        decode = self._span_of("decode", parent, at(first), found, error)
        decode.end(at(timing.total_s if last is None else last))

    def _span_of(
        self, name: str, parent: Any, start_ns: int, attributes: Mapping[str, Any], error: str | None
    ) -> trace.Span:
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=start_ns)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR))
        return span


def _ns(monotonic_s: float, offset_ns: int) -> int:
    return int(monotonic_s * 1e9) + offset_ns


def _served(adapter: AdapterRef | None, base: str) -> dict[str, Any]:
    if adapter is None:
        return {"gen_ai.response.model": base}
    return {
        "gen_ai.response.model": f"{adapter.name}@v{adapter.version}",
        "loraplex.adapter": adapter.name,
        "loraplex.adapter.version": adapter.version,
        "loraplex.adapter.digest": adapter.digest,
    }
