"""The JSON body of a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope

from loraplex.api.codec import InvalidJson, loads
from loraplex.api.errors import ApiError, invalid
from loraplex.http.body import read_body

_JSON = re.compile(rb"\s*application/([\w.+-]+\+)?json\s*(;.*)?", re.ASCII | re.DOTALL | re.IGNORECASE)


def parse_json(body: bytes) -> Any:
    """Raises ApiError (400)."""
    try:
        return loads(body)
    except InvalidJson as error:
        raise invalid(None, f"The body is not valid JSON: {error}.") from None


async def read_json(
    scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float, take: Callable[[int], None]
) -> bytes:
    """The text of a JSON body. `timeout_s` is how long the client may send nothing, and may be late; `take` is of
    `TenantCapacity.body`. Raises ApiError (415), and what `loraplex.http.body.read_body` raises."""
    if not _JSON.fullmatch(dict(scope["headers"]).get(b"content-type", b"application/json")):
        why = "The body must be JSON, sent with the header 'Content-Type: application/json'."
        raise ApiError("unsupported_media_type", why, param="Content-Type")
    return await read_body(scope, receive, max_bytes=max_bytes, silence_s=timeout_s, take=take)
