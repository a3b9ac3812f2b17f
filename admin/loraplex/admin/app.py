"""The two applications of the admin plane: the operators' port, and what tenants reach on the data port."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from threading import Lock
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from loraplex.admin.framework.boundary import ProblemBoundary
from loraplex.admin.framework.openapi import openapi_document, openapi_page
from loraplex.admin.framework.refusal_audit import audit_refusals
from loraplex.admin.framework.route import AdminRoute, Authenticate, Guard
from loraplex.admin.problem import Problem
from loraplex.admin.routes import OPERATOR_ROUTERS, TENANT_ROUTERS
from loraplex.admin.services import AdminServices
from loraplex.control.errors import InvalidKey
from loraplex.control.types import Principal
from loraplex.http.application import START_RETRY_S, create_app, refused_until_started
from loraplex.http.document_page import PAGE_HEADERS
from loraplex.http.edge import Edge
from loraplex.http.routing import exact

PREFIX = "/admin/v1"
TITLE = "Loraplex admin API"


class AdminEdge(Edge):
    EVENT = "admin_request"


@cache
def tenant_routes(prefix: str = PREFIX) -> tuple[AdminRoute, ...]:
    """The routes that a tenant's own key may use."""
    return _routes(TENANT_ROUTERS, prefix)


@cache
def admin_routes(prefix: str = PREFIX) -> tuple[AdminRoute, ...]:
    """Every route of the admin plane."""
    return (*_routes(OPERATOR_ROUTERS, prefix), *tenant_routes(prefix))


def _routes(routers: Iterable[APIRouter], prefix: str) -> tuple[AdminRoute, ...]:
    return tuple(
        route.below(prefix) for router in routers for route in router.routes if isinstance(route, AdminRoute)
    )


def create_application(routes: Sequence[BaseRoute], guard: Guard, services: AdminServices | None) -> FastAPI:
    """An application of these routes that answers all its errors as problem documents. `services` are for the functions
    of `loraplex.admin.routes`."""
    app = create_app(TITLE, routes, middleware=[Middleware(ProblemBoundary)])
    app.state.guard, app.state.services = guard, services
    return app


def create_admin_app(services: AdminServices, extra_routes: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The operators' port: everything under /admin/v1, /openapi.json, /docs, and `extra_routes` (probes, metrics),
    which need no token."""

    # Made once, by the first request, in its worker thread: it would block the event loop for too long.
    making = Lock()

    @cache
    def make() -> tuple[bytes, str]:
        document = openapi_document(app)
        return bytes(JSONResponse(document).body), openapi_page(document)

    def documents() -> tuple[bytes, str]:
        with making:
            return make()

    def show_document(_: Request) -> Response:
        return Response(documents()[0], media_type="application/json")

    def show_page(_: Request) -> Response:
        return HTMLResponse(documents()[1], headers=PAGE_HEADERS)

    routes = [
        *admin_routes(),
        exact(Route("/openapi.json", show_document, methods=["GET"])),
        exact(Route("/docs", show_page, methods=["GET"])),
        *(open_routes := list(extra_routes)),
    ]
    app = create_application(routes, _guard(services, services.key_cache.authenticate), services)
    return AdminEdge(app, quiet=_paths(open_routes))


def create_tenant_app(services: AdminServices) -> ASGIApp:
    """The routes that a tenant's own key may use, to be mounted at /admin/v1 of the data plane. The admin token is
    refused there, so that the operators' secret is never sent to the tenants' port."""

    async def authenticate(secret: str) -> Principal:
        principal = await services.key_cache.authenticate(secret)
        if principal.is_admin:
            raise InvalidKey("The admin token works on the admin port only.")
        return principal

    return create_application(tenant_routes(prefix=""), _guard(services, authenticate), services)


def tenant_document() -> dict[str, Any]:
    """The OpenAPI document of what `create_tenant_app` serves, where it is mounted."""
    return openapi_document(create_app(TITLE, tenant_routes()))


def create_starting_admin_app(extra_routes: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The operators' port until the engine is ready: `extra_routes`, and a 503 `engine_restarting` for the rest."""
    open_routes = list(extra_routes)
    app = create_app(
        TITLE, [*open_routes, refused_until_started(_starting)], middleware=[Middleware(ProblemBoundary)]
    )
    return AdminEdge(app, quiet=_paths(open_routes))


def create_starting_tenant_app() -> ASGIApp:
    """In place of `create_tenant_app` until the engine is ready: a 503 `engine_restarting` for all."""
    return create_app(TITLE, [refused_until_started(_starting)], middleware=[Middleware(ProblemBoundary)])


def _guard(services: AdminServices, authenticate: Authenticate) -> Guard:
    return Guard(authenticate, services.change_limit, audit_refusals(services), services.on_change)


def _starting() -> Problem:
    return Problem("engine_restarting", "The server is starting; try again.", retry_after_s=START_RETRY_S)


def _paths(routes: Iterable[BaseRoute]) -> frozenset[str]:
    return frozenset(route.path for route in routes if isinstance(route, Route))
