"""Fields of Tinker's requests, and the completion that a sample becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from loraplex.api.errors import invalid
from loraplex.api.openai.messages import MAX_MESSAGES
from loraplex.api.openai.sampling import MAX_STOP_TOKEN_IDS, TOKEN_ID_LIMIT, TokenId
from loraplex.api.openai.schemas import (
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    CompletionRequest,
    TopLogprobs,
)
from loraplex.api.openai.strict import Strict, must
from loraplex.api.openai.unions import of_kinds
from loraplex.api.tinker.paths import MAX_PATH_CHARS, MAX_SESSION_CHARS, model_of_path, model_of_session

MAX_SAMPLES = 128
NAMES: Mapping[str, str] = {
    "n": "num_samples",
    "seed": "sampling_params.seed",
    "temperature": "sampling_params.temperature",
    "max_tokens": "sampling_params.max_tokens",
    "stop": "sampling_params.stop",
    "stop_token_ids": "sampling_params.stop",
    "top_k": "sampling_params.top_k",
    "top_p": "sampling_params.top_p",
    "logprobs": "topk_sample_logprobs",
    "prompt_logprobs": "topk_prompt_logprobs",
}
"""Tinker's name of each field of a completion that has another there."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "prompt_alt_tokens_k": (0,),
    "record_stability_info": (),
    "target_prompt_logprobs": (),
}
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Model = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
ModelPath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_SESSION_CHARS)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_GivenStop = (
    _Stop
    | Annotated[list[_Stop], Field(max_length=MAX_STOP_STRINGS)]
    | Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)]
    | None
)


def _stop(value: object) -> object:
    """A string, strings or token ids, as a tuple of one kind; None where nothing is said."""
    if value is None:
        return None
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not (
        all(isinstance(each, str) for each in given) or all(type(each) is int for each in given)
    ):
        raise must("must be a string, a list of strings or a list of token ids")
    if given and isinstance(given[0], str):
        if len(given) > MAX_STOP_STRINGS:
            raise must(f"must have at most {MAX_STOP_STRINGS} strings")
        if any(not 1 <= len(each) <= MAX_STOP_LENGTH for each in given):
            raise must(f"each string must have 1 to {MAX_STOP_LENGTH} characters")
    elif len(given) > MAX_STOP_TOKEN_IDS or any(not 0 <= each < TOKEN_ID_LIMIT for each in given):
        raise must(f"must have at most {MAX_STOP_TOKEN_IDS} token ids, none of them negative")
    return tuple(dict.fromkeys(given))


class TextChunk(Strict):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId]


_Chunk = Annotated[TextChunk, BeforeValidator(of_kinds("chunks", {"encoded_text"}, "encoded_text"))]


class ModelInput(Strict):
    chunks: Annotated[list[_Chunk], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class TinkerSampling(Strict):
    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[tuple[Any, ...] | None, BeforeValidator(_stop, json_schema_input_type=_GivenStop)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOKEN_ID_LIMIT)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


class SampleRequest(Strict):
    """The model is that of a sampling session, of a path, or the base."""

    type: Literal["sample"] = "sample"
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: ModelInput
    sampling_params: TinkerSampling
    base_model: Model | None = None
    model_path: ModelPath | None = None
    sampling_session_id: SessionId | None = None
    seq_id: Count | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopLogprobs = 0
    topk_sample_logprobs: TopLogprobs = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    UNSUPPORTED = UNSUPPORTED


class CreateSession(Strict):
    """Nothing of it is kept."""

    type: Literal["create_session"] = "create_session"
    tags: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=256)] = []  # noqa: RUF012
    user_metadata: Annotated[dict[str, Any], Field(max_length=256)] | None = None
    sdk_version: Annotated[str, Field(max_length=128)]
    project_id: Annotated[str, Field(max_length=512)] | None = None
    display_name: Annotated[str, Field(max_length=512)] | None = None


class SessionHeartbeat(Strict):
    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: SessionId


class FinishReason(Strict):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Strict):
    reason: FinishReason
    detail: Annotated[str, Field(max_length=4096)] | None = None


class ClientConfigRequest(Strict):
    sdk_version: Annotated[str, Field(max_length=128)]


class CreateSamplingSession(Strict):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    session_id: SessionId
    sampling_session_seq_id: Count
    base_model: Model | None = None
    model_path: ModelPath | None = None


class RetrieveFuture(Strict):
    request_id: Annotated[str, Field(min_length=1, max_length=128)]
    allow_metadata_only: bool | None = None


class CancelFuture(Strict):
    request_id: Annotated[str, Field(min_length=1, max_length=128)]


class SampledPrompt(CompletionRequest):
    """Made by `to_completion`, which checks nothing again."""

    asked: SampleRequest
    TELLS_ALL_TOKENS: ClassVar[bool] = True

    def client_field(self, field: str) -> str:
        return NAMES.get(field, field)


def named_model(base_model: str | None, model_path: str | None) -> str:
    """The model that is asked for by name or path. Raises ApiError (400)."""
    if model_path is not None:
        return model_of_path(model_path)
    if base_model is None:
        raise invalid("base_model", "Give 'base_model' or 'model_path'.")
    return base_model


def to_completion(asked: SampleRequest) -> SampledPrompt:
    """Raises ApiError (400 or 404)."""
    if asked.sampling_session_id is not None:
        model = model_of_session(asked.sampling_session_id)
    else:
        model = named_model(asked.base_model, asked.model_path)
    token_ids = [token_id for chunk in asked.prompt.chunks for token_id in chunk.tokens]
    last = asked.prompt_logprobs_last_n
    if last is not None and not (asked.prompt_logprobs and last < len(token_ids)):
        why = "needs 'prompt_logprobs', and must be less than the number of the prompt's tokens"
        raise invalid("prompt_logprobs_last_n", f"'prompt_logprobs_last_n' {why}.")
    fields, stop = asked.sampling_params, asked.sampling_params.stop
    scored = asked.prompt_logprobs or asked.topk_prompt_logprobs
    return SampledPrompt.model_construct(
        model=model,
        prompt=[token_ids],
        n=asked.num_samples,
        max_tokens=fields.max_tokens,
        seed=fields.seed,
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        stop=tuple(each for each in stop or () if isinstance(each, str)),
        stop_token_ids=[each for each in stop or () if isinstance(each, int)] or None,
        ignore_eos=stop == () or None,
        logprobs=asked.topk_sample_logprobs,
        prompt_logprobs=asked.topk_prompt_logprobs if scored else None,
        return_token_ids=True,
        asked=asked,
    )


class Session(BaseModel):
    type: Literal["create_session"] = "create_session"
    session_id: str


class Heartbeat(BaseModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SamplingSession(BaseModel):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class Sampler(BaseModel):
    sampler_id: str
    base_model: str
    model_path: str | None


class ClientConfig(BaseModel):
    """Flags of Tinker's client that are not its defaults."""

    sample_max_concurrent_requests: int


class DynamicConfig(BaseModel):
    sample_cancel_enabled: Literal[True] = True


class SupportedModel(BaseModel):
    model_name: str
    max_context_length: int
    trainable: Literal[False] = False
    sampleable: bool


class Capabilities(BaseModel):
    supported_models: list[SupportedModel]


class Telemetry(BaseModel):
    status: Literal["accepted"] = "accepted"


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Promise(BaseModel):
    request_id: str
    sample_sequence_ids: list[str]


class Nothing(BaseModel):
    pass
