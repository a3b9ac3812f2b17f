"""The two ASGI applications of the admin plane, from one list of operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.admin.edge import Edge
from loraplex.admin.openapi import PREFIX, docs_page, openapi
from loraplex.admin.operation import Operation
from loraplex.admin.pace import Pace
from loraplex.admin.plane import Plane
from loraplex.admin.problem import Problem
from loraplex.admin.refusals import refusals_of
from loraplex.admin.routes.adapters import adapter_operations
from loraplex.admin.routes.archives import archive_operations
from loraplex.admin.routes.audit import audit_operations
from loraplex.admin.routes.engine import engine_operations
from loraplex.admin.routes.keys import key_operations
from loraplex.admin.routes.releases import release_operations
from loraplex.admin.routes.tenants import tenant_operations
from loraplex.admin.routes.usage import usage_operations
from loraplex.admin.routes.versions import version_operations
from loraplex.admin.services import AdminServices
from loraplex.control.errors import InvalidKey
from loraplex.control.types import Principal

START_RETRY_S = 5.0
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}


def create_operations(services: AdminServices) -> list[Operation]:
    """Every route of the admin plane."""
    return [
        *tenant_operations(services),
        *key_operations(services),
        *adapter_operations(services),
        *version_operations(services),
        *archive_operations(services),
        *release_operations(services),
        *audit_operations(services),
        *engine_operations(services),
        *usage_operations(services),
    ]


def create_admin_app(services: AdminServices, extra_routes: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The operators' port: everything under /admin/v1, /openapi.json, /docs, and `extra_routes` (probes, metrics),
    which need no token."""
    operations = create_operations(services)
    document, page = openapi(operations), docs_page(operations)

    async def show_document(_: Request) -> Response:
        return JSONResponse(document)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    pages: list[BaseRoute] = [
        Route("/openapi.json", show_document, methods=["GET"]),
        Route("/docs", show_page, methods=["GET"]),
    ]
    open_routes = list(extra_routes)
    plane = Plane(
        operations,
        services.key_cache.authenticate,
        PREFIX,
        [*pages, *open_routes],
        note_refusal=refusals_of(services),
        pace=services.pace,
    )
    return Edge(plane, quiet=frozenset(route.path for route in open_routes if isinstance(route, Route)))


def create_starting_admin_app(extra_routes: Iterable[BaseRoute] = ()) -> ASGIApp:
    """For the operators' port until the engine is there: `extra_routes`, and a 503 `engine_restarting` for the rest."""
    open_routes = list(extra_routes)
    plane = _starting_plane(open_routes)
    return Edge(plane, quiet=frozenset(route.path for route in open_routes if isinstance(route, Route)))


def create_starting_tenant_app() -> ASGIApp:
    """What stands where `create_tenant_app` will, until the engine is there: a 503 `engine_restarting` for all."""
    return _starting_plane([])


def _starting_plane(open_routes: list[BaseRoute]) -> Plane:
    rest = Route("/{path:path}", _NotYet())
    return Plane([], _nobody, PREFIX, [*open_routes, rest], note_refusal=_no_refusal, pace=Pace())


class _NotYet:
    """An ASGI app, as a route's endpoint of every method."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise Problem("engine_restarting", "The server is starting; try again.", retry_after_s=START_RETRY_S)


async def _nobody(_: str) -> Principal:
    raise InvalidKey("Nobody is known yet.")


async def _no_refusal(*_: object) -> None:
    """There is no operation yet that could be refused."""


def create_tenant_app(services: AdminServices) -> ASGIApp:
    """The routes that a tenant's own key may use, to be mounted at /admin/v1 of the data plane. The admin token is
    not taken there: the operators' secret has no business on the tenants' port."""

    async def authenticate(secret: str) -> Principal:
        principal = await services.key_cache.authenticate(secret)
        if principal.is_admin:
            raise InvalidKey("The admin token works on the admin port only.")
        return principal

    return Plane(
        _tenant_operations(services), authenticate, note_refusal=refusals_of(services), pace=services.pace
    )


def tenant_document(services: AdminServices) -> dict[str, Any]:
    """The OpenAPI document of what `create_tenant_app` serves, where it is mounted."""
    return openapi(_tenant_operations(services))


def _tenant_operations(services: AdminServices) -> list[Operation]:
    return [row for row in create_operations(services) if row.access != "operator"]
