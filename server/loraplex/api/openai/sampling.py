"""How a request's tokens are sampled, in the same fields of every dialect, and what the engine gets of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from loraplex.api.openai import described
from loraplex.api.openai.strict import Strict, must
from loraplex.engine.types import SamplingParams
from loraplex.http.text import printable

GREEDY_BELOW = 1e-4
"""Logits divided by a smaller temperature leave float32; what is drawn is the most likely token anyway."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SHOWN_KEYS, MAX_SHOWN_KEY_LENGTH = 4, 32
"""Bounds on the wrong keys of `logit_bias` that an error shows, and on their length."""
TOKEN_ID_LIMIT = 1 << 31


def _logit_bias(value: object) -> object:
    """Token ids are JSON object keys, so they come as strings. Returns ((id, bias), …) by id."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise must("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise must(f"must have at most {MAX_LOGIT_BIAS} entries")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if wrong:
        shown = ", ".join(f"'{printable(key, MAX_SHOWN_KEY_LENGTH)}'" for key in wrong[:MAX_SHOWN_KEYS])
        raise must(f'each key must be a token id, such as "50256", and not {shown}')
    bias: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not -100 <= number <= 100:
            raise must("each value must be a number from -100 to 100")
        bias[int(key)] = float(number)
    return tuple(sorted(bias.items()))


TokenId = Annotated[int, Field(ge=0, lt=TOKEN_ID_LIMIT)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_GivenBias = (
    Annotated[dict[str, float], WithJsonSchema({**described.LOGIT_BIAS, "maxProperties": MAX_LOGIT_BIAS})]
    | None
)

LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_logit_bias, json_schema_input_type=_GivenBias),
    Field(json_schema_extra={"default": {}}),
]


class SamplingFields(Strict):
    """A null is the same as leaving a field out."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_ID_LIMIT)] | None = None
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

    def given_sampling(self) -> dict[str, Any]:
        """The same fields of a ChatRequest."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return given | {"logit_bias": {str(token): bias for token, bias in self.logit_bias}}

    def sampling(self, **chosen: Any) -> SamplingParams:
        """SamplingParams with all that the request gives by the same name, and what is `chosen` before it."""
        names = (each.name for each in fields(SamplingParams))
        given = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        given |= {
            name: tuple(dict.fromkeys(value)) for name, value in given.items() if isinstance(value, list)
        }
        if self.top_p == 0 or (self.temperature is not None and self.temperature < GREEDY_BELOW):
            given |= {"temperature": 0.0, "top_p": self.top_p or 1.0}
        if self.top_k == -1:
            given["top_k"] = 0
        return SamplingParams(**given | chosen)
