"""The tools that a conversation tells of. Its chat template shows them to the model; none is called."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.api.strict import Strict

MAX_TOOLS = 128


class Function(Strict):
    """`parameters` is a JSON schema, passed on as it is."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
