"""The data plane as one ASGI app."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.api.codec import dumps
from loraplex.api.deadline import HEADER as DEADLINE_HEADER
from loraplex.api.deps import ApiServices
from loraplex.api.drain import Drain
from loraplex.api.edge import Edge, Errors
from loraplex.api.endpoints import CHAT, COMPLETION, GenerationEndpoint
from loraplex.api.errors import ApiError
from loraplex.api.metrics import Metrics, MetricsApp
from loraplex.api.models_routes import models_routes
from loraplex.api.openapi import openapi
from loraplex.api.places import Places
from loraplex.api.probes import probe_routes
from loraplex.api.routing import exact
from loraplex.serving.client import EngineClient

START_RETRY_S = 5.0
EXPOSED_HEADERS = (
    "x-request-id",
    "x-loraplex-adapter",
    "x-loraplex-adapter-state",
    "retry-after",
    "x-should-retry",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)


def create_data_app(
    services: ApiServices,
    *,
    extra_routes: Sequence[BaseRoute] = (),
    extra_document: Mapping[str, Any] | None = None,
) -> ASGIApp:
    """The app for the data port. `extra_routes` (the tenants' own admin routes) are served beside ours and
    make their own error answers, but for a path that none of them has; `extra_document` is their OpenAPI document."""
    places = Places(
        max_in_flight=services.drain.max_in_flight,
        max_kept_logprobs=services.max_kept_logprobs,
        threads=services.tokenizer_threads,
    )
    routes: list[Route] = [
        Route("/v1/chat/completions", GenerationEndpoint(services, CHAT, places), methods=["POST"]),
        Route("/v1/completions", GenerationEndpoint(services, COMPLETION, places), methods=["POST"]),
        *models_routes(services),
        *probe_routes(
            services.engine,
            services.drain,
            database=services.database,
            usage_failure=services.usage_failure,
        ),
        _fixed_route("/version", {"version": version("loraplex")}),
        _fixed_route("/openapi.json", openapi(metrics=services.metrics_on_data_port, extra=extra_document)),
    ]
    if services.metrics_on_data_port:
        scrape = MetricsApp(services.metrics, services.engine, tenant_data=False)
        routes.append(Route("/metrics", scrape, methods=["GET"]))
    router = Router([*map(exact, routes), *extra_routes], redirect_slashes=False)
    app: ASGIApp = Errors(router, services.drain, services.metrics)
    if services.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=services.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id", DEADLINE_HEADER],
            expose_headers=EXPOSED_HEADERS,
        )
    return Edge(app, services.drain, services.metrics, services.access_log)


def create_starting_data_app(
    engine: EngineClient, served_model_name: str, *, extra_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """For the data port until the engine is there: the probes, `extra_routes`, which make their own error answers, and
    a 503 `engine_restarting` for the rest."""
    drain, metrics = Drain(), Metrics(served_model_name)
    rest = exact(Route("/{path:path}", _NotYet()))
    router = Router(
        [*probe_routes(engine, drain, serving=False), *extra_routes, rest], redirect_slashes=False
    )
    return Edge(Errors(router, drain, metrics), drain, metrics, structlog.get_logger("loraplex.access"))


class _NotYet:
    """An ASGI app, as a route's endpoint of every method."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise ApiError(
            "engine_restarting", "The server is starting. Please try again.", retry_after_s=START_RETRY_S
        )


def _fixed_route(path: str, document: Mapping[str, Any]) -> Route:
    """Always the same answer, to everybody."""
    body = dumps(document)

    async def show(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return Route(path, show, methods=["GET"])
