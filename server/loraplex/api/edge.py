"""Around all routes: ids, draining, errors, the access log. Pure ASGI, nothing is buffered."""

from __future__ import annotations

import time

import structlog
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.api.context import PRINCIPAL, REFUSAL, RequestContext, context_of, new_context
from loraplex.api.deps import AccessLog
from loraplex.api.drain import Drain
from loraplex.api.errors import ApiError, ClientGone, from_exception, method_not_allowed, not_found
from loraplex.api.metrics import Metrics, adapter_label
from loraplex.api.parsing import printable

PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health"})

log = structlog.get_logger("loraplex.api")


class Edge:
    """The outermost layer: gives each request its context and id, logs it when it is over."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics, access_log: AccessLog) -> None:
        self._app = app
        self._drain = drain
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        context = new_context(scope["headers"], send)
        context.attach(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.label
                if self._drain.draining:
                    headers["connection"] = "close"
            await send(message)

        # What is logged on the way, here or behind another app's own edge, can be found by the answer's id.
        with structlog.contextvars.bound_contextvars(request_id=context.label, id=context.internal_id):
            try:
                await self._app(scope, receive, send_with_headers)
            finally:
                if context.principal is None:
                    context.principal = scope.get(PRINCIPAL)
                if context.outcome is None:
                    context.outcome, context.param = scope.get(REFUSAL, (None, None))
                if scope["path"] not in PROBES:
                    self._log(scope, context)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's start and stop have nothing to do here; there are no websockets."""
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def _log(self, scope: Scope, context: RequestContext) -> None:
        """Names are escaped by the JSON of the log; prompts, answers and keys are not in it."""
        principal = context.principal
        if principal is not None and context.status is not None and context.resolved:
            self._metrics.request_answered(context.tenant_id, context.adapter, context.status)
        self._access_log.info(
            "request",
            request_id=context.label,
            id=context.internal_id,
            method=scope["method"],
            path=scope["path"][:256],
            tenant=principal and principal.tenant_id,
            key=principal and principal.key_id,
            model=context.model and printable(context.model, 256),
            version=adapter_label(context.adapter) if context.resolved else None,
            status=context.status,
            outcome=context.outcome,
            param=context.param and printable(context.param),
            ms=round((time.monotonic() - context.started) * 1000, 1),
            prompt_tokens=context.prompt_tokens,
            completion_tokens=context.completion_tokens,
        )


class Errors:
    """Takes requests in, or refuses them while the server drains, and answers what `app` raises in OpenAI's
    shape; what nobody foresaw is a 500 that tells nothing of the inside and is logged with the request's id."""

    def __init__(self, app: ASGIApp, drain: Drain, metrics: Metrics) -> None:
        self._app = app
        self._drain = drain
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        scope["app"] = self  # so that the router raises instead of answering in plain text
        try:
            if scope["path"] in PROBES:
                await self._app(scope, receive, send)
                return
            with self._drain.admitted(), self._metrics.in_flight.track_inprogress():
                await self._app(scope, receive, send)
        except ClientGone as gone:
            context.outcome = str(gone) or "gone"
            self._metrics.stream_cut(context.outcome)
            if gone.__cause__ is not None:
                self._unread(context, gone.__cause__)
        except HTTPException as error:
            await self._send(_from_framework(scope, error), scope, receive, send)
        except Exception as error:
            answer = from_exception(error)
            if answer.status == 500:
                log.error("request_failed", request_id=context.label, id=context.internal_id, exc_info=error)
            await self._send(answer, scope, receive, send)

    def _unread(self, context: RequestContext, error: BaseException) -> None:
        """What nobody is left to be told: a refusal is the client's, a failure is ours."""
        answer = from_exception(error)
        if answer.status == 500:
            log.error("request_failed", request_id=context.label, id=context.internal_id, exc_info=error)
        else:
            self._refused(context, answer)

    def _refused(self, context: RequestContext, error: ApiError) -> None:
        context.outcome, context.param = error.code, error.param
        if error.status == 429:
            self._metrics.refused_by_limit(context.tenant_id, error.code)

    async def _send(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        self._refused(context, error)
        if context.status is None:
            await error.response()(scope, receive, send)


def _from_framework(scope: Scope, error: HTTPException) -> ApiError:
    if error.status_code == 405:
        allow = ", ".join(sorted(part.strip() for part in (error.headers or {}).get("Allow", "").split(",")))
        return method_not_allowed(scope["method"], scope["path"], allow)
    return not_found(scope["method"], scope["path"])
