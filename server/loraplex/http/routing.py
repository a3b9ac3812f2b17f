"""Routes that match whole paths, and that ask who calls before they read what he sends."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Self, TypeVar, get_args

from fastapi import FastAPI, Request, Response
from fastapi.params import Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount, Route, compile_path
from starlette.types import Receive, Scope, Send

from loraplex.control.types import Principal
from loraplex.http.context import context_of

R = TypeVar("R", Mount, Route)
NO_BODY = object()
"""In place of a body, where a route takes none or reads it itself."""
_BODY = "loraplex.body"
_scheme = HTTPBearer(scheme_name="bearer", auto_error=False)


def exact(route: R) -> R:
    """The same route, without two gaps in starlette's patterns: `$` also matches before a line feed at a path's end,
    so that `/v1/models%0A` would be `/v1/models` here and something else to a proxy's rules; and `.` matches no line
    feed, so that a name with one would never reach the app that answers for it."""
    # Private: starlette has no option for how a path is matched, and a class of our own would repeat `matches`.
    pattern = route.path_regex.pattern
    assert pattern.endswith("$"), pattern
    route.path_regex = re.compile(pattern[:-1] + r"\Z", re.DOTALL)
    return route


def allowed_methods(scope: Scope, error: HTTPException) -> list[str]:
    """The methods that the request's path has, sorted. `error` is the router's own word, which knows of one route."""
    app = scope["app"]
    if not isinstance(app, FastAPI):
        return sorted(part.strip() for part in (error.headers or {}).get("Allow", "").split(","))
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


async def caller(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)]
) -> Principal:
    """The caller, for an endpoint's `Annotated[Principal, Security(caller, scopes=[…])]`, or the dependency of one,
    as the route has authenticated it."""
    principal = context_of(request.scope).principal
    assert principal is not None, "the route's `asked` authenticated no caller"
    return principal


class _Asked(Request):
    """A request whose body was read and checked before the framework asks for it."""

    async def body(self) -> bytes:
        return b"" if self.scope[_BODY] is NO_BODY else b"{}"

    async def json(self) -> Any:
        return self.scope[_BODY]


class OrderedRoute(APIRoute):
    """An APIRoute that a plane's subclass opens: `asked` says who calls, what he may, and what he sends, in this order,
    before any of the framework's own work. A route whose endpoint has no `Security` parameter is public. HEAD is
    answered as GET. Add these routes to an application as they are: `include_router` would make others."""

    scopes: tuple[str, ...] | None
    """The scopes that the endpoint needs; None where it is open."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.scopes = _scopes(endpoint)
        if self.scopes is None:
            options["openapi_extra"] = {"security": []} | (options.get("openapi_extra") or {})
        options["strict_content_type"] = False  # whether a body is JSON is asked by `asked`
        super().__init__(path, endpoint, **options)
        exact(self)
        # Private: a dependency of FastAPI's runs after its own work on the request, and no hook runs before.
        self._answer = self.app
        if self.scopes is not None:
            self.app = self._in_order

    def moved(self, path: str) -> Self:
        """The same route at another path with the same parameters. To make one from its endpoint takes ten
        milliseconds."""
        route = copy.copy(self)
        route.path = path
        route.path_regex, route.path_format, route.param_convertors = compile_path(path)
        exact(route)
        if route.scopes is not None:
            route.app = route._in_order
        return route

    def asked(self, request: Request) -> AbstractAsyncContextManager[Any]:
        """Sets the context's principal, then gives the endpoint's body: an object of its model, or NO_BODY. The answer
        is sent within. What is raised before the body is read is answered without it."""
        raise NotImplementedError

    async def _in_order(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.asked(Request(scope, receive, send)) as body:
            scope[_BODY] = body
            await self._answer(scope, receive, send)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.scopes is None:
            return handler

        async def handle(request: Request) -> Response:
            return await handler(_Asked(request.scope, request.receive))

        return handle

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (Match.FULL, child) if match is Match.PARTIAL and self._is_head(scope) else (match, child)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_head(scope):
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)

    def _is_head(self, scope: Scope) -> bool:
        return scope["method"] == "HEAD" and "GET" in (self.methods or ())


def _scopes(endpoint: Callable[..., Any]) -> tuple[str, ...] | None:
    found: list[str] | None = None
    for parameter in inspect.signature(endpoint, eval_str=True).parameters.values():
        for given in (parameter.default, *get_args(parameter.annotation)[1:]):
            if isinstance(given, Security):
                found = [*(found or ()), *(given.scopes or ())]
    return None if found is None else tuple(found)
