"""The outermost layer around all routes: a request's id and its line in the access log. Nothing is buffered."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Protocol

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.http.context import MAX_LABEL, RequestContext
from loraplex.http.text import printable


class AccessLog(Protocol):
    def info(self, event: str, **fields: Any) -> Any: ...


def access_log() -> AccessLog:
    """The log that an access log's lines go to by default."""
    log: AccessLog = structlog.get_logger("loraplex.access")
    return log


class Edge:
    """`x-request-id` of every answer is the client's own, cut to 128 safe characters, or one of ours. Subclasses add
    headers and fields."""

    EVENT: ClassVar[str] = "request"
    CONTEXT: ClassVar[type[RequestContext]] = RequestContext

    def __init__(
        self, app: ASGIApp, quiet: frozenset[str] = frozenset(), log: AccessLog | None = None
    ) -> None:
        """Requests for a path in `quiet` (probes, metrics) are not logged."""
        self._app = app
        self._quiet = quiet
        self._access_log = log or access_log()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _other(scope, receive, send)
            return
        context = self.CONTEXT.of(scope["headers"], send)
        context.attach(scope)
        self.began(scope, context)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = context.label
                self.add_headers(headers, context)
            await send(message)

        # What is logged on the way can be found by the answer's id.
        found = {"request_id": context.label, "id": context.internal_id}
        if context.trace_id is not None:
            found["trace_id"] = context.trace_id
        with structlog.contextvars.bound_contextvars(**found):
            try:
                await self._app(scope, receive, send_with_headers)
            finally:
                self.ended(scope, context)
                if scope["path"] not in self._quiet:
                    self._log(scope, context)

    def began(self, scope: Scope, context: RequestContext) -> None:
        """Called once for each request, before anything is done for it."""

    def add_headers(self, headers: MutableHeaders, context: RequestContext) -> None:
        """Called for each answer's head."""

    def ended(self, scope: Scope, context: RequestContext) -> None:
        """Called once for each request, when its answer has ended."""

    def about(self, context: RequestContext) -> dict[str, Any]:
        """More fields for a request's line in the access log. Prompts, answers and keys are none."""
        return {}

    def _log(self, scope: Scope, context: RequestContext) -> None:
        principal, param = context.principal, context.param
        self._access_log.info(
            self.EVENT,
            method=scope["method"],
            path=scope["path"][:256],
            tenant=principal and principal.tenant_id,
            key=principal and principal.key_id,
            **self.about(context),
            status=context.status,
            outcome=context.outcome,
            param=param and printable(param, MAX_LABEL),
            ms=round((time.monotonic() - context.started) * 1000, 1),
        )


async def _other(scope: Scope, receive: Receive, send: Send) -> None:
    """The server's start and stop have nothing to do here; there are no websockets."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
