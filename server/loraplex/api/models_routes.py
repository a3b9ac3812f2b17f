"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loraplex.api.auth import authenticate
from loraplex.api.codec import dumps
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.errors import ApiError
from loraplex.control.types import ModelCard

MAX_NAME = 512


def models_routes(services: ApiServices) -> list[Route]:
    """The list of what a key may use, and one card by any name that `model` may have."""

    async def list_models(request: Request) -> Response:
        principal = await authenticate(request.scope, services.authenticator)
        cards = await services.resolver.list_models(principal)
        return _json({"object": "list", "data": [_card(card, services.max_model_len) for card in cards]})

    async def one_model(request: Request) -> Response:
        principal = await authenticate(request.scope, services.authenticator)
        name: str = request.path_params["id"]
        context_of(request.scope).model = name
        if not 0 < len(name) <= MAX_NAME:
            message = "The model does not exist or you do not have access to it."
            raise ApiError("model_not_found", message, param="model")
        adapter = (await services.resolver.resolve(principal, name)).adapter
        base = services.served_model_name
        listed = {card.id: card for card in await services.resolver.list_models(principal)}
        card = listed.get(name)
        if card is None:  # a version, or `BASE:NAME`
            released = listed.get(adapter.name if adapter is not None else base)
            created = released.created if released is not None else 0
            root, parent = (adapter.digest, base) if adapter is not None else (base, None)
            card = ModelCard(name, created, root, parent)
        return _json(_card(card, services.max_model_len))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{id:path}", one_model, methods=["GET"]),
    ]


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


def _card(card: ModelCard, max_model_len: int) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "loraplex",
        "root": card.root,
        "parent": card.parent,
        "max_model_len": max_model_len,
    }
