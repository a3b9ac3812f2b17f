"""A FastAPI application that answers nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from loraplex.http.routing import exact

START_RETRY_S = 5.0
"""The `Retry-After` of a server that starts."""
# Telemetry is configured in our settings, not by other programs' environment variables.
_NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)


def create_app(
    title: str, routes: Iterable[BaseRoute], *, description: str = "", middleware: Sequence[Middleware] = ()
) -> FastAPI:
    """An application with these routes, exactly: no pages, no redirects, no answers of the framework's. What it or a
    route raises goes up to `middleware`, which has to have an ErrorBoundary."""
    app = FastAPI(
        title=title,
        description=description,
        version=version("loraplex"),
        openapi_url=None,
        redirect_slashes=False,
        middleware=middleware,
        exception_handlers={HTTPException: _raise, RequestValidationError: _raise},
        telemetry=_NO_TELEMETRY,
    )
    app.router.routes.extend(routes)
    return app


async def _raise(_: Request, error: Exception) -> NoReturn:
    raise error


def refused_until_started(error: Callable[[], Exception]) -> Route:
    """A route for every path and method, for a server that has not started yet: raises a new `error`."""
    return exact(Route("/{path:path}", _Raises(error)))


class _Raises:
    """An ASGI app, rather than a function, so that the route has every method."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise self._error()
