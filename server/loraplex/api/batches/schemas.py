"""Requests about batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from loraplex.api.openai.strict import Strict
from loraplex.control.batches.batches import Endpoint

Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class CreateBatch(Strict):
    """A batch of a file's requests. `completion_window` is how long it may take."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Labels | None = None
    UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {"output_expires_after": ()}
