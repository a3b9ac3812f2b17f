"""Requests that the server makes to its own routes, without a socket: lines of batches, and prompts to be scored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog
from starlette.types import Message, Scope

from loraplex.adapters.errors import LoraplexError
from loraplex.api.codec import dumps, loads
from loraplex.api.context import DataContext
from loraplex.api.deadline import HEADER
from loraplex.api.deps import ApiServices
from loraplex.api.errors import ApiError, from_exception
from loraplex.api.generation.endpoints import GenerationEndpoint
from loraplex.api.generation.kinds import COMPLETION
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.control.types import Principal, ResolvedModel, VersionInfo
from loraplex.serving.errors import (
    EngineDraining,
    EngineLost,
    EngineOverloaded,
    EngineUnavailable,
    ScoringRefused,
    ServingError,
)

MAX_IN_FLIGHT = 16
"""Requests at a time, shared by the tenants."""
TIMEOUT_MS = 60_000
_OF_ENGINE: dict[str, type[ServingError]] = {
    kind.code: kind for kind in (EngineDraining, EngineLost, EngineOverloaded)
}
"""Failures of a completion that an engine had taken, or had no room for, by code."""
_PASSING = (408, 429)
"""Statuses from 400 to 499 of what may pass."""

log = structlog.get_logger("loraplex.api")


class Exchange:
    """The client's side of one request: it sends a body, and stays until it has the answer."""

    def __init__(self, request: bytes) -> None:
        self._request: bytes | None = request
        self.status = 500
        self.body = bytearray()

    async def receive(self) -> Message:
        if self._request is None:
            await asyncio.Event().wait()
        body, self._request = self._request, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


class PromptScorer:
    """Scores token ids under one version. Each call is a request to /v1/completions without its socket: limits, usage,
    fair shares and metrics are those of any other."""

    def __init__(self, services: ApiServices) -> None:
        self._services = replace(services, shadows=None)
        self._capacity = TenantCapacity(
            max_in_flight=MAX_IN_FLIGHT,
            max_body_bytes=MAX_IN_FLIGHT * services.max_body,
            max_kept_logprobs=services.max_kept_logprobs,
            threads=1,
        )

    async def __call__(
        self, principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """The natural log probability of each token from the second on, of each prompt of two token ids or more.
        `principal` is charged, whatever its scopes and models are. Raises ScoringRefused for what is refused each time,
        EngineLost where the engine ended while it had the request, EngineUnavailable (EngineDraining) where none takes
        it, EngineOverloaded where all are busy, and ApiError for all else. None names a field of the completion."""
        # Tokens that lack an activated LoRA's invocation are refused: no others are scored, and no other model.
        serving = replace(info.serving, alora=None)
        of_version = ResolvedModel(info.ref(), serving, head=info.head, embedding=info.embedding)
        known = _Known(replace(principal, scopes=frozenset({"inference"})))
        services = replace(self._services, authenticator=known)
        asked = {"model": info.name, "prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 0}
        headers = [
            (b"content-type", b"application/json"),
            (b"authorization", b"Bearer of-this-process"),
            (HEADER.encode(), str(TIMEOUT_MS).encode()),
        ]
        scope: Scope = {"type": "http", "method": "POST", "path": COMPLETION.path, "headers": headers}
        context = DataContext.of(headers)
        context.attach(scope)
        exchange = Exchange(dumps(asked))
        endpoint = GenerationEndpoint(services, COMPLETION, self._capacity, model=of_version)
        try:
            await endpoint(scope, exchange.receive, exchange.send)
        except Exception as error:
            failure = from_exception(error)
            context.outcome = failure.code
            context.count_in(services.history, failure.status, timed=False)
            if isinstance(error, EngineUnavailable):
                raise
            if failure.status == 500:
                log.error("scoring_failed", id=context.internal_id, exc_info=error)
            if failure.param == COMPLETION.source:
                failure.param = None
            raise _by_remedy(failure) from error
        context.count_in(services.history, exchange.status, timed=False)
        choices = loads(bytes(exchange.body))["choices"]
        return [choice["logprobs"]["token_logprobs"][1:] for choice in choices]


def _by_remedy(failure: ApiError) -> LoraplexError:
    """The failure of a completion, as those who score tell failures apart."""
    if 400 <= failure.status < 500 and failure.status not in _PASSING:
        return ScoringRefused(failure.code, failure.message, param=failure.param)
    kind = _OF_ENGINE.get(failure.code)
    if kind is None:
        return failure
    error = kind(failure.message)
    error.retry_after_s = failure.retry_after_s or error.retry_after_s
    return error


class _Known:
    """A caller who has been authenticated."""

    def __init__(self, principal: Principal) -> None:
        self._principal = principal

    async def authenticate(self, secret: str) -> Principal:
        return self._principal
