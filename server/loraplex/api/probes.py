"""`/livez`, `/startupz`, `/readyz` and `/health`, for both ports."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.codec import dumps
from loraplex.api.drain import Drain
from loraplex.control.outage import DatabaseHealth
from loraplex.serving.client import EngineClient


def probe_routes(
    engine: EngineClient,
    drain: Drain,
    *,
    serving: bool = True,
    database: DatabaseHealth | None = None,
    usage_failure: Callable[[], str | None] = lambda: None,
) -> list[Route]:
    """`/livez`: this process answers. `/startupz`: the engine has been ready once. `/readyz` and `/health`:
    requests are taken now. 200, or 503 with the reason. No token is needed. Not `serving`: only `/livez` is 200,
    whatever the engine says. A database that is gone is a `warning` at 200 while what is remembered serves.
    `usage_failure` says why usage cannot be recorded, for which no request is taken."""
    started = False

    def not_started() -> str | None:
        nonlocal started
        started = started or (serving and engine.healthy)
        return None if started else engine.unhealthy_reason or "the engine is starting"

    def not_ready() -> str | None:
        if drain.draining:
            return "the server is shutting down"
        if engine.healthy:
            return not_started() or (None if database is None else database.failure()) or usage_failure()
        return engine.unhealthy_reason or "the engine is not ready"

    def probe(path: str, reason_against: Callable[[], str | None]) -> Route:
        async def endpoint(_: Request) -> Response:
            reason = reason_against()
            status = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
            warning = database.warning() if database is not None and reason_against == not_ready else None
            if reason is None and warning is not None:
                status["warning"] = warning
            headers = {"cache-control": "no-store"}
            code = 200 if reason is None else 503
            return Response(dumps(status), code, headers, "application/json")

        return Route(path, endpoint, methods=["GET"])

    return [
        probe("/livez", lambda: None),
        probe("/startupz", not_started),
        probe("/readyz", not_ready),
        probe("/health", not_ready),
    ]
