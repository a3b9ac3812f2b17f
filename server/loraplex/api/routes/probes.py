"""`/livez`, `/startupz`, `/readyz` and `/health`, for both ports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import SkipJsonSchema

from loraplex.api.drain import Drain
from loraplex.control.db.outage import DatabaseHealth
from loraplex.http.routing import OrderedRoute
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.reports import shortage

_HEADERS = {"cache-control": "no-store"}


class Probe(BaseModel):
    """`warning`: what will soon be a failure. `warming`: adapters of before a restart are loaded behind requests."""

    model_config = ConfigDict(extra="forbid")
    status: Literal["ok"]
    warning: str | SkipJsonSchema[None] = None
    warming: Literal[True] | SkipJsonSchema[None] = None


class ProbeFailure(BaseModel):
    model_config = ConfigDict(extra="forbid")
    status: Literal["unavailable"]
    reason: str


def probe_routes(
    engine: Engines,
    drain: Drain,
    *,
    serving: bool = True,
    database: DatabaseHealth | None = None,
    usage_failure: Callable[[], str | None] = lambda: None,
    limits_warning: Callable[[], str | None] = lambda: None,
    in_document: bool = True,
) -> list[OrderedRoute]:
    """`/livez`: this process answers. `/startupz`: the engine has been ready once. `/readyz` and `/health`:
    requests are taken now. 200, or 503 with the reason. No token is needed. Not `serving`: only `/livez` is 200,
    whatever the engine says. A database that is gone is a `warning` at 200 while what is remembered serves, and so are
    engines that are missing, and what `limits_warning` says of limits that servers should share.
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

    def warnings() -> tuple[str | None, ...]:
        return (
            shortage(engine.reports(), engine.num_wanted),
            None if database is None else database.warning(),
            limits_warning(),
        )

    def route(name: str, reason_against: Callable[[], str | None]) -> OrderedRoute:
        async def probe(response: Response) -> Probe | JSONResponse:
            reason = reason_against()
            if reason is not None:
                return JSONResponse(
                    ProbeFailure(status="unavailable", reason=reason).model_dump(), 503, _HEADERS
                )
            response.headers.update(_HEADERS)
            if reason_against != not_ready:
                return Probe(status="ok")
            return Probe(
                status="ok",
                warning="; ".join(filter(None, warnings())) or None,
                warming=True if engine.warming else None,
            )

        return OrderedRoute(
            f"/{name}",
            probe,
            methods=["GET"],
            operation_id=name,
            summary="A probe.",
            response_model=Probe,
            response_model_exclude_none=True,
            responses={503: {"description": "Not now; why.", "model": ProbeFailure}},
            include_in_schema=in_document,
        )

    return [
        route("livez", lambda: None),
        route("startupz", not_started),
        route("readyz", not_ready),
        route("health", not_ready),
    ]
