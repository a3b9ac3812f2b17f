"""`/tokenize` and `/detokenize`: the model's tokenizer, for clients that count or cut their prompts.

Each costs one request of the caller's rates and none of its tokens, and runs in the tenant's share of the threads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Scope

from loraplex.api.anthropic.schemas import CountRequest
from loraplex.api.auth import authenticate
from loraplex.api.context import DataContext, context_of
from loraplex.api.deps import ApiServices
from loraplex.api.errors import invalid
from loraplex.api.generation.charge import admitted
from loraplex.api.generation.invocation import appended_invocation, with_invocation
from loraplex.api.generation.own_chat import InThread, own_tokens
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.openai.body import parse_json, read_json
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.strict import is_empty
from loraplex.api.openai.tokenizing import Detokenize, Detokenized, TokenizeChat, Tokenized, TokenizeText
from loraplex.api.route import Caller, DataRoute, Services
from loraplex.serving.errors import ServingError, WorkTimeSpent, WorkUnavailable
from loraplex.serving.output.formats import OutputFormats

REFUSALS = (400, 404, 408, 413, 415, 429, 500, 503)


class TokenizerRoute(DataRoute):
    """Takes a JSON body of one of `schemas`, and charges its caller before the body is read."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        answer: type[BaseModel],
        capacity: TenantCapacity,
        schemas: Callable[[Any], type[TokenizeText | TokenizeChat | Detokenize | CountRequest]],
        *,
        key_header: str | None = None,
        check_head: Callable[[Scope], None] = lambda _: None,
        **options: Any,
    ) -> None:
        """`schemas` chooses by the JSON value; `key_header` and `check_head` are as in a Kind."""
        super().__init__(
            path,
            endpoint,
            methods=["POST"],
            operation_id=endpoint.__name__,
            response_model=answer,
            refusals=REFUSALS,
            **options,
        )
        self._key_header = key_header
        self._check_head = check_head
        self._capacity = capacity
        self._schemas = schemas

    @asynccontextmanager
    async def asked(self, request: Request) -> AsyncIterator[Any]:
        services: ApiServices = request.app.state.services
        context = context_of(request.scope)
        principal = await authenticate(request.scope, services.authenticator, self._key_header)
        tenant = principal.tenant_id or ""
        async with admitted(services.limiter, services.metrics, context, principal):
            self._check_head(request.scope)
            with (
                self._capacity.request(context.tenant_id),
                self._capacity.body(context.tenant_id) as take,
            ):
                body = await read_json(
                    request.scope,
                    request.receive,
                    max_bytes=services.max_body,
                    timeout_s=services.stall_timeout,
                    take=take,
                )

                def parse() -> TokenizeText | TokenizeChat | Detokenize | CountRequest:
                    given = parse_json(body)
                    # Before anything can be wrong, so that the log of a refusal names it.
                    if isinstance(given, dict) and isinstance(model := given.get("model"), str):
                        context.model = model
                    return parse_request(self._schemas(given), given)

                parsed = await self._capacity.in_thread(tenant, parse)
                context.model = parsed.model or services.served_model_name
                model = await services.resolver.resolve(principal, context.model)
                context.adapter, context.resolved = model.adapter, True
                context.formats = services.formats.of_version(
                    model.serving.tool_format, model.serving.reasoning_format
                )
                if services.own_chats is not None:
                    context.own = await services.own_chats.of(model)
                context.appends = appended_invocation(model)
                yield parsed


def tokenizer_routes(capacity: TenantCapacity) -> list[TokenizerRoute]:
    """Answers are written in the threads as well: one of a whole context's tokens would hold up the event loop."""

    async def tokenize(
        caller: Caller, services: Services, request: TokenizeText | TokenizeChat, http: Request
    ) -> Response:
        """The tokens of a text, or of a conversation as its chat template writes it."""

        context = context_of(http.scope)

        def answer_with(ids: Sequence[int]) -> bytes:
            if isinstance(request, TokenizeText) or request.add_generation_prompt is not False:
                ids = with_invocation(ids, context.appends)
            names = services.text.names(ids) if request.return_token_strs else None
            answer = Tokenized(
                count=len(ids), max_model_len=services.max_model_len, tokens=list(ids), token_strs=names
            )
            return answer.model_dump_json().encode()

        in_thread = partial(capacity.in_thread, caller.tenant_id or "")
        try:
            if isinstance(request, TokenizeChat) and context.own is not None and context.own.templates:
                ids = await _own_encoded(services, request, context, in_thread)
                content = await in_thread(answer_with, ids)
            else:
                content = await in_thread(lambda: answer_with(_encoded(services, request, context.formats)))
        except (WorkUnavailable, WorkTimeSpent):
            raise
        except ServingError as error:  # too long, or not what the template takes
            source = "prompt" if isinstance(request, TokenizeText) else "messages"
            raise invalid(source, error.message, error.code) from error
        return Response(content, media_type="application/json")

    async def detokenize(caller: Caller, services: Services, request: Detokenize) -> Response:
        """The text of tokens, control tokens written out."""
        vocab_size, most = services.engine.info.vocab_size, services.max_model_len
        if len(request.tokens) > most:
            message = f"'tokens' has {len(request.tokens)} tokens, more than the context of {most}."
            raise invalid("tokens", message, "context_length_exceeded")
        if (highest := max(request.tokens, default=0)) >= vocab_size:
            message = f"'tokens' has token id {highest}, beyond the model's {vocab_size} tokens."
            raise invalid("tokens", message)

        def spell() -> bytes:
            return Detokenized(prompt=services.text.spell(request.tokens).text).model_dump_json().encode()

        content = await capacity.in_thread(caller.tenant_id or "", spell)
        return Response(content, media_type="application/json")

    return [
        TokenizerRoute("/tokenize", tokenize, Tokenized, capacity, _tokenize_schema),
        TokenizerRoute("/detokenize", detokenize, Detokenized, capacity, lambda _: Detokenize),
    ]


def _tokenize_schema(given: object) -> type[TokenizeText | TokenizeChat]:
    if not isinstance(given, dict):
        return TokenizeText
    if given.get("messages") is None:
        if given.get("prompt") is None:
            raise invalid("prompt", "Missing required field: 'prompt', or 'messages' for a chat.")
        return TokenizeText
    if not is_empty(given.get("prompt")):
        raise invalid("prompt", "Give either 'prompt' or 'messages', not both.", "unsupported_field")
    return TokenizeChat


def _encoded(
    services: ApiServices, request: TokenizeText | TokenizeChat, formats: OutputFormats
) -> list[int]:
    text = services.text
    if isinstance(request, TokenizeText):
        return text.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    messages, tools = _conversation(request)
    opens_answer = request.add_generation_prompt is not False
    return text.encode_chat(
        messages, tools or None, add_generation_prompt=opens_answer, tool_format=formats.tools
    )


async def _own_encoded(
    services: ApiServices, request: TokenizeChat, context: DataContext, in_thread: InThread
) -> list[int]:
    assert services.own_chats is not None
    assert context.own is not None
    messages, tools = _conversation(request)
    encoded = await own_tokens(
        services.own_chats,
        in_thread,
        context.tenant_id,
        context.own,
        messages,
        tools,
        context.formats,
        add_generation_prompt=request.add_generation_prompt is not False,
    )
    return encoded.token_ids


def _conversation(request: TokenizeChat) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    messages = [message.for_template() for message in request.messages]
    return messages, [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
