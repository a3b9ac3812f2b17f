"""Series, whose versions a training pushes, and the agreement of its log probabilities with the server's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from loraplex.admin.schemas.fields import RequestBody, ResponseBody, Timestamp
from loraplex.control.catalog.series import (
    MAX_AGREE_WITHIN,
    MAX_CHECK_EVERY,
    MAX_CONFIG_FIELDS,
    MAX_KEPT,
    MAX_QUOTA,
)

MAX_SEQUENCES = 16
MAX_TOKENS = 8192
"""In all sequences together. They fit into a JSON body with log probabilities of 17 digits."""
HIGHEST_LOGPROB = 0.001
"""Rounding makes log probabilities of certain tokens a little more than 0."""
LOWEST_LOGPROB = -1e6
TOKEN_ID_LIMIT = 1 << 31

_ID = {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_LIMIT}
_LOGPROB = {"type": "number", "minimum": LOWEST_LOGPROB, "maximum": HIGHEST_LOGPROB}
_SEQUENCE = {"type": "array", "minItems": 2, "maxItems": MAX_TOKENS, "items": _ID}
_LOGPROBS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_TOKENS,
    "items": {"anyOf": [_LOGPROB, {"type": "null"}]},
}


class SeriesChange(RequestBody):
    """`keep_last`: newest versions that are kept. `check_every`: versions from one whose numbers are checked to the
    next. `latest`: each version takes all the traffic of the name once it is ready. `quota`: pushes in a minute.
    `config`: the adapter_config.json of pushes that are tensors alone. `agree_within`: largest mean absolute difference
    of a trainer's log probabilities and the server's with which a version serves, in nats; each push then brings the
    trainer's."""

    keep_last: Annotated[int, Field(ge=1, le=MAX_KEPT)] = 8
    check_every: Annotated[int, Field(ge=1, le=MAX_CHECK_EVERY)] = 10
    latest: bool = True
    quota: Annotated[int, Field(ge=1, le=MAX_QUOTA)] | None = None
    config: Annotated[dict[str, Any], Field(max_length=MAX_CONFIG_FIELDS)] | None = None
    agree_within: Annotated[float, Field(gt=0, le=MAX_AGREE_WITHIN)] | None = None


class Series(ResponseBody):
    """A series, with a null where it has no quota of its own, no config, or no threshold of agreement."""

    name: str
    keep_last: int
    check_every: int
    latest: bool
    quota: int | None
    config: dict[str, Any] | None
    agree_within: float | None
    created_at: Timestamp


def _one_or_several(of: dict[str, Any]) -> WithJsonSchema:
    several = {"type": "array", "minItems": 1, "maxItems": MAX_SEQUENCES, "items": of}
    return WithJsonSchema({"anyOf": [of, several]})


class AgreementRequest(RequestBody):
    """`tokens`: one sequence of token ids, or several. `logprobs`: for each, the trainer's natural log probability of
    each token given those before it. That of the first token is null, or left out."""

    tokens: Annotated[list[Any], Field(min_length=1), _one_or_several(_SEQUENCE)]
    logprobs: Annotated[list[Any], Field(min_length=1), _one_or_several(_LOGPROBS)]


class SequenceAgreement(ResponseBody):
    """`differences`: trainer less server, from the second token on. `max_at`: the index of the token with the largest
    absolute one."""

    mean: float
    max: float
    max_at: int
    differences: list[float]


class Agreement(ResponseBody):
    """In nats. `mean` and `max` are of the absolute differences, `bias` is the mean of the differences themselves,
    trainer less server. `kl`: the estimate k3 of KL(server || trainer) for tokens that the server sampled. `tokens`:
    the number that was compared, which is without the first of each sequence."""

    name: str
    version: str
    digest: str
    base_fingerprint: str
    dtype: str
    mean: float
    max: float
    bias: float
    kl: float
    tokens: int
    sequences: list[SequenceAgreement]
