"""The completion of no tokens that a request becomes, and the head that answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

from loraplex.adapters.pooled import Head
from loraplex.api.embeddings.schemas import MAX_ANSWER_BYTES
from loraplex.api.errors import invalid
from loraplex.api.openai.schemas import CompletionRequest
from loraplex.api.pooling.heads import classifying_head, scoring_head
from loraplex.api.pooling.schemas import ClassifyRequest, RerankRequest, ScoreRequest
from loraplex.control.types import ResolvedModel
from loraplex.engine.pooling import Pooling
from loraplex.engine.reports import EngineInfo
from loraplex.serving.templates.messages import Encoded
from loraplex.serving.text.chat_template import PAIR_ROLES, writes_pairs
from loraplex.serving.text.processor import TextProcessor

MAX_PAIR_TOKENS = 1 << 20
"""Tokens of all pairs of one request."""
MAX_NUMBERS = MAX_ANSWER_BYTES // 24
"""Numbers in one answer, of 24 bytes at most."""
NUMBERS_A_LOGPROB = 4
"""Numbers that take the room of a log probability in an answer."""


class PooledPrompts(CompletionRequest):
    """Made by `to_prompts`, which checks nothing again. `head` is there once `fitted` has found it."""

    asked: ClassifyRequest | RerankRequest | ScoreRequest
    head: Head | None = None

    @property
    def pooling(self) -> Pooling:
        return self.found_head.task

    @property
    def has_pairs(self) -> bool:
        return not isinstance(self.asked, ClassifyRequest)

    @property
    def found_head(self) -> Head:
        assert self.head is not None
        return self.head

    def client_field(self, field: str) -> str:
        if field != "prompt":
            return field
        return "input" if isinstance(self.asked, ClassifyRequest) else self.asked.source


def to_prompts(asked: ClassifyRequest | RerankRequest | ScoreRequest) -> PooledPrompts:
    return PooledPrompts.model_construct(
        model=asked.model,
        prompt=asked.input if isinstance(asked, ClassifyRequest) else [],
        max_tokens=0,
        user=asked.user,
        priority=asked.priority,
        asked=asked,
    )


def fitted(request: PooledPrompts, model: ResolvedModel, info: EngineInfo) -> PooledPrompts:
    """The request to this model. Raises ApiError (400) for what the model cannot answer."""
    of = classifying_head if isinstance(request.asked, ClassifyRequest) else scoring_head
    return request.model_copy(update={"head": of(model, info)})


def tokens_of(request: PooledPrompts, text: TextProcessor, max_model_len: int) -> list[Sequence[int]]:
    """Stops at a prompt that is too long. Raises TextTooLong, ApiError (400)."""
    asked, pad, prompts = request.asked, request.found_head.pad_id, list[Sequence[int]]()
    if isinstance(asked, ClassifyRequest):
        special = asked.add_special_tokens is not False
        for prompt in request.prompts:
            prompts.append(
                _pooled(
                    text.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt,
                    pad,
                )
            )
            if len(prompts[-1]) > max_model_len:
                break
        return prompts
    prefix, bound = request.found_head.prompt or "", _PairBound(max_model_len)
    if writes_pairs(text.template_sources):
        encoded = (text.encode_chat(pair, add_generation_prompt=False) for pair in _conversations(request))
    else:
        encoded = (text.encode_pair(prefix + first, second) for first, second in asked.pairs)
    for prompt in encoded:
        prompts.append(_pooled(prompt, pad))
        if bound.ends_with(prompts[-1]):
            break
    return prompts


async def own_tokens_of(
    request: PooledPrompts, max_model_len: int, encode: Callable[..., Awaitable[Encoded]]
) -> list[Sequence[int]]:
    """The same of pairs, by a version's own template, with which `encode` makes tokens. Raises as that, ApiError
    (400)."""
    prompts, bound = list[Sequence[int]](), _PairBound(max_model_len)
    for pair in _conversations(request):
        encoded = await encode(messages=pair, add_generation_prompt=False)
        prompts.append(_pooled(encoded.token_ids, request.found_head.pad_id))
        if bound.ends_with(prompts[-1]):
            break
    return prompts


def _conversations(request: PooledPrompts) -> Iterator[list[dict[str, str]]]:
    """Each pair as sentence-transformers gives it to a chat template."""
    assert not isinstance(request.asked, ClassifyRequest)
    prompt = request.found_head.prompt
    first = [] if prompt is None else [{"role": "system", "content": prompt}]
    for texts in request.asked.pairs:
        yield first + [{"role": role, "content": text} for role, text in zip(PAIR_ROLES, texts, strict=True)]


class _PairBound:
    """Counts the tokens of pairs."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._count = 0

    def ends_with(self, prompt: Sequence[int]) -> bool:
        """Whether this pair is too long, and no other needs to be read. Raises ApiError (400) for too many tokens."""
        self._count += len(prompt)
        if self._count > MAX_PAIR_TOKENS:
            raise invalid(
                "prompt", f"The pairs have more than {MAX_PAIR_TOKENS} tokens; send fewer at a time."
            )
        return len(prompt) > self._max_model_len


def _pooled(prompt: Sequence[int], pad: int | None) -> Sequence[int]:
    """The prompt up to the token that transformers pools: the last that is no padding, even where a text ends with one;
    of paddings alone the first."""
    end = next((end for end in range(len(prompt), 1, -1) if prompt[end - 1] != pad), 1)
    return prompt[:end]


def room_of(request: PooledPrompts, num_prompts: int, num_tokens: int) -> int:
    """The answer's share of the tenant's memory, counted in log probabilities. Raises ApiError (400) for an answer
    of too many numbers."""
    head = request.found_head
    numbers = (num_tokens if head.task == "token_classify" else num_prompts) * len(head.labels)
    if numbers > MAX_NUMBERS:
        raise invalid(
            "prompt",
            f"The answer would have {numbers} numbers; at most {MAX_NUMBERS} are allowed. Send fewer inputs.",
        )
    return -(-numbers // NUMBERS_A_LOGPROB)
