"""The outermost layer of the admin port: a request's id and its line in the access log. Nothing is buffered."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.admin.download import TRANSPORT
from loraplex.admin.operation import REQUEST_ID
from loraplex.admin.plane import PRINCIPAL, REFUSAL
from loraplex.control.types import Principal

MAX_LABEL = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")

log = structlog.get_logger("loraplex.access")


class Edge:
    """`x-request-id` of every answer is the client's own, cut to 128 safe characters, or one of ours."""

    def __init__(self, app: ASGIApp, quiet: frozenset[str] = frozenset()) -> None:
        """Requests for a path in `quiet` (probes, metrics) are not logged."""
        self._app = app
        self._quiet = quiet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        label = (
            _UNSAFE.sub("", own[: 4 * MAX_LABEL].decode("latin-1"))[:MAX_LABEL] or f"req-{uuid.uuid4().hex}"
        )
        scope[REQUEST_ID] = label
        scope[TRANSPORT] = getattr(getattr(send, "__self__", None), "transport", None)  # uvicorn's
        started, status = time.monotonic(), None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = label
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=label):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                if scope["path"] not in self._quiet:
                    principal: Principal | None = scope.get(PRINCIPAL)
                    code, param = scope.get(REFUSAL, (None, None))
                    log.info(
                        "admin_request",
                        method=scope["method"],
                        path=scope["path"][:256],
                        tenant=principal and principal.tenant_id,
                        key=principal and principal.key_id,
                        status=status,
                        outcome=code,
                        param=param and "".join(c if c.isprintable() else "?" for c in param[:MAX_LABEL]),
                        ms=round((time.monotonic() - started) * 1000, 1),
                    )
