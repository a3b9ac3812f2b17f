"""Reading a request's body: counted while it arrives, and never waiting for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from loraplex.admin.problem import ClientGone, Problem

SILENCE_S = 30.0
"""How long a client may send nothing of its body."""
MIN_BYTES_PER_S = 4096
"""A body that is always a little late has no more time than one that comes at this pace."""
LEFTOVER_BYTES = 8 << 20
LEFTOVER_S = 2.0
"""What is still read of a body whose request was refused, in bytes and seconds."""


def declared_length(request: Request) -> int | None:
    """The Content-Length, where there is one."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else None


def refuse_encoding(request: Request) -> None:
    """Raises Problem for a compressed body: it would have to be unpacked before it could be counted."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(
            "unsupported_media_type", "Send the body without Content-Encoding.", param="Content-Encoding"
        )


async def chunks(request: Request, *, silence_s: float = SILENCE_S) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ClientGone, and Problem (408) where nothing comes for `silence_s` seconds, or
    where it comes so slowly that it is `silence_s` seconds late. What the server itself does with it does not count."""
    waited, size = 0.0, 0
    while True:
        began = time.monotonic()
        message = await _next(request, min(silence_s, silence_s + size / MIN_BYTES_PER_S - waited), silence_s)
        waited += time.monotonic() - began
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            yield chunk
        if not message.get("more_body", False):
            return


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body. Raises Problem (408, 413, 415), ClientGone."""
    refuse_encoding(request)
    too_large = Problem("request_too_large", f"The body is larger than {max_bytes} bytes.")
    if (declared_length(request) or 0) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in chunks(request):
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _next(request: Request, timeout_s: float, silence_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.receive()
    except TimeoutError:
        detail = (
            f"The body did not arrive in time: it may pause for {silence_s:g} seconds, and has to come at "
            f"{MIN_BYTES_PER_S} bytes a second."
        )
        raise Problem("request_timeout", detail) from None


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
