"""The routes of an application, as its own table has them, and the access that each of ours asks for."""

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


OPEN, ANY, INFER, OPERATOR = "open", "any", "inference", "operator"
READ, WRITE, TRAIN, USAGE = "adapters:read", "adapters:write", "adapters:train", "usage:read"

TINKER = (
    *(
        f"POST /api/v1/{call}"
        for call in (
            "asample",
            "retrieve_future",
            "cancel_future",
            "create_session",
            "session_heartbeat",
            "sessions/{session_id}/finish",
            "create_sampling_session",
            "client/config",
            "client/dynamic_config",
            "telemetry",
        )
    ),
    *(f"GET /api/v1/{path}" for path in ("samplers/{sampler_id}", "get_server_capabilities", "healthz")),
)
TRAINED = ("POST /api/v1/{verb}",)
"""Verbs of training, which are refused by name, and are not in the document."""
OWN = "/admin/v1/tenants/{tenant}/adapters"
TENANT_ROUTES = {
    "GET /admin/v1/caller": ANY,
    f"GET {OWN}": READ,
    f"GET {OWN}/{{name}}": READ,
    f"DELETE {OWN}/{{name}}": WRITE,
    f"PATCH {OWN}/{{name}}": WRITE,
    f"POST {OWN}/{{name}}/versions": WRITE,
    f"GET {OWN}/{{name}}/versions": READ,
    f"GET {OWN}/{{name}}/versions/{{version}}": READ,
    f"GET {OWN}/{{name}}/versions/{{version}}/archive": READ,
    f"DELETE {OWN}/{{name}}/versions/{{version}}": WRITE,
    f"PUT {OWN}/{{name}}/versions/{{version}}/pin": WRITE,
    f"DELETE {OWN}/{{name}}/versions/{{version}}/pin": WRITE,
    f"GET {OWN}/{{name}}/release": READ,
    f"POST {OWN}/{{name}}/versions/{{version}}/agreement": TRAIN,
    f"PUT {OWN}/{{name}}/release": WRITE,
    f"POST {OWN}/{{name}}/release/promote": WRITE,
    f"POST {OWN}/{{name}}/release/rollback": WRITE,
    **dict.fromkeys((f"POST {OWN}/{{name}}/release/{act}" for act in ("pause", "resume")), WRITE),
    f"GET {OWN}/{{name}}/release/comparison": READ,
    f"GET {OWN}/{{name}}/release/shadow/texts": READ,
    f"GET {OWN}/{{name}}/release/history": READ,
    f"GET {OWN}/{{name}}/series": READ,
    f"PUT {OWN}/{{name}}/series": WRITE,
    f"DELETE {OWN}/{{name}}/series": WRITE,
    f"POST {OWN}/{{name}}/series/versions": TRAIN,
    "GET /admin/v1/tenants/{tenant}": USAGE,
    "GET /admin/v1/tenants/{tenant}/usage": USAGE,
    "GET /admin/v1/tenants/{tenant}/history": USAGE,
    "GET /admin/v1/tenants/{tenant}/requests": USAGE,
}
PROBES = dict.fromkeys(("GET /livez", "GET /readyz", "GET /startupz", "GET /health"), OPEN)
CONSOLE_FILES = "GET /console/{file}"
DATA: dict[str, str] = {
    "GET /console": OPEN,
    CONSOLE_FILES: OPEN,
    "POST /v1/chat/completions": INFER,
    "POST /v1/completions": INFER,
    "POST /v1/embeddings": INFER,
    **dict.fromkeys((f"POST {path}" for path in ("/classify", "/v1/classify", "/score", "/v1/score")), INFER),
    **dict.fromkeys((f"POST {path}" for path in ("/v1/rerank", "/rerank", "/v2/rerank")), INFER),
    "POST /v1/responses": INFER,
    "POST /v1/responses/compact": INFER,
    "POST /v1/messages": INFER,
    "POST /v1/messages/count_tokens": INFER,
    **dict.fromkeys(TINKER, INFER),
    **dict.fromkeys(TRAINED, INFER),
    "POST /v1/files": INFER,
    "GET /v1/files": INFER,
    "GET /v1/files/{id}": INFER,
    "DELETE /v1/files/{id}": INFER,
    "GET /v1/files/{id}/content": INFER,
    "POST /v1/batches": INFER,
    "GET /v1/batches": INFER,
    "GET /v1/batches/{id}": INFER,
    "POST /v1/batches/{id}/cancel": INFER,
    "POST /tokenize": INFER,
    "POST /detokenize": INFER,
    "POST /v1/load_lora_adapter": WRITE,
    "POST /skyrl/v1/load_lora_adapter": WRITE,
    "POST /v1/unload_lora_adapter": WRITE,
    "GET /v1/models": INFER,
    "GET /v1/models/{id}": INFER,
    "GET /metrics": OPEN,
    "GET /openapi.json": OPEN,
    "GET /docs": OPEN,
    "GET /version": OPEN,
    **PROBES,
    **TENANT_ROUTES,
}
ADMIN: dict[str, str] = {
    "GET /": OPEN,
    CONSOLE_FILES: OPEN,
    "POST /admin/v1/tenants": OPERATOR,
    "GET /admin/v1/tenants": OPERATOR,
    "PATCH /admin/v1/tenants/{tenant}": OPERATOR,
    "DELETE /admin/v1/tenants/{tenant}": OPERATOR,
    "GET /admin/v1/tenants/{tenant}/erasure": OPERATOR,
    "POST /admin/v1/tenants/{tenant}/keys": OPERATOR,
    "GET /admin/v1/tenants/{tenant}/keys": OPERATOR,
    "PATCH /admin/v1/tenants/{tenant}/keys/{key}": OPERATOR,
    "POST /admin/v1/tenants/{tenant}/keys/{key}/rotate": OPERATOR,
    "DELETE /admin/v1/tenants/{tenant}/keys/{key}": OPERATOR,
    "GET /admin/v1/audit": OPERATOR,
    "GET /admin/v1/audit/verify": OPERATOR,
    "GET /admin/v1/usage": OPERATOR,
    "GET /admin/v1/history": OPERATOR,
    "GET /admin/v1/requests": OPERATOR,
    "GET /admin/v1/engine": OPERATOR,
    "GET /admin/v1/engine/experts": OPERATOR,
    "GET /admin/v1/adapters": OPERATOR,
    "GET /admin/v1/cache": OPERATOR,
    "GET /admin/v1/cluster": OPERATOR,
    "GET /admin/v1/needs": OPERATOR,
    "POST /admin/v1/cluster/replicas/{replica}/drain": OPERATOR,
    "DELETE /admin/v1/cluster/replicas/{replica}/drain": OPERATOR,
    "GET /admin/v1/batches": OPERATOR,
    "POST /admin/v1/batches/{batch}/cancel": OPERATOR,
    "GET /metrics": OPEN,
    "GET /openapi.json": OPEN,
    "GET /docs": OPEN,
    **PROBES,
    **TENANT_ROUTES,
}
CONSOLE = {"GET /console", CONSOLE_FILES}
"""Routes of the data port that are for browsers, not in its document."""
