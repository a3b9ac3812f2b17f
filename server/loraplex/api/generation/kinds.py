"""Differences between the routes that generate: the request, its prompt, and the shape of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel
from starlette.types import Scope

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.api.anthropic.answers import MessagesAnswer
from loraplex.api.anthropic.headers import KEY_HEADER, check_version
from loraplex.api.anthropic.schemas import MessagesChat, MessagesRequest
from loraplex.api.anthropic.schemas import to_chat as messages_to_chat
from loraplex.api.deps import OwnChats
from loraplex.api.embeddings.answers import EmbeddingsAnswer
from loraplex.api.embeddings.schemas import (
    EmbeddingsRequest,
    PromptsToEmbed,
    fitted,
    room_of,
    to_prompts,
)
from loraplex.api.errors import ApiError
from loraplex.api.generation.own_chat import InThread, own_tokens
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.generation.tool_use import (
    PLAIN,
    Reading,
    check_effort,
    check_format,
    read_chat,
)
from loraplex.api.openai.chat_format import ChatFormat
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import Asked, CompletionFormat, WholeChoice
from loraplex.api.openai.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.api.pooling.heads import check_text
from loraplex.api.responses.answers import ResponsesAnswer
from loraplex.api.responses.compaction import CompactAnswer, CompactChat, CompactRequest
from loraplex.api.responses.compaction import to_chat as compact_to_chat
from loraplex.api.responses.schemas import ResponsesChat, ResponsesRequest
from loraplex.api.responses.schemas import to_chat as responses_to_chat
from loraplex.api.tinker.answers import SampleAnswer
from loraplex.api.tinker.schemas import SampledPrompt, SampleRequest
from loraplex.api.tinker.schemas import to_completion as sample_to_completion
from loraplex.control.types import ResolvedModel
from loraplex.engine.reports import EngineInfo
from loraplex.engine.types import Usage
from loraplex.serving.output.formats import OutputFormats
from loraplex.serving.text.processor import Spelling, TextProcessor

Request = ChatRequest | CompletionRequest


@dataclass(frozen=True)
class Prompts:
    """Tokens, the texts that answers begin with where they repeat their prompt, and how answers are read."""

    token_ids: Sequence[Sequence[int]]
    echoes: Sequence[Spelling] = ()
    reading: Reading = PLAIN


class Answer(Protocol):
    """Writes one answer when it is whole."""

    def add(self, choice: WholeChoice, delta: Delta) -> None: ...
    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes: ...


@runtime_checkable
class StreamedAnswer(Answer, Protocol):
    """Writes one answer, whole or while it comes: of a route whose requests may say `stream`."""

    @property
    def end(self) -> bytes:
        """The bytes that end each stream, also one that failed."""
        ...

    @property
    def ping(self) -> bytes:
        """An event without content, for connections that are cut when they are silent."""
        ...

    def opening(self, num_choices: int) -> bytes:
        """Sent before any text."""
        ...

    def delta(self, delta: Delta) -> bytes: ...
    def closing(self, usage: Usage) -> bytes:
        """Sent after the last text, before `end`."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The same, of a stream that fails after its first byte."""
        ...


@dataclass(frozen=True)
class AnswerTo:
    """The request that an answer belongs to. `created` in seconds since the epoch; `label` is the request's id as its
    client knows it. Each of `prompts` has `n` choices, and room for that number of `max_tokens` in each. `reasons`:
    there may be reasoning. `fingerprint`: of `loraplex.api.fingerprint`."""

    id: str
    label: str
    created: int
    request: Request
    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]
    n: int
    logprobs: ChatLogprobs | CompletionLogprobs
    prompt_logprobs: PromptLogprobs
    reasons: bool = False
    fingerprint: str = ""


def _itself(request: Any) -> Request:
    assert isinstance(request, ChatRequest | CompletionRequest)
    return request


def _any_head(scope: Scope) -> None:
    """Whatever the headers say."""


def _writes_text(request: Request, model: ResolvedModel, info: EngineInfo) -> Request:
    check_text(model, info)
    return request


def _kept_logprobs(plan: GenerationPlan, info: EngineInfo) -> int:
    return 0 if plan.request.stream else plan.max_logprobs


def _kept_of_streams_too(plan: GenerationPlan, info: EngineInfo) -> int:
    return plan.max_logprobs


@dataclass(frozen=True)
class Kind:
    """One route that generates. `schema` checks the body, and `request` makes of it what the route asks for.
    `source` is the field that holds the prompt; `continues`: the answer goes on where the prompt's text ended.
    `tokenise` stops at a prompt that fills the context of that number of tokens: it is refused, whatever the others
    are. It gets the formats of the version that answers. `kept` is the room that an answer takes here until it is
    sent, in log probabilities. `fit` gives the request as this model takes it, and raises ApiError (400) for what
    it cannot answer. `key_header` is a header that may hold the key, beside Authorization. `check_head` raises
    ApiError (400) for headers that the route does not take."""

    schema: type[BaseModel]
    tokenise: Callable[[TextProcessor, Request, int, OutputFormats], Prompts]
    answer: Callable[[AnswerTo], Answer]
    logprobs: type[ChatLogprobs] | type[CompletionLogprobs]
    path: str
    id_prefix: str
    source: str
    continues: bool = False
    request: Callable[[Any], Request] = _itself
    kept: Callable[[GenerationPlan, EngineInfo], int] = _kept_logprobs
    fit: Callable[[Request, ResolvedModel, EngineInfo], Request] = _writes_text
    key_header: str | None = None
    check_head: Callable[[Scope], None] = _any_head


def chat_tokens(text: TextProcessor, request: Request, _: int, formats: OutputFormats) -> Prompts:
    assert isinstance(request, ChatRequest)
    check_format(request, formats, text)
    messages, tools = conversation_of(request)
    effort = request.asked_effort[1]
    if effort is not None and not text.knows_effort(with_tools=bool(tools)):
        check_effort(request)
        effort = None
    token_ids = text.encode_chat(messages, tools or None, tool_format=formats.tools, effort=effort)
    return Prompts([token_ids], reading=read_prompt(text, request, formats, token_ids))


async def own_chat_tokens(
    chats: OwnChats,
    in_thread: InThread,
    tenant: str,
    text: TextProcessor,
    request: ChatRequest,
    formats: OutputFormats,
    own: OwnChat,
) -> Prompts:
    """Tokens of a chat as `chat_tokens`, by a version's own template. Raises as `OwnChats.encode`, and ApiError
    (400)."""
    check_format(request, formats, text)
    messages, tools = conversation_of(request)
    effort = request.asked_effort[1]
    encoded = await own_tokens(chats, in_thread, tenant, own, messages, tools, formats, effort=effort)
    if effort is not None and not encoded.effort_counts:
        check_effort(request)
    reading = await in_thread(read_prompt, text, request, formats, encoded.token_ids)
    return Prompts([encoded.token_ids], reading=reading)


def conversation_of(request: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Its messages and tools, as templates get them."""
    messages = [message.for_template() for message in request.messages]
    return messages, [tool.model_dump(exclude_none=True) for tool in request.tools or ()]


def read_prompt(
    text: TextProcessor, request: ChatRequest, formats: OutputFormats, token_ids: Sequence[int]
) -> Reading:
    """How the answer to a chat is read whose prompt has these tokens. Raises ApiError (400)."""
    opened = formats.reasoning is not None and text.opens_reasoning(token_ids, formats.reasoning)
    return read_chat(request, formats, text, in_reasoning=opened)


def prompt_tokens(text: TextProcessor, request: Request, max_model_len: int, _: OutputFormats) -> Prompts:
    assert isinstance(request, CompletionRequest)
    prompts: list[Sequence[int]] = []
    echoes: list[Spelling] = []
    for prompt in request.prompts:
        written = prompt if isinstance(prompt, str) else None
        prompts.append(prompt if not isinstance(prompt, str) else text.encode(prompt))
        if len(prompts[-1]) + (request.max_tokens != 0) > max_model_len:
            break
        if request.echo:
            echoes.append(text.spell(prompts[-1], written))
    return Prompts(prompts, echoes)


def _chat_answer(to: AnswerTo) -> Answer:
    asked = Asked.of(to.request, to.prompts, to.n)
    return ChatFormat(
        to.id,
        to.created,
        to.request.model,
        to.logprobs,
        asked,
        to.prompt_logprobs,
        to.fingerprint,
        reasons=to.reasons,
    )


def _completion_answer(to: AnswerTo) -> Answer:
    asked = Asked.of(to.request, to.prompts, to.n)
    return CompletionFormat(
        to.id, to.created, to.request.model, to.logprobs, asked, to.prompt_logprobs, to.fingerprint
    )


CHAT = Kind(
    ChatRequest, chat_tokens, _chat_answer, ChatLogprobs, "/v1/chat/completions", "chatcmpl-", "messages"
)
COMPLETION = Kind(
    CompletionRequest,
    prompt_tokens,
    _completion_answer,
    CompletionLogprobs,
    "/v1/completions",
    "cmpl-",
    "prompt",
    continues=True,
)


def _responses_answer(to: AnswerTo) -> Answer:
    assert isinstance(to.request, ResponsesChat)
    assert isinstance(to.logprobs, ChatLogprobs)
    return ResponsesAnswer(to.id, to.created, to.request.asked, to.logprobs)


RESPONSES = Kind(
    ResponsesRequest,
    chat_tokens,
    _responses_answer,
    ChatLogprobs,
    "/v1/responses",
    "resp_",
    "input",
    request=responses_to_chat,
    kept=_kept_of_streams_too,
)


def _compact_answer(to: AnswerTo) -> Answer:
    assert isinstance(to.request, CompactChat)
    return CompactAnswer(to.id, to.created, to.request.asked)


COMPACTION = Kind(
    CompactRequest,
    chat_tokens,
    _compact_answer,
    ChatLogprobs,
    "/v1/responses/compact",
    "resp_",
    "input",
    request=compact_to_chat,
)


def _messages_answer(to: AnswerTo) -> Answer:
    assert isinstance(to.request, MessagesChat)
    assert isinstance(to.request.asked, MessagesRequest)
    return MessagesAnswer(to.id, to.request.asked, len(to.prompts[0]), to.max_tokens[0], to.label)


MESSAGES = Kind(
    MessagesRequest,
    chat_tokens,
    _messages_answer,
    ChatLogprobs,
    "/v1/messages",
    "msg_",
    "messages",
    request=messages_to_chat,
    key_header=KEY_HEADER,
    check_head=check_version,
)


def input_tokens(text: TextProcessor, request: Request, max_model_len: int, _: OutputFormats) -> Prompts:
    assert isinstance(request, PromptsToEmbed)
    special = request.asked.add_special_tokens is not False
    prompts: list[Sequence[int]] = []
    for prompt in request.prompts:
        prompts.append(
            prompt if not isinstance(prompt, str) else text.encode(prompt, add_special_tokens=special)
        )
        if len(prompts[-1]) > max_model_len:
            break
    return Prompts(prompts)


def _embeddings_answer(to: AnswerTo) -> Answer:
    assert isinstance(to.request, PromptsToEmbed)
    return EmbeddingsAnswer(to.request.asked)


def _fit_embeddings(request: Request, model: ResolvedModel, info: EngineInfo) -> Request:
    assert isinstance(request, PromptsToEmbed)
    return fitted(request, model, info)


def _kept_embeddings(plan: GenerationPlan, info: EngineInfo) -> int:
    assert isinstance(plan.request, PromptsToEmbed)
    return room_of(plan.request.asked, info)


EMBEDDINGS = Kind(
    EmbeddingsRequest,
    input_tokens,
    _embeddings_answer,
    CompletionLogprobs,
    "/v1/embeddings",
    "embd-",
    "prompt",
    request=to_prompts,
    kept=_kept_embeddings,
    fit=_fit_embeddings,
)


def _sample_answer(to: AnswerTo) -> Answer:
    assert isinstance(to.request, SampledPrompt)
    return SampleAnswer(to.request.asked, len(to.prompts[0]))


SAMPLE = Kind(
    SampleRequest,
    prompt_tokens,
    _sample_answer,
    CompletionLogprobs,
    "/api/v1/asample",
    "sample-",
    "prompt",
    continues=True,
    request=sample_to_completion,
    key_header=KEY_HEADER,
)
