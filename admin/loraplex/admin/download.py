"""Streams a file to a client that may disconnect or stop reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.http.context import context_of

SEND_BYTES = 64 << 10
STALL_S = 30.0
"""How long a client may take for one piece of `SEND_BYTES`."""
CUT_S = 5.0


class Download(Response):
    """An answer of a known length. `first` has been read already; `read` gives the rest, and raises LoraplexError where
    the file turns out to be unusable: then the connection is cut, so that the client sees an answer that is too short,
    and `on_failure` is called. `close` is called once, whatever happens."""

    def __init__(
        self,
        first: bytes,
        read: Callable[[], Awaitable[bytes]],
        *,
        num_bytes: int,
        headers: Mapping[str, str],
        media_type: str,
        on_failure: Callable[[LoraplexError], Awaitable[None]],
        close: Callable[[], None],
        stall_s: float = STALL_S,
    ) -> None:
        super().__init__(None, 200, {**headers, "Content-Length": str(num_bytes)}, media_type)
        self._first = first
        self._read = read
        self._on_failure = on_failure
        self._close = close
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._until_gone, receive, tasks.cancel_scope)
                if not await self._send_all(send):
                    await _cut(context_of(scope).transport)
                tasks.cancel_scope.cancel()
        finally:
            self._close()

    async def _until_gone(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _send_all(self, send: Send) -> bool:
        """Whether all of it could be sent."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        data = self._first
        while data:
            for start in range(0, len(data), SEND_BYTES):
                try:
                    with anyio.fail_after(self._stall_s):
                        body = data[start : start + SEND_BYTES]
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                except TimeoutError:
                    return False
            try:
                data = await self._read()
            except LoraplexError as error:
                with anyio.CancelScope(shield=True):
                    await self._on_failure(error)
                return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def _cut(transport: asyncio.WriteTransport | None) -> None:
    """Close the connection at once, before the client has read what was written. Servers other than uvicorn cut
    it when they see that the answer was left."""
    if transport is not None:
        transport.abort()
        with anyio.move_on_after(CUT_S):
            await anyio.sleep_forever()  # until the server says that the client is gone
