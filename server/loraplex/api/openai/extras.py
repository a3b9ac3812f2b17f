"""Fields of our own that every dialect has: what chat takes beside OpenAI's fields, under the same names."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from loraplex.api.openai.schemas import (
    MAX_STOP_TOKEN_IDS,
    TOKEN_ID_LIMIT,
    LogitBias,
    Penalty,
    TokenId,
)
from loraplex.api.openai.strict import Strict


class SamplingExtras(Strict):
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    logit_bias: LogitBias = ()
    min_tokens: Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    speculation: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        """The same fields of a ChatRequest."""
        fields = {name: getattr(self, name) for name in SamplingExtras.model_fields}
        return fields | {"logit_bias": {str(token): bias for token, bias in self.logit_bias}}
