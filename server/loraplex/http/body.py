"""Reading a request's body: counted while it arrives, and never waiting without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from loraplex.http.errors import BodyEncoded, BodyTooLarge, BodyTooSlow, ClientGone

SILENCE_S = 30.0
"""Seconds for which a client may send nothing of its body."""
MIN_BYTES_PER_S = 4096
"""A body that is always a little late has no more time than one that comes at this pace."""


def declared_length(scope: Scope) -> int | None:
    """The Content-Length, where there is one."""
    declared = Headers(scope=scope).get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 20 else None


def refuse_encoding(scope: Scope) -> None:
    """Raises BodyEncoded for a compressed body."""
    if Headers(scope=scope).get("content-encoding", "identity").lower() != "identity":
        raise BodyEncoded


async def chunks(receive: Receive, *, silence_s: float = SILENCE_S) -> AsyncIterator[bytes]:
    """The body as it arrives. What the server itself does between two chunks is not counted as the client's delay.

    Raises ClientGone, and BodyTooSlow where nothing comes for `silence_s` seconds or the body is `silence_s` late.
    """
    waited, size = 0.0, 0
    while True:
        began = time.monotonic()
        left = silence_s + size / MIN_BYTES_PER_S - waited
        try:
            async with asyncio.timeout(min(silence_s, left)):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(silence_s, MIN_BYTES_PER_S) from None
        waited += time.monotonic() - began
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            size += len(chunk)
            yield chunk
        if not message.get("more_body", False):
            return


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    silence_s: float = SILENCE_S,
    take: Callable[[int], None] = lambda num_bytes: None,
) -> bytes:
    """The whole body. `take` hears of the bytes that have come before they are kept. Raises what it raises, and
    BodyEncoded, BodyTooLarge, BodyTooSlow, ClientGone."""
    refuse_encoding(scope)
    if (declared_length(scope) or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    async for chunk in chunks(receive, silence_s=silence_s):
        if len(body) + len(chunk) > max_bytes:
            raise BodyTooLarge(max_bytes)
        take(len(chunk))
        body += chunk
    return bytes(body)
