"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's wire, which training loops speak. SkyRL loads by a path
of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Request, Response, Security
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from loraplex.adapters.errors import AdapterRefused
from loraplex.api.auth import actor_of, authenticate
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.errors import ApiError, invalid
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.openai.body import parse_json, read_json
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.strict import Strict
from loraplex.api.route import DataRoute, Services
from loraplex.control.errors import AdapterNotFound, InvalidValue, TenantNotFound, VersionNotFound
from loraplex.control.types import Principal
from loraplex.http.routing import caller
from loraplex.http.text import printable

MAX_BODY = 64 << 10
SCOPE = "adapters:write"
_Writer = Annotated[Principal, Security(caller, scopes=[SCOPE])]
_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

UNSUPPORTED_LOAD: Mapping[str, tuple[object, ...]] = {"is_3d_lora_weight": ()}
UNSUPPORTED_UNLOAD: Mapping[str, tuple[object, ...]] = {"lora_int_id": ()}
Name = Annotated[
    str, Field(max_length=512, json_schema_extra={"pattern": "^[a-z0-9][a-z0-9._-]{0,62}$", "maxLength": 63})
]


class LoadLoraAdapter(Strict):
    """`load_inplace` changes nothing: the same name again is always a new version."""

    lora_name: Name
    lora_path: Annotated[str, Field(max_length=4096, json_schema_extra={"minLength": 1})]
    load_inplace: bool | None = None
    UNSUPPORTED = UNSUPPORTED_LOAD


class UnloadLoraAdapter(Strict):
    lora_name: Name
    UNSUPPORTED = UNSUPPORTED_UNLOAD


class LoadingRoute(DataRoute):
    """Takes a JSON body of `schema` from a key that may write adapters."""

    def __init__(
        self,
        path: str,
        endpoint: Any,
        schema: type[BaseModel],
        refusals: tuple[int, ...],
        capacity: TenantCapacity,
    ) -> None:
        super().__init__(
            path,
            endpoint,
            methods=["POST"],
            operation_id=path.removeprefix("/v1").strip("/").replace("/", "_"),
            response_class=PlainTextResponse,
            responses=_TEXT,
            refusals=refusals,
        )
        self._schema = schema
        self._capacity = capacity

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        services: ApiServices = request.app.state.services
        principal = await authenticate(request.scope, services.authenticator, scope_needed=SCOPE)
        tenant = principal.tenant_id or ""
        with self._capacity.request(tenant), self._capacity.body(tenant) as take:
            body = await read_json(
                request.scope,
                request.receive,
                max_bytes=MAX_BODY,
                timeout_s=services.stall_timeout,
                take=take,
            )
            yield parse_request(self._schema, parse_json(body))


def loading_routes(capacity: TenantCapacity) -> list[LoadingRoute]:
    async def load_lora_adapter(
        caller: _Writer, services: Services, asked: LoadLoraAdapter, request: Request
    ) -> Response:
        """Make an adapter of a folder the next version of a name, and release it.

        `lora_path` lies below one of the server's --adapter-sources. Requests that run finish on the version before.
        """
        if not asked.lora_name or not asked.lora_path:
            empty = "lora_path" if asked.lora_name else "lora_name"
            raise invalid(empty, "Both 'lora_name' and 'lora_path' must be provided.")
        context_of(request.scope).model = asked.lora_name
        try:
            await services.adapters.load(actor_of(request, caller), asked.lora_name, asked.lora_path)
        except InvalidValue as error:
            raise invalid("lora_name", error.message) from error
        except AdapterRefused as error:
            raise ApiError(error.code, error.message, param="lora_path") from error
        except (TenantNotFound, AdapterNotFound, VersionNotFound) as error:  # deleted while it was loaded
            raise ApiError("model_not_found", error.message, param="lora_name") from error
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_lora_adapter(
        caller: _Writer, services: Services, asked: UnloadLoraAdapter, request: Request
    ) -> Response:
        """Delete an adapter with all its versions.

        Requests that run finish. A series keeps its rules for the next load.
        """
        name = asked.lora_name
        if not name:
            raise invalid("lora_name", "'lora_name' needs to be provided to unload a LoRA adapter.")
        context_of(request.scope).model = name
        try:
            await services.adapters.unload(actor_of(request, caller), name)
        except AdapterNotFound as error:
            message = f"The lora adapter '{printable(name, 200)}' cannot be found."
            raise ApiError("model_not_found", message, param="lora_name") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    refusals = (400, 404, 408, 413, 415, 429, 500, 503)
    return [
        LoadingRoute("/v1/load_lora_adapter", load_lora_adapter, LoadLoraAdapter, refusals, capacity),
        LoadingRoute("/skyrl/v1/load_lora_adapter", load_lora_adapter, LoadLoraAdapter, refusals, capacity),
        LoadingRoute("/v1/unload_lora_adapter", unload_lora_adapter, UnloadLoraAdapter, refusals, capacity),
    ]
