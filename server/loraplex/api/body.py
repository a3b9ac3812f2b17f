"""Reading a request's body: under a byte cap while it arrives, and never waiting for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio.to_thread
from starlette.types import Receive, Scope

from loraplex.api.codec import InvalidJson, loads
from loraplex.api.errors import ApiError, ClientGone, invalid

INLINE_JSON_BYTES = 64 << 10
"""A body up to so large is parsed on the event loop; a larger one, in a thread."""


async def read_json(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> Any:
    """The body as JSON. Raises ApiError (400, 408, 413) and ClientGone."""
    body = await read_body(scope, receive, max_bytes=max_bytes, timeout_s=timeout_s)
    try:
        if len(body) <= INLINE_JSON_BYTES:
            return loads(body)
        return await anyio.to_thread.run_sync(loads, body)
    except InvalidJson as error:
        raise invalid(None, f"The body is not valid JSON: {error}.") from None


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """`timeout_s` is how long the client may send nothing."""
    headers = dict(scope["headers"])
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise invalid(None, "A compressed body is not supported; send it without Content-Encoding.")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            text = f"The request's body did not arrive: nothing came for {timeout_s:g} seconds."
            raise ApiError("request_timeout", text, headers=(("Connection", "close"),)) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError("request_too_large", f"The request's body is larger than {max_bytes} bytes.")
