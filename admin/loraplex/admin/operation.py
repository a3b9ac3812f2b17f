"""What a route of the admin plane is: a row that says who may call it, what it takes and what it answers.

Routing, authorisation, the checks of query and body, and the OpenAPI document are all made from these rows, so that
none of them can be forgotten for a new route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from loraplex.control.audit import Actor
from loraplex.control.types import Principal

REQUEST_ID = "loraplex.request_id"
"""Where the edge that a request came through leaves what its answer's x-request-id says."""
Access = Literal["operator", "adapters:read", "adapters:write", "usage:read"]
"""`operator`: the admin token alone. A scope: also a key of the path's tenant that has it."""

Q = TypeVar("Q", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request that may pass: who calls, the path's parameters, and query and body as the row's types."""

    request: Request
    principal: Principal
    path: Mapping[str, str]
    query_model: BaseModel | None = None
    body_model: BaseModel | None = None

    @property
    def actor(self) -> Actor:
        return actor_of(self.request, self.principal)

    def query(self, kind: type[Q]) -> Q:
        assert isinstance(self.query_model, kind)
        return self.query_model

    def body(self, kind: type[Q]) -> Q:
        assert isinstance(self.body_model, kind)
        return self.body_model


def actor_of(request: Request, principal: Principal) -> Actor:
    """For the audit log."""
    return Actor(
        "admin" if principal.is_admin else "key",
        principal.tenant_id,
        principal.key_id,
        None if request.client is None else request.client.host,
        request.scope.get(REQUEST_ID),
    )


@dataclass(frozen=True)
class Answer:
    """`content` None is an answer without a body, unless it has a `text` of `media_type`. `headers` are added. A
    `response` is sent as it is."""

    content: BaseModel | None = None
    status: int = 200
    headers: Mapping[str, str] | None = None
    text: str | None = None
    media_type: str | None = None
    response: Response | None = None


Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True)
class Operation:
    """`path` is below /admin/v1. `answers` are the statuses and models of success. `action` is what the audit log calls
    it: what changes something has one, and records it in the transaction that does. A row with `upload` reads its body
    itself. With `body_optional` no body stands for an empty object. `also_as` is a media type that its answers come
    in, too, where the caller asks for it. Answers of an `etagged` row carry an ETag, and a change heeds If-Match. One
    with a `file_type` answers with a file of that media type."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    access: Access
    handler: Handler
    summary: str
    answers: Mapping[int, type[BaseModel] | None]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    body_optional: bool = False
    upload: bool = False
    action: str | None = None
    also_as: str | None = None
    etagged: bool = False
    file_type: str | None = None

    def __post_init__(self) -> None:
        assert (self.action is None) == (self.method == "GET"), (
            f"{self.name} changes something: name its action"
        )

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def path_parameters(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
