"""The data plane as one FastAPI application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from loraplex.api.deps import ApiServices
from loraplex.api.documents import DESCRIPTION, Document
from loraplex.api.drain import Drain
from loraplex.api.edge import DataEdge, DataErrors
from loraplex.api.errors import ApiError
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.metrics import Metrics, Scraper
from loraplex.api.routes import models, server
from loraplex.api.routes.batches import batch_routes
from loraplex.api.routes.files import file_routes
from loraplex.api.routes.generation import generation_routes
from loraplex.api.routes.lora_loading import loading_routes
from loraplex.api.routes.messages import count_route
from loraplex.api.routes.metrics import metrics_route
from loraplex.api.routes.probes import probe_routes
from loraplex.api.routes.tinker import tinker_routes
from loraplex.api.routes.tokenizer import tokenizer_routes
from loraplex.http.application import START_RETRY_S, create_app, refused_until_started
from loraplex.http.routing import OrderedRoute
from loraplex.serving.engines.engines import Engines

TITLE = "Loraplex API"
MAX_BODIES = 64
"""Number of bodies of the largest size that all requests may hold together."""
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "traceresponse",
    "x-loraplex-adapter",
    "x-loraplex-adapter-state",
    "x-loraplex-fingerprint",
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
    extra_document: Callable[[], Mapping[str, Any]] | None = None,
) -> ASGIApp:
    """The app for the data port. `extra_routes` (the tenants' own admin routes) are served beside ours and
    make their own error answers, except for a path that none of them has; `extra_document` makes their OpenAPI
    document."""
    capacity = TenantCapacity(
        max_in_flight=services.drain.max_in_flight,
        max_body_bytes=MAX_BODIES * services.max_body,
        max_kept_logprobs=services.max_kept_logprobs,
        threads=services.tokenizer_threads,
    )
    probes = service_probes(services)
    scraper = Scraper(services.metrics, services.engine, tenant_data=False)
    routes: list[BaseRoute] = [
        *generation_routes(services, capacity),
        *tokenizer_routes(capacity),
        count_route(capacity),
        *models.router.routes,
        *file_routes(capacity),
        *batch_routes(capacity),
        *loading_routes(capacity),
        *tinker_routes(services, capacity),
        *probes,
        *server.router.routes,
        *([metrics_route(scraper)] if services.metrics_on_data_port else []),
        *extra_routes,
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=services.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients send many of their own, such as x-stainless-os
        expose_headers=EXPOSED_HEADERS,
    )
    errors = Middleware(DataErrors, services.drain, services.metrics)
    middleware = [cors, errors] if services.cors_origins else [errors]
    app = create_app(TITLE, routes, description=DESCRIPTION, middleware=middleware)
    app.state.services = services
    app.state.document = Document(app, extra_document)
    return DataEdge(
        app,
        services.drain,
        services.metrics,
        services.access_log,
        services.tracing,
        services.history,
        services.recent,
    )


def service_probes(services: ApiServices, *, in_document: bool = True) -> list[OrderedRoute]:
    """The probes of a server with these services, for either port."""
    return probe_routes(
        services.engine,
        services.drain,
        database=services.database_health,
        usage_failure=services.usage_failure,
        limits_warning=services.limits_warning,
        in_document=in_document,
    )


def create_starting_data_app(
    engine: Engines, served_model_name: str, *, extra_routes: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """The data port's application until the engine is there: the probes, `extra_routes`, which make their own error
    answers, and a 503 `engine_restarting` for the rest."""
    drain, metrics = Drain(), Metrics(served_model_name)
    probes = probe_routes(engine, drain, serving=False)
    routes = [*probes, *extra_routes, refused_until_started(_starting)]
    return DataEdge(
        create_app(TITLE, routes, middleware=[Middleware(DataErrors, drain, metrics)]), drain, metrics
    )


def _starting() -> ApiError:
    message = "The server is starting. Please try again."
    return ApiError("engine_restarting", message, retry_after_s=START_RETRY_S)
