"""The routes of an application, as its own table has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Mount, Route, Router

from loraplex.http.routing import OrderedRoute


def routes_of(app: Any, prefix: str = "") -> Iterator[tuple[str, Route]]:
    """`METHOD /path` and route of every route that an app really has, through its layers and mounts."""
    while not isinstance(app, Router):
        app = app.router if isinstance(app, Starlette) else getattr(app, "_app", None) or app.app
    for route in app.routes:
        if isinstance(route, Mount):
            yield from routes_of(route.app, prefix + route.path)
            continue
        assert isinstance(route, Route), route
        for method in (route.methods or set()) - {"HEAD"}:
            yield f"{method} {prefix}{route.path.replace(':path', '')}", route


def scopes_of(app: Any) -> dict[str, tuple[str, ...]]:
    """The scopes of each route that asks for them by its class; none of one that is open."""
    return {label: route.scopes or () for label, route in routes_of(app) if isinstance(route, OrderedRoute)}
