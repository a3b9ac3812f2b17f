"""Notices that a client has gone, or reads nothing, while its answer is being made.

The server tells of a closed connection through `receive`, also while nothing is being sent. A client that keeps
its connection but reads nothing shows as a `send` that does not return while the connection's buffers do not
shrink: after `stall_s` seconds of that its connection is aborted. Either way the scope is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from starlette.types import Message, Receive, Send

from loraplex.http.context import RequestContext
from loraplex.http.errors import ClientGone
from loraplex.http.unread import unread_bytes

LOOKS = 8
"""How often a client that reads nothing is looked at within the time that it has."""


class ClientWatch:
    """Sends an answer, and watches that it is taken. `reason` is "gone" or "stalled" once the client is lost."""

    def __init__(
        self, receive: Receive, send: Send, send_body: Send, transport: asyncio.WriteTransport | None
    ) -> None:
        self.reason: str | None = None
        self._receive = receive
        self._send = send
        self._send_body = send_body
        self._transport = transport
        self._sending_since: float | None = None
        self._complete = False

    def check(self) -> None:
        """Raises ClientGone if the client is lost. Cancelling does the same, but waits while results come faster
        than the loop turns."""
        if self.reason is not None:
            raise ClientGone(self.reason)

    async def send(self, head: Message) -> None:
        """The answer's head."""
        await self._watched(self._send, head)

    async def send_body(self, body: bytes, *, more: bool = True) -> None:
        """More of the body, after the head."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        await self._watched(self._send_body, message)
        self._complete = not more

    async def _watched(self, send: Send, message: Message) -> None:
        self.check()
        self._sending_since = time.monotonic()
        try:
            await send(message)
        finally:
            self._sending_since = None

    async def until_gone(self, on_lost: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # A server also says "disconnect" once the answer is complete.
        if not self._complete:
            self.reason = self.reason or "gone"
        on_lost()

    def buffered(self) -> int:
        """Bytes that the client has not taken yet."""
        if self._transport is None or self._transport.is_closing():
            return 0
        return unread_bytes(self._transport)

    @property
    def sending_since(self) -> float | None:
        """When the `send` under way began, if there is one."""
        return self._sending_since

    def stall(self) -> None:
        """The client has read nothing for too long: cut its connection."""
        self.reason = "stalled"
        if self._transport is not None:
            self._transport.abort()


class _StallTimer:
    """Looks a few times within `stall_s` seconds. Calls `on_lost` where there was no progress for so long: neither a
    send that ended nor a buffer that shrank."""

    def __init__(self, watch: ClientWatch, stall_s: float, on_lost: Callable[[], None]) -> None:
        self._watch = watch
        self._stall_s = stall_s
        self._on_lost = on_lost
        self._seen: tuple[float, int] | None = None
        self._since = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._look_later()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._stall_s / LOOKS, self._look)

    def _look(self) -> None:
        now, at = time.monotonic(), self._watch.sending_since
        if at is None:
            self._seen = None
        else:
            buffered = self._watch.buffered()
            if self._seen is None or self._seen[0] != at:
                self._since = at
            elif buffered < self._seen[1]:
                self._since = now
            self._seen = (at, buffered)
            if now - self._since >= self._stall_s:
                self._watch.stall()
                self._on_lost()
                return
        self._look_later()

    def cancel(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def watch_client(
    receive: Receive, send: Send, context: RequestContext, stall_s: float
) -> AsyncIterator[ClientWatch]:
    """The block is cancelled, and ClientGone raised after it, when the client is lost. The request's body must
    have been read. What the block raises itself comes out as it is."""
    watch = ClientWatch(receive, send, context.send or send, context.transport)
    error: Exception | None = None
    with anyio.CancelScope() as scope:
        gone = asyncio.create_task(watch.until_gone(scope.cancel))
        stall_timer = _StallTimer(watch, stall_s, scope.cancel)
        try:
            yield watch
        except Exception as raised:
            error = raised
        finally:
            gone.cancel()
            stall_timer.cancel()
    if watch.reason is not None and not isinstance(error, ClientGone):
        raise ClientGone(watch.reason) from error
    if error is not None:
        raise error
