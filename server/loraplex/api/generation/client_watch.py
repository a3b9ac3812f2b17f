"""Notices that a client has gone, or reads nothing, while its answer is being made.

The server tells of a closed connection through `receive`, also while nothing is being sent. A client that keeps
its connection but reads nothing shows as a `send` that does not return while the connection's buffers do not
shrink: after `stall_s` seconds of that its connection is aborted. Either way the scope is cancelled.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import anyio
from starlette.types import Message, Receive, Send

from loraplex.http.errors import ClientGone


class ClientWatch:
    """`send` like the server's own, but watched. `reason` is "gone" or "stalled" once the client is lost."""

    def __init__(self, receive: Receive, send: Send, transport: asyncio.WriteTransport | None) -> None:
        self.reason: str | None = None
        self._receive = receive
        self._send = send
        self._transport = transport
        self._sending_since: float | None = None
        self._complete = False

    def check(self) -> None:
        """Raises ClientGone if the client is lost. Cancelling does the same, but waits while results come faster
        than the loop turns."""
        if self.reason is not None:
            raise ClientGone(self.reason)

    async def send(self, message: Message) -> None:
        self.check()
        self._sending_since = time.monotonic()
        try:
            await self._send(message)
        finally:
            self._sending_since = None
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True

    def _buffered(self) -> int:
        """Bytes that the client has not taken yet, here and in the kernel's send queue (which may be megabytes)."""
        if self._transport is None or self._transport.is_closing():
            return 0
        return self._transport.get_write_buffer_size() + _unacknowledged(self._transport)

    async def until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # A server also says "disconnect" once the answer is complete.
        if not self._complete:
            self.reason = self.reason or "gone"

    async def until_stalled(self, stall_s: float) -> None:
        """Looks a few times within `stall_s`; progress is a send that ended or a buffer that shrank."""
        seen: tuple[float, int] | None = None
        since = time.monotonic()
        while True:
            await anyio.sleep(stall_s / 8)
            now = time.monotonic()
            at = self._sending_since
            if at is None:
                seen = None
                continue
            buffered = self._buffered()
            if seen is None or seen[0] != at:
                since = at
            elif buffered < seen[1]:
                since = now
            seen = (at, buffered)
            if now - since >= stall_s:
                break
        self.reason = "stalled"
        if self._transport is not None:
            self._transport.abort()


def _unacknowledged(transport: asyncio.WriteTransport) -> int:
    """SIOCOUTQ of tcp(7); 0 where the system does not tell."""
    connection = transport.get_extra_info("socket")
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (AttributeError, OSError):
        return 0
    return int.from_bytes(answer, sys.byteorder)


@asynccontextmanager
async def watch_client(
    receive: Receive, send: Send, transport: asyncio.WriteTransport | None, stall_s: float
) -> AsyncIterator[ClientWatch]:
    """The block is cancelled, and ClientGone raised after it, when the client is lost. The request's body must
    have been read. What the block raises itself comes out as it is."""
    watch = ClientWatch(receive, send, transport)
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def until(lost: Coroutine[None, None, None]) -> None:
            await lost
            tasks.cancel_scope.cancel()

        tasks.start_soon(until, watch.until_gone())
        tasks.start_soon(until, watch.until_stalled(stall_s))
        try:
            yield watch
        except Exception as raised:  # not through the task group, which would wrap it
            error = raised
        tasks.cancel_scope.cancel()
    if watch.reason is not None and not isinstance(error, ClientGone):
        raise ClientGone(watch.reason) from error
    if error is not None:
        raise error
