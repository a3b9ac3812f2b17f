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

from loraplex.control.types import Principal

Access = Literal["operator", "adapters:read", "adapters:write"]
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

    def query(self, kind: type[Q]) -> Q:
        assert isinstance(self.query_model, kind)
        return self.query_model

    def body(self, kind: type[Q]) -> Q:
        assert isinstance(self.body_model, kind)
        return self.body_model


@dataclass(frozen=True)
class Answer:
    """`content` None is an answer without a body. `headers` are added."""

    content: BaseModel | None = None
    status: int = 200
    headers: Mapping[str, str] | None = None


Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True)
class Operation:
    """`path` is below /admin/v1. `answers` are the statuses and models of success. A row with `upload` reads its
    body itself. With `body_optional` no body stands for an empty object."""

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

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def path_parameters(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]
