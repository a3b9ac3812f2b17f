"""The class of every admin route. It authenticates, then authorises, and only then reads the request.

It also has what OpenAPI and the audit log need to know about a route."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

import structlog
from fastapi import Request, Response
from pydantic import BaseModel

from loraplex.adapters.errors import LoraplexError
from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.admin.framework.dependencies import ANY_SCOPE, Audited, actor_of
from loraplex.admin.framework.openapi import PUSH, UPLOAD, refused
from loraplex.admin.framework.strict_request import check_names, check_query, read_json, refuse_body
from loraplex.admin.problem import Problem, from_exception
from loraplex.admin.schemas.fields import QueryParameters, RequestBody
from loraplex.control.audit.recorder import Actor
from loraplex.control.errors import DatabaseBusy, DatabaseUnavailable, TenantNotFound
from loraplex.control.types import Principal
from loraplex.http.bearer import bearer_secret
from loraplex.http.context import context_of
from loraplex.http.errors import ClientGone
from loraplex.http.routing import NO_BODY, OrderedRoute

Authenticate = Callable[[str], Awaitable[Principal]]
NoteRefusal = Callable[[Actor, str, str, Mapping[str, str], Problem], Awaitable[None]]
"""Records a refused call of a changing route by a caller with a valid secret: the actor, the action, the route's path
and its parameters, the answer. Raises LoraplexError if it cannot be recorded."""

_NOT_NOTED = (ClientGone, DatabaseUnavailable, DatabaseBusy)
"""The client is gone, or the database cannot take another row now."""

log = structlog.get_logger("loraplex.admin")


@dataclass(frozen=True)
class Guard:
    """The checks before a route's function runs: `app.state.guard`."""

    authenticate: Authenticate
    change_limit: ChangeRateLimit
    note_refusal: NoteRefusal
    on_change: Callable[[str], None] = lambda action: None
    """Called with the action of each change that was made."""


class AdminRoute(OrderedRoute):
    """`access` is the scope that it needs, `action` what the audit log calls its change, `template` its path below the
    prefix. The first line of the function's docstring is the summary."""

    access: str
    action: str | None

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.template = path
        self._known: list[str] = []
        self._body: type[BaseModel] | None = None
        self.action = None
        for parameter in inspect.signature(endpoint, eval_str=True).parameters.values():
            self._note_parameter(parameter)
        summary, _, more = inspect.cleandoc(endpoint.__doc__ or "").partition("\n")
        super().__init__(
            path,
            endpoint,
            **options | {"summary": summary, "generate_unique_id_function": lambda route: route.name},
        )
        assert self.scopes, f"{path} has no Security"
        [self.access] = self.scopes
        assert (self.action is None) == (self.method == "GET"), (
            f"{self.label} changes something: name its action"
        )
        self.description = f"{more.strip()}\n\nNeeds {self.needs}.".strip()
        self.responses = refused(*self._statuses()) | self.responses

    def _note_parameter(self, parameter: inspect.Parameter) -> None:
        kind, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        for mark in marks:
            if isinstance(mark, Audited):
                self.action = mark.action
        if isinstance(kind, type) and issubclass(kind, RequestBody):
            self._body, self._optional = kind, parameter.default is not parameter.empty
        elif isinstance(kind, type) and issubclass(kind, QueryParameters):
            self._known = list(kind.model_fields)

    def below(self, prefix: str) -> AdminRoute:
        """The same route with `prefix` before its path."""
        return self.moved(prefix + self.template)

    @property
    def method(self) -> str:
        return next(iter(self.methods or ()))

    @property
    def label(self) -> str:
        """Method and path below the prefix."""
        return f"{self.method} {self.template}"

    @property
    def needs(self) -> str:
        if self.access == "operator":
            return "the admin token"
        if self.access == ANY_SCOPE:
            return "the admin token, or any key"
        return f"the admin token, or a key of the tenant with the scope {self.access}"

    @property
    def _streams(self) -> bool:
        return self.openapi_extra is UPLOAD or self.openapi_extra is PUSH

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        guard: Guard = request.app.state.guard
        context = context_of(request.scope)
        principal = context.principal = await guard.authenticate(bearer_secret(request.scope))
        check_names(request)
        if self.action is not None and principal.tenant_id is not None:
            guard.change_limit.charge_change(principal.tenant_id)
        try:
            self._authorise(principal, request.path_params.get("tenant"))
            check_query(request, self._known)
            yield await self._read_body(request)
        except Exception as error:
            if self.action is not None and context.status is None and not isinstance(error, _NOT_NOTED):
                await self._note(guard, actor_of(request, principal), request, from_exception(error))
            raise
        if self.action is not None:
            guard.on_change(self.action)

    def _authorise(self, principal: Principal, tenant: str | None) -> None:
        if principal.is_admin:
            return
        if tenant is not None and tenant != principal.tenant_id:
            # The same words as for a tenant that does not exist: a key must not learn other tenants' ids.
            raise TenantNotFound(f"There is no tenant '{tenant[:80]}'.")
        if self.access == "operator":
            own = f"A key has the routes of its tenant, below /admin/v1/tenants/{principal.tenant_id}."
            raise Problem("insufficient_scope", f"Only the admin token may do this. {own}")
        if self.access not in (ANY_SCOPE, *principal.scopes):
            detail = f"This key lacks the scope {self.access}."
            raise Problem("insufficient_scope", detail, extra={"scope": self.access})

    async def _read_body(self, request: Request) -> Any:
        if self._streams:
            return NO_BODY
        if self._body is None:
            await refuse_body(request)
            return NO_BODY
        body = await read_json(request, self._body, optional=self._optional)
        return NO_BODY if body is None else body

    async def _note(self, guard: Guard, by: Actor, request: Request, problem: Problem) -> None:
        """Records a refused change. The refusal stands also where it cannot be recorded."""
        assert self.action is not None
        try:
            await guard.note_refusal(by, self.action, self.template, request.path_params, problem)
        except LoraplexError as error:
            log.warning("refusal_not_audited", action=self.action, reason=error.message)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response = await handler(request)
            response.headers.setdefault("Cache-Control", "no-store")
            return response

        return handle

    def _statuses(self) -> list[int]:
        """The statuses that a call may be refused with. A GET too may come with a body, and be refused for it."""
        statuses = {400, 401, 403, 408, 413, 415, 500, 503}
        if self.param_convertors:
            statuses.add(404)
        if self.action is not None:
            statuses |= {409, 507}
            if self.access != "operator":
                statuses.add(429)
        return sorted(statuses)
