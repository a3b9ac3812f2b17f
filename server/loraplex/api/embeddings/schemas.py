"""Fields of a request to `/v1/embeddings`, and the completion of no tokens that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loraplex.adapters.pooled import VectorPooling
from loraplex.api.errors import invalid
from loraplex.api.openai.sampling import TOKEN_ID_LIMIT, TokenId
from loraplex.api.openai.schemas import CompletionRequest, prompts_of
from loraplex.api.openai.strict import Strict, or_neutral
from loraplex.control.types import ResolvedModel
from loraplex.engine.reports import EngineInfo

MAX_INPUTS = 2048
"""Inputs of one request, as many as OpenAI's API takes. The queue of the engine may hold fewer."""
NUMBERS_A_LOGPROB: dict[str, int] = {"float": 4, "base64": 16}
"""Numbers that take the room of a log probability in an answer."""
MAX_ANSWER_BYTES = 24 << 20
"""Bytes of the vectors in one answer."""
_TRIPLE_BYTES: dict[str, int] = {"float": 72, "base64": 16}
"""Most bytes of three numbers in an answer: the longest float32 is -1.1754943508222875e-38, and a comma."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_activation": (True,),
}
"""Known to vLLM. Its versions disagree which end of a prompt `truncate_prompt_tokens` drops."""

_GivenTokens = Annotated[list[TokenId], Field(min_length=1)]
_GivenTexts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
_GivenTokenLists = Annotated[list[_GivenTokens], Field(min_length=1, max_length=MAX_INPUTS)]
GivenInput = str | _GivenTexts | _GivenTokens | _GivenTokenLists


def inputs_of(value: object) -> object:
    """A string, strings, token ids or lists of token ids, as a list of inputs."""
    return prompts_of(value, MAX_INPUTS, "inputs")


class EmbeddingsRequest(Strict):
    """A null is the same as leaving a field out."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Annotated[list[Any], BeforeValidator(inputs_of, json_schema_input_type=GivenInput)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    pooling: Annotated[VectorPooling | None, BeforeValidator(or_neutral)] = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    UNSUPPORTED = UNSUPPORTED


class PromptsToEmbed(CompletionRequest):
    """Made by `to_prompts`, which checks nothing again."""

    asked: EmbeddingsRequest

    @property
    def pooling(self) -> VectorPooling:
        return self.asked.pooling or "mean"

    def client_field(self, field: str) -> str:
        return "input" if field == "prompt" else field


def to_prompts(asked: EmbeddingsRequest) -> PromptsToEmbed:
    return PromptsToEmbed.model_construct(
        model=asked.model,
        prompt=asked.input,
        max_tokens=0,
        user=asked.user,
        priority=asked.priority,
        asked=asked,
    )


def fitted(request: PromptsToEmbed, model: ResolvedModel, info: EngineInfo) -> PromptsToEmbed:
    """The request with the vectors that the version was trained for, where it does not choose others. Raises ApiError
    (400) for what the model cannot give, and for more numbers than an answer may have."""
    asked, spec = request.asked, model.embedding
    if spec is not None:
        asked = asked.model_copy(
            update={
                "pooling": asked.pooling or spec.pooling,
                "normalize": spec.normalize if asked.normalize is None else asked.normalize,
                "dimensions": asked.dimensions or spec.dimensions,
            }
        )
    _check_model(asked, info, is_cut=spec is not None and spec.dimensions is not None)
    return request.model_copy(update={"asked": asked})


def _check_model(asked: EmbeddingsRequest, info: EngineInfo, *, is_cut: bool) -> None:
    """`is_cut`: the version was trained for vectors that are cut."""
    size = info.hidden_size
    if size is None:
        raise invalid("model", "This model gives no embeddings.", "unsupported_field")
    if is_cut and asked.dimensions is not None and asked.dimensions > size:
        raise invalid(
            "dimensions", f"'dimensions' must be at most {size}, as many as the model's embeddings have."
        )
    if not is_cut and asked.dimensions not in (None, size):
        raise invalid(
            "dimensions",
            f"'dimensions' must be {size}: this model's embeddings have that many numbers, and were not trained to "
            "be cut.",
            "unsupported_field",
        )
    how = asked.encoding_format or "float"
    if len(asked.input) > (most := most_inputs(how, size)):
        shorter = "" if how == "base64" else f", or {most_inputs('base64', size)} with encoding_format base64"
        raise invalid(
            "input",
            f"'input' has {len(asked.input)} inputs; with this model a request may have {most}{shorter}: an answer "
            f"has {MAX_ANSWER_BYTES >> 20} MiB at most.",
        )


def most_inputs(how: str, size: int) -> int:
    """Inputs of a request whose vectors have `size` numbers."""
    return min(MAX_INPUTS, MAX_ANSWER_BYTES * 3 // (_TRIPLE_BYTES[how] * size))


def room_of(asked: EmbeddingsRequest, info: EngineInfo) -> int:
    """The answer's share of the tenant's memory, counted in log probabilities."""
    return len(asked.input) * (info.hidden_size or 0) // NUMBERS_A_LOGPROB[asked.encoding_format or "float"]
