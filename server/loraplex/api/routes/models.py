"""`/v1/models`, and its cards."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field

from loraplex.adapters.pooled import HeadTask, ProblemType
from loraplex.api.context import context_of
from loraplex.api.deps import ApiServices
from loraplex.api.documents import refused
from loraplex.api.errors import ApiError
from loraplex.api.pooling.heads import head_of
from loraplex.api.route import Caller, DataRoute, Services
from loraplex.control.types import ModelCard
from loraplex.serving.output.formats import ReasoningFormatName, ToolFormatName


class Model(BaseModel):
    """The base model, or an adapter: its `root` is its digest, its `parent` the base. Its answers are read in the
    formats."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(ge=0)]
    owned_by: Literal["loraplex"]
    root: str
    parent: str | None
    max_model_len: Annotated[int, Field(ge=1)]
    tool_format: ToolFormatName
    reasoning_format: ReasoningFormatName


class ModelHead(BaseModel):
    """The head of a model that classifies: a logit for each of `labels`, of each text or of each token."""

    task: HeadTask
    labels: list[str]
    problem_type: ProblemType


class ModelDetail(Model):
    """A model with its `head`, null where it writes text. Lists are without: a head may have many labels."""

    head: ModelHead | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


MAX_NAME = 512

router = APIRouter(route_class=DataRoute)


@router.get("/v1/models", operation_id="listModels")
async def list_models(caller: Caller, services: Services) -> ModelList:
    """List the models that this key may use."""
    cards = await services.resolver.list_models(caller)
    return ModelList(object="list", data=[_model(card, services) for card in cards])


@router.get("/v1/models/{id:path}", operation_id="getModel", responses=refused(404))
async def get_model(
    name: Annotated[str, Path(alias="id")], caller: Caller, services: Services, request: Request
) -> ModelDetail:
    """One of them, by any of its names."""
    context_of(request.scope).model = name
    if not 0 < len(name) <= MAX_NAME:
        message = "The model does not exist or you do not have access to it."
        raise ApiError("model_not_found", message, param="model")
    model = await services.resolver.resolve(caller, name)
    adapter = model.adapter
    base = services.served_model_name
    listed = {card.id: card for card in await services.resolver.list_models(caller)}
    card = listed.get(name)
    if card is None:  # a version, or `BASE:NAME`
        released = listed.get(adapter.name if adapter is not None else base)
        created = released.created if released is not None else 0
        root, parent = (adapter.digest, base) if adapter is not None else (base, None)
        card = ModelCard(name, created, root, parent, model.serving)
    head = head_of(model, services.engine.info)
    shown = None if head is None else ModelHead.model_validate(head.as_json())
    return ModelDetail(**_model(card, services).model_dump(), head=shown)


def _model(card: ModelCard, services: ApiServices) -> Model:
    formats = services.formats.of_version(card.serving.tool_format, card.serving.reasoning_format)
    return Model(
        id=card.id,
        object="model",
        created=card.created,
        owned_by="loraplex",
        root=card.root,
        parent=card.parent,
        max_model_len=services.max_model_len,
        tool_format="none" if formats.tools is None else formats.tools.name,
        reasoning_format="none" if formats.reasoning is None else formats.reasoning.name,
    )
