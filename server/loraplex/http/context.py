"""The context of one HTTP request, for headers, logs and metrics."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from starlette.types import Scope, Send

from loraplex.control.types import Principal

MAX_LABEL = 128
_KEY = "loraplex.context"
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")


@dataclass
class RequestContext:
    """`label` is what `x-request-id` says: the client's own id or one of ours. `internal_id` is unique and never chosen
    by a client. `transport` is the server's connection, where it can be cut. `send` is the server's own: a body may go
    straight to it once the head has passed all layers, which change heads alone. `started` is of `time.monotonic`."""

    label: str
    internal_id: str
    transport: asyncio.WriteTransport | None
    send: Send | None = None
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    """The answer's status, once its head is sent."""
    principal: Principal | None = None
    outcome: str | None = None
    """Why the answer ended early, if it did: gone, stalled, or an error's code."""
    param: str | None = None
    """The field that an error names."""
    trace_id: str | None = None
    """OpenTelemetry's trace id, 32 hex digits, if the request is recorded."""

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], send: Send | None = None) -> Self:
        """The context of a request with these headers. `send` is the server's own: uvicorn's leads to the
        connection."""
        internal_id = uuid.uuid4().hex
        own = next((value for name, value in headers if name == b"x-request-id"), b"")
        label = _UNSAFE.sub("", own[: 4 * MAX_LABEL].decode("latin-1"))[:MAX_LABEL]
        # ASGI has no way from a request to its connection, and uvicorn does not document that `send` has one.
        transport = getattr(getattr(send, "__self__", None), "transport", None)
        if not isinstance(transport, asyncio.WriteTransport) and not hasattr(
            transport, "get_write_buffer_size"
        ):
            transport = None
        return cls(label or f"req-{internal_id}", internal_id, transport, send)

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self


def context_of(scope: Scope) -> RequestContext:
    """The request's own; one is made where no edge has done so."""
    found: RequestContext | None = scope.get(_KEY)
    if found is None:
        found = RequestContext.of(scope["headers"])
        found.attach(scope)
    return found
