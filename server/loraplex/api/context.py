"""What is known of one HTTP request on its way, for headers, the access log and metrics."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from loraplex.adapters.ref import AdapterRef
from loraplex.api.deadline import NO_DEADLINE, Deadline
from loraplex.control.types import Principal

_KEY = "loraplex.context"
PRINCIPAL = "loraplex.principal"
"""Where an app that is served behind the data plane's edge leaves its caller in the scope, as the admin plane does."""
REFUSAL = "loraplex.refusal"
"""Where it leaves the code and the field (or None) of what it refused."""
REQUEST_ID = "loraplex.request_id"
"""Where such an app finds what the answer's x-request-id will say."""
TRANSPORT = "loraplex.transport"
"""Where such an app finds the server's connection, if it may be cut."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")
MAX_LABEL = 128


@dataclass
class RequestContext:
    """`label` is what `x-request-id` says: the client's own id or one of ours. `internal_id` is unique and
    never chosen by a client; accounting and the engine use it. `started` is of `time.monotonic`."""

    label: str
    internal_id: str
    transport: asyncio.WriteTransport | None
    started: float = field(default_factory=time.monotonic)
    status: int | None = None
    principal: Principal | None = None
    model: str | None = None
    adapter: AdapterRef | None = None
    resolved: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    deadline: Deadline = NO_DEADLINE
    outcome: str | None = None
    """Why the answer ended early, if it did: gone, stalled, or an error's code."""
    param: str | None = None
    """The field that an error names."""

    @property
    def tenant_id(self) -> str:
        return (self.principal and self.principal.tenant_id) or ""

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
        scope[REQUEST_ID] = self.label
        scope[TRANSPORT] = self.transport


def context_of(scope: Scope) -> RequestContext:
    found: RequestContext = scope[_KEY]
    return found


def new_context(headers: list[tuple[bytes, bytes]], send: Any) -> RequestContext:
    """For a request with these headers. `send` is the server's own: uvicorn's leads to the connection, which
    a client that reads nothing is cut by; on other servers such a client is only left."""
    internal_id = uuid.uuid4().hex
    own = next((value for name, value in headers if name == b"x-request-id"), b"")
    label = _UNSAFE.sub("", own[: 4 * MAX_LABEL].decode("latin-1"))[:MAX_LABEL]
    # ASGI has no way from a request to its connection; that `send` is a method of uvicorn's cycle is not documented.
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if not isinstance(transport, asyncio.WriteTransport) and not hasattr(transport, "get_write_buffer_size"):
        transport = None
    return RequestContext(label or f"req-{internal_id}", internal_id, transport)
