"""The middleware around the admin routes. It turns what they raise into problem documents."""

from __future__ import annotations

import asyncio

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.admin.problem import Problem, from_exception
from loraplex.http.boundary import ErrorAnswer, ErrorBoundary
from loraplex.http.context import RequestContext, context_of
from loraplex.http.errors import PathUnknown

LEFTOVER_BYTES = 8 << 20
LEFTOVER_S = 2.0
"""How much of a refused request's body is still read, in bytes and seconds."""
LEFTOVER_STRANGERS = 64
"""Refused requests without a valid key whose bodies are read at a time. On the data port each holds a place among the
requests in flight."""
_BODY = "loraplex.watched_body"

log = structlog.get_logger("loraplex.admin")


class ProblemBoundary(ErrorBoundary):
    """Answers with problem documents. It reads the rest of a refused body first, within LEFTOVER_BYTES and
    LEFTOVER_S, for at most LEFTOVER_STRANGERS requests of unknown callers at a time."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, log)
        self._strangers = 0

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_BODY] = body = WatchedReceive(scope, receive)
        if not scope["path"].isprintable():
            raise PathUnknown(scope["method"], scope["path"])
        await super().run(scope, body, send)

    def refusal(self, error: Exception) -> Problem:
        return from_exception(error)

    def refused(self, context: RequestContext, refusal: ErrorAnswer) -> None:
        assert isinstance(refusal, Problem)
        if refusal.code in ("storage_full", "storage_unavailable"):
            log.error(refusal.code, reason=refusal.message)

    async def answer(self, refusal: ErrorAnswer, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(refusal, Problem)
        body: WatchedReceive = scope[_BODY]
        if refusal.code != "request_timeout":
            await self._discard_rest(body, is_stranger=context_of(scope).principal is None)
        await refusal.response(close=not body.complete)(scope, receive, send)

    async def _discard_rest(self, body: WatchedReceive, *, is_stranger: bool) -> None:
        if not is_stranger:
            await body.discard_rest()
        elif self._strangers < LEFTOVER_STRANGERS:
            self._strangers += 1
            try:
                await body.discard_rest()
            finally:
                self._strangers -= 1


class WatchedReceive:
    """A server's `receive` that knows whether the whole body was read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = dict(scope["headers"])
        self._receive = receive
        self._asked = False
        self._expects = headers.get(b"expect", b"").lower() == b"100-continue"
        length = headers.get(b"content-length", b"0")
        self.complete = length == b"0" and b"transfer-encoding" not in headers

    async def __call__(self) -> Message:
        self._asked = True
        message = await self._receive()
        self.complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def discard_rest(self) -> None:
        """Read on for a moment and throw away: a client that is still sending would otherwise meet a closed
        connection before it reads why. One that asked first (Expect: 100-continue) has not begun to send."""
        if self._expects and not self._asked:
            return
        seen = 0
        try:
            async with asyncio.timeout(LEFTOVER_S):
                while not self.complete and seen <= LEFTOVER_BYTES:
                    seen += len((await self()).get("body", b""))
        except TimeoutError:
            return
