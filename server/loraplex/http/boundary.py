"""The layer that answers what routes raise, so that no answer has the framework's shape."""

from __future__ import annotations

from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.http.context import RequestContext, context_of
from loraplex.http.errors import ClientGone, MethodNotAllowed, PathUnknown
from loraplex.http.routing import allowed_methods


class ErrorAnswer(Protocol):
    """A plane's error answer."""

    @property
    def status(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def param(self) -> str | None: ...
    def response(self) -> Response: ...


class ErrorBoundary:
    """Subclasses say which answer an error is. An unexpected error is a 500 that reveals no internals and is logged
    with the request's id."""

    def __init__(self, app: ASGIApp, log: Any) -> None:
        """`log` is a structlog logger."""
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("app", self)  # so that a bare router raises instead of answering in plain text
        context = context_of(scope)
        try:
            await self.run(scope, receive, send)
        except ClientGone as gone:
            self.client_gone(scope, context, gone)
        except Exception as error:
            refusal = self.note(scope, error)
            if context.status is None:
                await self.answer(refusal, scope, receive, send)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers the request; what it raises is answered too."""
        await self._app(scope, receive, send)

    def refusal(self, error: Exception) -> ErrorAnswer:
        """The answer for an error: one of a lower layer, of `loraplex.http.errors`, or a RequestValidationError."""
        raise NotImplementedError

    def client_gone(self, scope: Scope, context: RequestContext, gone: ClientGone) -> None:
        """Called where the client is gone."""

    def refused(self, context: RequestContext, refusal: ErrorAnswer) -> None:
        """Called for each refusal."""

    def note(self, scope: Scope, error: Exception) -> ErrorAnswer:
        """The answer for an error that ended a request. Logs it, and notes its code for access log and metrics."""
        context = context_of(scope)
        refusal = self.refusal(_from_framework(scope, error))
        if refusal.status == 500:
            self._log.error(
                "request_failed",
                request_id=context.label,
                id=context.internal_id,
                method=scope["method"],
                path=scope["path"][:256],
                exc_info=error,
            )
        context.outcome, context.param = refusal.code, refusal.param
        self.refused(context, refusal)
        return refusal

    async def answer(self, refusal: ErrorAnswer, scope: Scope, receive: Receive, send: Send) -> None:
        await refusal.response()(scope, receive, send)


def _from_framework(scope: Scope, error: Exception) -> Exception:
    """Maps an error of the framework's router to ours."""
    if not isinstance(error, HTTPException):
        return error
    method, path = scope["method"], scope["path"]
    if error.status_code == 405:
        return MethodNotAllowed(method, path, allowed_methods(scope, error))
    return PathUnknown(method, path)
