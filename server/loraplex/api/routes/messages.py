"""`/v1/messages/count_tokens`: how long a prompt is, before it is asked. It costs what `/tokenize` costs."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from loraplex.api.anthropic.answer_schemas import CountedTokens
from loraplex.api.anthropic.headers import KEY_HEADER, check_version
from loraplex.api.anthropic.schemas import CountRequest, to_chat
from loraplex.api.context import context_of
from loraplex.api.documents import KEY_IN_EITHER_HEADER, messages_refused
from loraplex.api.errors import in_client_terms, invalid
from loraplex.api.generation.invocation import with_invocation
from loraplex.api.generation.kinds import chat_tokens, own_chat_tokens
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.route import Caller, Services
from loraplex.api.routes.generation import Version
from loraplex.api.routes.tokenizer import TokenizerRoute
from loraplex.serving.errors import ServingError, WorkTimeSpent, WorkUnavailable

REFUSALS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 529)


def count_route(capacity: TenantCapacity) -> TokenizerRoute:
    async def count_message_tokens(
        caller: Caller, services: Services, http: Request, request: CountRequest, version: Version = None
    ) -> Response:
        """The number of tokens that a conversation has as a prompt, by Anthropic's Messages API."""

        context, tenant = context_of(http.scope), caller.tenant_id or ""
        in_thread = partial(capacity.in_thread, tenant)
        chat = await in_thread(to_chat, request)
        try:
            with in_client_terms(chat.client_field):
                if context.own is not None and context.own.templates:
                    assert services.own_chats is not None
                    prompts = await own_chat_tokens(
                        services.own_chats,
                        in_thread,
                        tenant,
                        services.text,
                        chat,
                        context.formats,
                        context.own,
                    )
                else:
                    prompts = await in_thread(
                        chat_tokens, services.text, chat, services.max_model_len, context.formats
                    )
        except (WorkUnavailable, WorkTimeSpent):
            raise
        except ServingError as error:  # too long, or not what the template takes
            raise invalid("messages", error.message, error.code) from error
        prompt = await in_thread(with_invocation, prompts.token_ids[0], context.appends)
        content = CountedTokens(input_tokens=len(prompt)).model_dump_json().encode()
        return Response(content, media_type="application/json")

    return TokenizerRoute(
        "/v1/messages/count_tokens",
        count_message_tokens,
        CountedTokens,
        capacity,
        lambda _: CountRequest,
        key_header=KEY_HEADER,
        check_head=check_version,
        responses=messages_refused(*REFUSALS),
        openapi_extra=KEY_IN_EITHER_HEADER,
    )
