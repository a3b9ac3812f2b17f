"""Around all routes of the data plane: ids, draining, errors, the access log. Pure ASGI, nothing is buffered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.api.anthropic.errors import anthropic_error, is_anthropic
from loraplex.api.context import DataContext, context_of
from loraplex.api.drain import Drain
from loraplex.api.errors import ApiError, from_exception
from loraplex.api.metrics import Metrics, adapter_label
from loraplex.api.openai.parsing import invalid_for
from loraplex.api.outcome import RequestOutcome
from loraplex.control.errors import TenantSuspended
from loraplex.control.history.history import History
from loraplex.control.recent_requests import EndedRequest, RecentRequests
from loraplex.control.usage.records import BASE
from loraplex.http.boundary import ErrorAnswer, ErrorBoundary
from loraplex.http.context import RequestContext
from loraplex.http.edge import AccessLog, Edge
from loraplex.http.errors import ClientGone
from loraplex.http.text import printable

if TYPE_CHECKING:  # it imports OpenTelemetry
    from loraplex.api.tracing.spans import RequestTracing

PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health"})
ADMIN = "/admin/"
"""Below it are the tenants' admin routes."""
MAX_SHOWN = 80
"""Characters of a route or a model that a client named."""


class DataEdge(Edge):
    """The outermost layer: gives each request its context and id, logs it when it is over, and makes its spans."""

    CONTEXT = DataContext

    def __init__(
        self,
        app: ASGIApp,
        drain: Drain,
        metrics: Metrics,
        access_log: AccessLog | None = None,
        tracing: RequestTracing | None = None,
        history: History | None = None,
        recent: RecentRequests | None = None,
    ) -> None:
        super().__init__(app, PROBES, access_log)
        self._drain = drain
        self._metrics = metrics
        self._tracing = tracing
        self._history = history
        self._recent = recent

    def began(self, scope: Scope, context: RequestContext) -> None:
        assert isinstance(context, DataContext)
        context.is_anthropic = is_anthropic(scope["path"])
        if self._tracing is None:
            return
        trace = self._tracing.begin(scope["method"], scope["path"], scope["headers"], context.started)
        if trace is not None:
            context.trace, context.trace_id = trace, trace.trace_id

    def add_headers(self, headers: MutableHeaders, context: RequestContext) -> None:
        assert isinstance(context, DataContext)
        if self._drain.draining:
            headers["connection"] = "close"
        if context.is_anthropic:
            headers["request-id"] = context.label
        if context.trace is not None:
            headers["traceresponse"] = context.trace.response_header

    def about(self, context: RequestContext) -> dict[str, Any]:
        """Names are escaped by the JSON of the log."""
        assert isinstance(context, DataContext)
        return {
            "request_id": context.label,
            "id": context.internal_id,
            "model": context.model and printable(context.model, 256),
            "version": adapter_label(context.adapter) if context.resolved else None,
            "prompt_tokens": context.prompt_tokens,
            "completion_tokens": context.completion_tokens,
        }

    def ended(self, scope: Scope, context: RequestContext) -> None:
        assert isinstance(context, DataContext)
        if context.status is not None and scope["path"] not in PROBES:
            self._metrics.responded(context.status)
        if context.principal is not None and context.status is not None and context.resolved:
            self._metrics.request_answered(context.tenant_id, context.adapter, context.status)
        is_counted = scope["path"] in PROBES or context.is_counted
        if self._history is not None and not is_counted:
            context.count_in(self._history, context.status)
        if context.trace is not None:
            context.trace.end(
                request_id=context.label,
                internal_id=context.internal_id,
                principal=context.principal,
                model=context.model,
                adapter=context.adapter,
                resolved=context.resolved,
                prompt_tokens=context.prompt_tokens,
                completion_tokens=context.completion_tokens,
                status=context.status,
                outcome=context.outcome,
            )
        if self._recent is not None and not is_counted and _is_kept(scope["path"], context):
            self._recent.note(_ended(scope["path"], context))


def _is_kept(path: str, context: DataContext) -> bool:
    """Whether it is a request to the data plane with a key, or with a secret that is none, or one that was refused or
    failed before its caller was known."""
    is_told = context.status == 401 or (context.status or 0) >= 500 or context.outcome == TenantSuspended.code
    return (context.principal is not None or is_told) and not path.startswith(ADMIN)


def _ended(path: str, context: DataContext) -> EndedRequest:
    found, adapter, principal = context.generated or RequestOutcome(""), context.adapter, context.principal
    timings = [one.timing for one in found.sequences if one.timing is not None]
    loads = [timing.adapter_s for timing in timings if timing.adapter_s is not None]
    first, asked = found.first_token_at, None if context.resolved else context.model
    known = BASE if adapter is None else adapter.name
    return EndedRequest(
        label=context.label,
        id=context.internal_id,
        at=time.time(),
        tenant_id=context.tenant_id,
        key_id=(principal and principal.key_id) or "",
        route=printable(path, MAX_SHOWN),
        model=asked and printable(asked, MAX_SHOWN),
        adapter=known if context.resolved else None,
        version=0 if adapter is None else adapter.version,
        status=context.status,
        code=context.outcome,
        total_s=time.monotonic() - context.started,
        queue_s=found.queue_s if timings else None,
        load_s=max(loads, default=None),
        first_token_s=None if first is None else first - context.started,
        prompt_tokens=found.usage.prompt_tokens,
        cached_tokens=found.usage.cached_tokens,
        completion_tokens=found.usage.completion_tokens,
        trace_id=context.trace_id,
    )


class DataErrors(ErrorBoundary):
    """Takes requests in, or refuses them while the server drains, and answers what `app` raises: in OpenAI's shape, or
    in Anthropic's below `/v1/messages`."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics) -> None:
        super().__init__(app, structlog.get_logger("loraplex.api"))
        self._drain = drain
        self._metrics = metrics

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await super().run(scope, receive, send)
            return
        with self._drain.admitted(), self._metrics.in_flight.track_inprogress():
            await super().run(scope, receive, send)

    def refusal(self, error: Exception) -> ApiError:
        if isinstance(error, RequestValidationError):
            problem: ErrorDetails = error.errors()[0]
            # Its `loc` begins with the part of the request: query, path, header.
            return invalid_for({**problem, "loc": problem["loc"][1:]})
        return from_exception(error)

    async def answer(self, refusal: ErrorAnswer, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        if context.is_anthropic and isinstance(refusal, ApiError):
            await anthropic_error(refusal, context.label)(scope, receive, send)
        else:
            await super().answer(refusal, scope, receive, send)

    def client_gone(self, scope: Scope, context: RequestContext, gone: ClientGone) -> None:
        """Log a request whose client has gone: a refusal is the client's, a failure is ours."""
        context.outcome = str(gone) or "gone"
        self._metrics.stream_cut(context.outcome)
        if isinstance(gone.__cause__, Exception):
            before = context.outcome
            if self.note(scope, gone.__cause__).status == 500:
                context.outcome, context.param = before, None

    def refused(self, context: RequestContext, refusal: ErrorAnswer) -> None:
        assert isinstance(context, DataContext)
        if refusal.status == 429:
            self._metrics.refused_by_limit(context.tenant_id, refusal.code)
