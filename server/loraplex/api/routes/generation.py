"""`/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/responses/compact`, `/v1/messages`,
`/v1/embeddings`, `/classify`, `/score` and `/v1/rerank`, declared for the OpenAPI document.

What answers is an ASGI call of our own under the same application: FastAPI's handler costs a chat 0.3 ms (ADR 0030)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Header, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from loraplex.api.anthropic.headers import VERSION_HEADER, ApiVersion
from loraplex.api.anthropic.schemas import MessagesRequest
from loraplex.api.deadline import HEADER
from loraplex.api.deps import ApiServices
from loraplex.api.documents import ANSWER_HEADERS, KEY_IN_EITHER_HEADER, json_of, messages_refused
from loraplex.api.embeddings.schemas import EmbeddingsRequest
from loraplex.api.generation.endpoints import GenerationEndpoint
from loraplex.api.generation.kinds import CHAT, COMPACTION, COMPLETION, EMBEDDINGS, MESSAGES, RESPONSES
from loraplex.api.generation.pooled_kinds import CLASSIFY, RERANK, SCORE
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.millisecond_headers import MAX_LOAD_HEADER, MAX_MS
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.api.pooling.schemas import ClassifyRequest, RerankRequest, ScoreRequest
from loraplex.api.responses.compaction import CompactRequest
from loraplex.api.responses.schemas import ResponsesRequest
from loraplex.api.route import Caller, DataRoute

REFUSALS = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_EVENTS = "Server-sent events: each one's data is a chunk as JSON, the last one's is [DONE]."
_TYPED_EVENTS = (
    "Server-sent events: each one's data is JSON with a `type` and a number, the last one's is [DONE]."
)
_MESSAGE_EVENTS = (
    "Server-sent events: each one's data is JSON with its `type`; the last one is message_stop or error."
)
MESSAGES_REFUSALS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504, 529)
Version = Annotated[
    ApiVersion | SkipJsonSchema[None],
    Header(alias=VERSION_HEADER, description="Of the API; all are answered alike."),
]
Timeout = Annotated[
    Annotated[int, Field(ge=1, le=MAX_MS)] | SkipJsonSchema[None],
    Header(alias=HEADER, description="Milliseconds that the whole request may take."),
]
MaxLoad = Annotated[
    Annotated[int, Field(ge=0, le=MAX_MS)] | SkipJsonSchema[None],
    Header(
        alias=MAX_LOAD_HEADER,
        description="Milliseconds to wait for an adapter that is not on the device; 0: not at all.",
    ),
]


class GenerationRoute(DataRoute):
    """The function says what the route takes; `endpoint` answers, and asks who calls and what he may itself."""

    def __init__(
        self,
        declared: Callable[..., Any],
        endpoint: GenerationEndpoint,
        *,
        operation_id: str,
        answer: str,
        events: str | None = _EVENTS,
        refused: Mapping[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """`refused`: the error answers, where they are not OpenAI's."""
        content = json_of(answer)
        if events is not None:
            content["text/event-stream"] = {"schema": {"description": events}}
        super().__init__(
            endpoint.path,
            declared,
            methods=["POST"],
            operation_id=operation_id,
            response_class=Response,
            responses={200: {"headers": ANSWER_HEADERS, "content": content}, **(refused or {})},
            refusals=REFUSALS,
            **options,
        )
        self.app = endpoint


async def create_chat_completion(
    _: Caller, request: ChatRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Answer a conversation."""
    raise NotImplementedError


async def create_completion(
    _: Caller, request: CompletionRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Continue a text."""
    raise NotImplementedError


async def create_response(
    _: Caller, request: ResponsesRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Answer a conversation, by OpenAI's Responses API."""
    raise NotImplementedError


async def compact_response(
    _: Caller, request: CompactRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Compact a conversation into a summary."""
    raise NotImplementedError


async def create_message(
    _: Caller,
    request: MessagesRequest,
    version: Version = None,
    timeout_ms: Timeout = None,
    max_load_ms: MaxLoad = None,
) -> Response:
    """Answer a conversation, by Anthropic's Messages API."""
    raise NotImplementedError


async def create_embedding(
    _: Caller, request: EmbeddingsRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Turn texts into vectors."""
    raise NotImplementedError


async def create_classification(
    _: Caller, request: ClassifyRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Classify texts, by a version with a head."""
    raise NotImplementedError


async def create_score(
    _: Caller, request: ScoreRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Score pairs of texts, by a version with a head."""
    raise NotImplementedError


async def create_reranking(
    _: Caller, request: RerankRequest, timeout_ms: Timeout = None, max_load_ms: MaxLoad = None
) -> Response:
    """Rank documents by their relevance to a query, by a version with a head."""
    raise NotImplementedError


_POOLED = (
    (create_classification, CLASSIFY, "Classification"),
    (create_score, SCORE, "Scores"),
    (create_reranking, RERANK, "Reranking"),
)


def _pooled_routes(services: ApiServices, capacity: TenantCapacity) -> list[GenerationRoute]:
    return [
        GenerationRoute(
            declared,
            GenerationEndpoint(services, kind, capacity),
            operation_id=f"create{answer}{number or ''}",
            answer=answer,
            events=None,
        )
        for declared, kinds, answer in _POOLED
        for number, kind in enumerate(kinds)
    ]


def generation_routes(services: ApiServices, capacity: TenantCapacity) -> list[GenerationRoute]:
    return [
        GenerationRoute(
            create_chat_completion,
            GenerationEndpoint(services, CHAT, capacity),
            operation_id="createChatCompletion",
            answer="ChatCompletion",
        ),
        GenerationRoute(
            create_completion,
            GenerationEndpoint(services, COMPLETION, capacity),
            operation_id="createCompletion",
            answer="Completion",
        ),
        GenerationRoute(
            create_response,
            GenerationEndpoint(services, RESPONSES, capacity),
            operation_id="createResponse",
            answer="Response",
            events=_TYPED_EVENTS,
        ),
        GenerationRoute(
            compact_response,
            GenerationEndpoint(services, COMPACTION, capacity),
            operation_id="compactResponse",
            answer="CompactedResponse",
            events=None,
        ),
        GenerationRoute(
            create_message,
            GenerationEndpoint(services, MESSAGES, capacity),
            operation_id="createMessage",
            answer="MessageAnswer",
            events=_MESSAGE_EVENTS,
            refused=messages_refused(*MESSAGES_REFUSALS),
            openapi_extra=KEY_IN_EITHER_HEADER,
        ),
        GenerationRoute(
            create_embedding,
            GenerationEndpoint(services, EMBEDDINGS, capacity),
            operation_id="createEmbedding",
            answer="EmbeddingList",
            events=None,
        ),
        *_pooled_routes(services, capacity),
    ]
