"""The cards of `/v1/models`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

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


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
