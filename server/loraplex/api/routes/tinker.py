"""Tinker's API below `/api/v1`, as far as it samples. Verbs that train are refused by name."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from loraplex.api.anthropic.headers import KEY_HEADER
from loraplex.api.auth import authenticate
from loraplex.api.codec import dumps, loads
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.documents import KEY_IN_EITHER_HEADER
from loraplex.api.edge import DataEdge, DataErrors
from loraplex.api.errors import ApiError, invalid
from loraplex.api.generation.endpoints import GenerationEndpoint
from loraplex.api.generation.kinds import SAMPLE
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.openai.body import parse_json, read_json
from loraplex.api.openai.parsing import parse_request
from loraplex.api.route import Caller, DataRoute, Services
from loraplex.api.tinker import schemas
from loraplex.api.tinker.paths import LATEST, model_of_session, new_session, path_of_model
from loraplex.api.tinker.samples import MAX_SAMPLES_A_KEY, Sample, Samples
from loraplex.http.routing import NO_BODY

PREFIX = "/api/v1"
POLL_S = 20.0
"""How long a client waits that asks for a result; it takes 45 seconds for a broken connection."""
PROTOBUF = "application/x-protobuf"
KEY_PREFIX = b"tml-"
"""The SDK takes only keys that begin so."""
TRAINING = (
    "create_model",
    "unload_model",
    "forward",
    "forward_backward",
    "optim_step",
    "create_custom_loss",
    "load_weights",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "copy_weights",
    "get_info",
    "weights_info",
)
"""Verbs of training, and of what it keeps."""
_REFUSALS = (400, 404, 408, 413, 415, 429, 500, 503)


class TinkerRoute(DataRoute):
    """Takes a JSON body of `schema`; without one, no body is read."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        capacity: TenantCapacity,
        *,
        answer: type[BaseModel] | None = None,
        schema: type[BaseModel] | None = None,
        **options: Any,
    ) -> None:
        if answer is not None:
            options["response_model"] = answer
        super().__init__(
            PREFIX + path,
            endpoint,
            operation_id=f"tinker{''.join(part.title() for part in endpoint.__name__.split('_'))}",
            refusals=_REFUSALS,
            openapi_extra=KEY_IN_EITHER_HEADER,
            **options,
        )
        self._capacity = capacity
        self._schema = schema

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        services: ApiServices = request.app.state.services
        principal = await authenticate(without_prefix(request.scope), services.authenticator, KEY_HEADER)
        tenant = principal.tenant_id or ""
        with self._capacity.request(tenant), self._capacity.body(tenant) as take:
            if self._schema is None:
                yield NO_BODY
                return
            body = await read_json(
                request.scope,
                request.receive,
                max_bytes=services.max_body,
                timeout_s=services.stall_timeout,
                take=take,
            )
            yield parse_request(self._schema, parse_json(body))


class SampleEndpoint:
    """An ASGI app that submits a sample: what is refused before its model is looked at is refused at once."""

    def __init__(self, services: ApiServices, samples: Samples, capacity: TenantCapacity) -> None:
        self._services = services
        self._samples = samples
        self._capacity = capacity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, plain = self._services, without_prefix(scope)
        principal = await authenticate(plain, services.authenticator, KEY_HEADER)
        tenant = principal.tenant_id or ""
        with self._capacity.body(tenant) as take:
            with self._capacity.request(tenant):  # the sample takes a place of its own
                body = await read_json(
                    scope, receive, max_bytes=services.max_body, timeout_s=services.stall_timeout, take=take
                )
            sample = await self._samples.submit(_alone(plain), principal, body)
            if sample.done.is_set() and sample.status != 200:
                sample.leave()
                context_of(scope).is_counted = True
                answer = Response(bytes(sample.body), sample.status or 503, dict(sample.headers))
            else:
                number = parse_json(body).get("num_samples", 1)
                ids = [f"{sample.id}-{index}" for index in range(number)]
                promise = schemas.Promise(request_id=sample.id, sample_sequence_ids=ids)
                answer = Response(promise.model_dump_json(), media_type="application/json")
        await answer(scope, receive, send)


class SampleRoute(DataRoute):
    """The function says what the route takes; `endpoint` answers."""

    def __init__(self, declared: Callable[..., Any], endpoint: SampleEndpoint) -> None:
        super().__init__(
            PREFIX + "/asample",
            declared,
            methods=["POST"],
            operation_id="tinkerSample",
            response_model=schemas.Promise,
            refusals=_REFUSALS,
            openapi_extra=KEY_IN_EITHER_HEADER,
        )
        self.app = endpoint


async def sample(_: Caller, request: schemas.SampleRequest) -> Response:
    """Submit a sample, whose result `retrieve_future` gives."""
    raise NotImplementedError


def without_prefix(scope: Scope) -> Scope:
    """The scope with the key as the server knows it."""
    key = KEY_HEADER.encode()
    headers = [
        (name, value.removeprefix(KEY_PREFIX) if name == key else value) for name, value in scope["headers"]
    ]
    return {**scope, "headers": headers}


def _alone(scope: Scope) -> Scope:
    """The parts that a request needs that outlives the one that submits it."""
    kept = {name: scope[name] for name in ("type", "method", "path", "headers", "client") if name in scope}
    return {**kept, "query_string": b""}


def _result(sample: Sample) -> Response:
    """The answer for a sample that is done. What may succeed later is gone: the SDK submits it again."""
    taken = BackgroundTask(sample.take)
    if sample.status == 200:
        return Response(bytes(sample.body), media_type=PROTOBUF, background=taken)
    if sample.status is None:
        return _gone("The sample was not answered. Please submit it again.")
    error = loads(bytes(sample.body))["error"]
    if "retry-after" in sample.headers:
        again = {"retry-after": sample.headers["retry-after"]}
        return _gone(f"The sample was not answered: {error['message']}", again, taken)
    category = "user" if sample.status < 500 else "server"
    told = dumps({"error": error["message"], "category": category})
    return Response(told, media_type="application/json", background=taken)


def _gone(
    message: str, headers: Mapping[str, str] | None = None, background: BackgroundTask | None = None
) -> Response:
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": "request_id",
        "code": "future_gone",
    }
    return Response(
        dumps({"error": error}),
        410,
        headers,
        media_type="application/json",
        background=background,
    )


def _sample_routes(services: ApiServices, capacity: TenantCapacity) -> list[DataRoute]:
    endpoint = GenerationEndpoint(services, SAMPLE, capacity)
    inner = DataEdge(
        DataErrors(endpoint, services.drain, services.metrics),
        services.drain,
        services.metrics,
        services.access_log,
        services.tracing,
        services.history,
        services.recent,
    )
    samples = Samples(inner, services.drain, capacity.share)

    async def retrieve_future(caller: Caller, request: schemas.RetrieveFuture) -> Response:
        """The result of a sample, once it is there, or `try_again`.

        A result waits for 20 seconds, and is gone once it was given. A sample that nobody asks for in 60 seconds is
        ended.
        """
        found = samples.of(caller.key_id, request.request_id)
        if found is None:
            return _gone("There is no such sample, or its result was not asked for in time.")
        if not await found.wait(POLL_S):
            waiting = {"type": "try_again", "request_id": found.id, "queue_state": "active"}
            return Response(dumps(waiting), media_type="application/json")
        return _result(found)

    async def cancel_future(caller: Caller, request: schemas.CancelFuture) -> schemas.Nothing:
        """End a sample that nobody wants any more."""
        found = samples.of(caller.key_id, request.request_id)
        if found is not None:
            found.leave()
        return schemas.Nothing()

    content = {PROTOBUF: {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}}
    return [
        SampleRoute(sample, SampleEndpoint(services, samples, capacity)),
        TinkerRoute(
            "/retrieve_future",
            retrieve_future,
            capacity,
            schema=schemas.RetrieveFuture,
            methods=["POST"],
            response_class=Response,
            responses={
                200: {"content": content},
                410: {
                    "description": "No such sample.",
                    "content": {"application/json": {"schema": {"type": "object"}}},
                },
            },
        ),
        TinkerRoute(
            "/cancel_future",
            cancel_future,
            capacity,
            schema=schemas.CancelFuture,
            answer=schemas.Nothing,
            methods=["POST"],
        ),
    ]


def _session_routes(capacity: TenantCapacity) -> list[DataRoute]:
    async def create_session(_: Caller, request: schemas.CreateSession) -> schemas.Session:
        """A new session, not kept."""
        return schemas.Session(session_id=f"session-{secrets.token_urlsafe(12)}")

    async def session_heartbeat(_: Caller, request: schemas.SessionHeartbeat) -> schemas.Heartbeat:
        """Nothing: sessions do not end."""
        return schemas.Heartbeat()

    async def finish_session(_: Caller, session_id: str, request: schemas.FinishSession) -> schemas.Nothing:
        """Nothing: of a session nothing is kept."""
        return schemas.Nothing()

    async def create_sampling_session(
        caller: Caller, services: Services, request: schemas.CreateSamplingSession
    ) -> schemas.SamplingSession:
        """A new sampling session, which samples from one model.

        `latest` is the version that the name gives now: the session stays with it.
        """
        asked = schemas.named_model(request.base_model, request.model_path)
        if request.model_path is not None and request.base_model not in (None, services.served_model_name):
            raise invalid(
                "base_model", f"'base_model' must be '{services.served_model_name}', or be left out."
            )
        model = await services.resolver.resolve(caller, asked)
        if (request.model_path or "").endswith(f"/{LATEST}") and model.adapter is not None:
            asked = f"{model.adapter.name}@v{model.adapter.version}"
        return schemas.SamplingSession(sampling_session_id=new_session(asked))

    async def get_sampler(_: Caller, services: Services, sampler_id: str) -> schemas.Sampler:
        """The model of a sampling session."""
        model, base = model_of_session(sampler_id), services.served_model_name
        path = None if model == base else path_of_model(model)
        return schemas.Sampler(sampler_id=sampler_id, base_model=base, model_path=path)

    posts = (
        ("/create_session", create_session, schemas.CreateSession, schemas.Session),
        ("/session_heartbeat", session_heartbeat, schemas.SessionHeartbeat, schemas.Heartbeat),
        ("/sessions/{session_id}/finish", finish_session, schemas.FinishSession, schemas.Nothing),
        (
            "/create_sampling_session",
            create_sampling_session,
            schemas.CreateSamplingSession,
            schemas.SamplingSession,
        ),
    )
    return [
        *(
            TinkerRoute(path, endpoint, capacity, schema=schema, answer=answer, methods=["POST"])
            for path, endpoint, schema, answer in posts
        ),
        TinkerRoute("/samplers/{sampler_id}", get_sampler, capacity, answer=schemas.Sampler, methods=["GET"]),
    ]


def _server_routes(capacity: TenantCapacity) -> list[DataRoute]:
    async def client_config(_: Caller, request: schemas.ClientConfigRequest) -> schemas.ClientConfig:
        """Flags of Tinker's client."""
        return schemas.ClientConfig(sample_max_concurrent_requests=MAX_SAMPLES_A_KEY)

    async def client_dynamic_config(_: Caller, request: schemas.ClientConfigRequest) -> schemas.DynamicConfig:
        """Flags of Tinker's client that it asks for again and again."""
        return schemas.DynamicConfig()

    async def get_server_capabilities(caller: Caller, services: Services) -> schemas.Capabilities:
        """The base model."""
        base = services.served_model_name
        models = await services.resolver.list_models(caller)
        served = schemas.SupportedModel(
            model_name=base,
            max_context_length=services.max_model_len,
            sampleable=any(model.id == base for model in models),
        )
        return schemas.Capabilities(supported_models=[served])

    async def healthz(_: Caller) -> schemas.Health:
        """Whether the server answers."""
        return schemas.Health()

    async def telemetry(_: Caller) -> schemas.Telemetry:
        """Accept what the SDK tells of itself; it is neither read nor kept."""
        return schemas.Telemetry()

    config = schemas.ClientConfigRequest
    return [
        TinkerRoute(
            "/client/config",
            client_config,
            capacity,
            schema=config,
            answer=schemas.ClientConfig,
            methods=["POST"],
        ),
        TinkerRoute(
            "/client/dynamic_config",
            client_dynamic_config,
            capacity,
            schema=config,
            answer=schemas.DynamicConfig,
            methods=["POST"],
        ),
        TinkerRoute(
            "/get_server_capabilities",
            get_server_capabilities,
            capacity,
            answer=schemas.Capabilities,
            methods=["GET"],
        ),
        TinkerRoute("/healthz", healthz, capacity, answer=schemas.Health, methods=["GET"]),
        TinkerRoute("/telemetry", telemetry, capacity, answer=schemas.Telemetry, methods=["POST"]),
    ]


def _training_route(capacity: TenantCapacity) -> DataRoute:
    async def refuse(_: Caller, verb: str) -> Response:
        """Refuse a verb of training."""
        if verb.partition("/")[0] not in TRAINING:
            raise ApiError("unknown_url", "Tinker's API has no such verb that this server knows.")
        raise ApiError(
            "unknown_url",
            f"'{verb}' is a verb of Tinker's training. This server samples and does not train: train elsewhere, and "
            "push each version to it.",
        )

    return TinkerRoute("/{verb:path}", refuse, capacity, methods=["POST"], include_in_schema=False)


def tinker_routes(services: ApiServices, capacity: TenantCapacity) -> list[DataRoute]:
    return [
        *_sample_routes(services, capacity),
        *_session_routes(capacity),
        *_server_routes(capacity),
        _training_route(capacity),
    ]
