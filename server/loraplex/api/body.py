"""Reading a request's body: under a byte cap while it arrives, and never waiting for ever."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from starlette.types import Receive, Scope

from loraplex.api.codec import InvalidJson, loads
from loraplex.api.errors import ApiError, ClientGone, invalid

_JSON = re.compile(rb"\s*application/([\w.+-]+\+)?json\s*(;.*)?", re.ASCII | re.DOTALL | re.IGNORECASE)
MIN_BYTES_PER_S = 4096
"""A body that is always a little late has no more time than one that comes at this pace."""


def parse_json(body: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        return loads(body)
    except InvalidJson as error:
        raise invalid(None, f"The body is not valid JSON: {error}.") from None


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """`timeout_s` is how long the client may send nothing, and may be late. Raises ApiError (400, 408, 413, 415) and
    ClientGone."""
    headers = dict(scope["headers"])
    if not _JSON.fullmatch(headers.get(b"content-type", b"application/json")):
        why = "The body must be JSON, sent with the header 'Content-Type: application/json'."
        raise ApiError("unsupported_media_type", why, param="Content-Type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise invalid(None, "A compressed body is not supported; send it without Content-Encoding.")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    end = time.monotonic() + timeout_s
    while True:
        left = end + size / MIN_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(min(timeout_s, left)):
                message = await receive()
        except TimeoutError:
            text = (
                f"The request's body did not arrive in time: it may pause for {timeout_s:g} seconds, and has to come "
                f"at {MIN_BYTES_PER_S} bytes a second."
            )
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
