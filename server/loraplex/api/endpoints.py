"""`/v1/chat/completions` and `/v1/completions`: the way of one request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import structlog
from starlette.types import Receive, Scope, Send

from loraplex.api.account import Account, outcome_of
from loraplex.api.auth import authenticate
from loraplex.api.body import parse_json, read_body
from loraplex.api.charge import Charge, admitted
from loraplex.api.client_watch import ClientWatch, watch_client
from loraplex.api.context import RequestContext, context_of
from loraplex.api.deadline import Deadline
from loraplex.api.deps import ApiServices, Text
from loraplex.api.errors import ClientGone, from_exception, invalid
from loraplex.api.formats import DONE, AnswerFormat, Asked, ChatFormat, CompletionFormat, WholeChoice, sse
from loraplex.api.generation import Delta, Generation
from loraplex.api.limit_headers import limit_headers
from loraplex.api.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs
from loraplex.api.metrics import adapter_label
from loraplex.api.parsing import parse_request
from loraplex.api.places import Places
from loraplex.api.planning import GenerationPlan, engine_requests, make_plan
from loraplex.api.schemas import ChatRequest, CompletionRequest
from loraplex.control.types import Principal, Reservation, ResolvedModel
from loraplex.serving.errors import ServingError
from loraplex.serving.text import Spelling

PIECE_BYTES = 256 << 10
INLINE_BYTES = 64 << 10
"""A body up to so large is parsed and checked on the event loop; a larger one, in a thread."""

log = structlog.get_logger("loraplex.api")


@dataclass(frozen=True)
class Prompts:
    """Tokens, and the texts that answers begin with where they repeat their prompt."""

    token_ids: Sequence[Sequence[int]]
    echoes: Sequence[Spelling] = ()


@dataclass(frozen=True)
class Kind:
    """What sets one of the two routes apart. `source` is the field that holds the prompt; `continues`: the
    answer goes on where the prompt's text ended. `tokenise` stops at a prompt that fills the context of so many
    tokens: it is refused, whatever the others are."""

    schema: type[ChatRequest] | type[CompletionRequest]
    tokenise: Callable[[Text, ChatRequest | CompletionRequest, int], Prompts]
    answer: type[AnswerFormat]
    logprobs: type[ChatLogprobs] | type[CompletionLogprobs]
    path: str
    id_prefix: str
    source: str
    continues: bool


def _chat_tokens(text: Text, request: ChatRequest | CompletionRequest, _: int) -> Prompts:
    assert isinstance(request, ChatRequest)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
    return Prompts([text.encode_chat(messages, tools or None)])


def _prompt_tokens(text: Text, request: ChatRequest | CompletionRequest, max_model_len: int) -> Prompts:
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


CHAT = Kind(
    ChatRequest,
    _chat_tokens,
    ChatFormat,
    ChatLogprobs,
    "/v1/chat/completions",
    "chatcmpl-",
    "messages",
    continues=False,
)
COMPLETION = Kind(
    CompletionRequest,
    _prompt_tokens,
    CompletionFormat,
    CompletionLogprobs,
    "/v1/completions",
    "cmpl-",
    "prompt",
    continues=True,
)


class GenerationEndpoint:
    """An ASGI app for one of the two routes; both share `places`."""

    def __init__(self, services: ApiServices, kind: Kind, places: Places) -> None:
        self._services = services
        self._kind = kind
        self._places = places
        self._logprobs = kind.logprobs(services.text.token)
        self._prompt_logprobs = PromptLogprobs(services.text.token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, context = self._services, context_of(scope)
        principal = await authenticate(scope, services.authenticator)
        async with admitted(services.limiter, services.metrics, context, principal) as charge:
            context.deadline = Deadline.of(scope, context.started)
            with self._places.request(context.tenant_id):
                await self._serve(scope, receive, send, charge)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, charge: Charge) -> None:
        services, context, principal = self._services, context_of(scope), charge.principal
        timeout = services.stall_timeout
        with context.deadline.enforced():
            body = await read_body(scope, receive, max_bytes=services.max_body, timeout_s=timeout)
            request = await self._parse(body, principal, context)
        del body
        async with watch_client(receive, send, context.transport, timeout) as client:
            with context.deadline.enforced():
                model = await services.resolver.resolve(principal, request.model, user=request.user)
                context.adapter, context.resolved = model.adapter, True
                prompts = await self._tokenise(request, principal)
            plan = make_plan(
                request,
                prompts.token_ids,
                max_model_len=services.max_model_len,
                vocab_size=services.engine.info.vocab_size,
                default_max_tokens=services.default_max_tokens,
                echoes=prompts.echoes,
            )
            self._check_choices(plan)
            kept = 0 if request.stream else plan.max_logprobs
            with self._places.kept_logprobs(principal.tenant_id or "", kept):
                await self._reserved(client, context, charge, model, plan)

    async def _parse(
        self, body: bytes, principal: Principal, context: RequestContext
    ) -> ChatRequest | CompletionRequest:
        def parse() -> ChatRequest | CompletionRequest:
            given = parse_json(body)
            # Before anything can be wrong, so that the log of a refusal names it.
            if isinstance(given, dict) and isinstance(model := given.get("model"), str):
                context.model = model
            return parse_request(self._kind.schema, given)

        if len(body) <= INLINE_BYTES:
            return parse()
        return await self._places.in_thread(principal.tenant_id or "", parse)

    async def _tokenise(self, request: ChatRequest | CompletionRequest, principal: Principal) -> Prompts:
        services = self._services
        try:
            return await self._places.in_thread(
                principal.tenant_id or "", self._kind.tokenise, services.text, request, services.max_model_len
            )
        except ServingError as error:  # too long, or not what the template takes
            raise invalid(self._kind.source, error.message, error.code) from error

    def _check_choices(self, plan: GenerationPlan) -> None:
        """They are sent together, before the engine runs any of them: all must fit into an empty queue."""
        most = self._services.engine.info.max_waiting
        if plan.num_choices > most:
            message = (
                f"{plan.num_choices} sequences were asked for; this server takes at most {most} at a time."
            )
            raise invalid("n" if plan.n > 1 else self._kind.source, message)

    async def _reserved(
        self,
        client: ClientWatch,
        context: RequestContext,
        charge: Charge,
        model: ResolvedModel,
        plan: GenerationPlan,
    ) -> None:
        """From here on there is no way out that leaves a sequence running or an account without its row, and the charge
        is settled after both."""
        services, principal = self._services, charge.principal
        reservation = await charge.reserve(plan, self._kind.source)
        generation: Generation | None = None
        account: Account | None = None
        outcome: str | None = None
        try:
            account = Account.open(services.ledger, context, principal, model, plan, self._kind.path)
            client.check()
            context.deadline.check()
            requests = engine_requests(
                plan,
                internal_id=context.internal_id,
                tenant_id=principal.tenant_id or "",
                weight=principal.weight,
                adapter=model.adapter,
                max_output_tokens=reservation.max_output_tokens,
                deadline_s=context.deadline.left_s,
            )
            generation = Generation.start(
                services.engine,
                services.text,
                plan,
                requests,
                services.metrics,
                continues=self._kind.continues,
            )
            await self._answer(client, context, model, reservation, plan, generation, account)
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            with anyio.CancelScope(shield=True):
                if generation is not None:
                    await generation.close(context.tenant_id)
                    usage = generation.usage()
                    context.prompt_tokens = usage.prompt_tokens
                    context.completion_tokens = usage.completion_tokens
                if account is not None:
                    await account.close(generation, outcome)

    async def _answer(
        self,
        client: ClientWatch,
        context: RequestContext,
        model: ResolvedModel,
        reservation: Reservation,
        plan: GenerationPlan,
        generation: Generation,
        account: Account,
    ) -> None:
        answer = self._kind.answer(
            f"{self._kind.id_prefix}{context.internal_id}",
            int(time.time()),
            plan.request.model,
            self._logprobs,
            Asked.of(plan),
            self._prompt_logprobs,
        )
        if plan.request.stream:
            # What fails before the first event is still a proper HTTP status.
            with context.deadline.enforced():
                first = await generation.next()
                generation.check()
            headers = _headers(model, reservation, generation)
            headers += [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            headers += [(b"x-accel-buffering", b"no")]
            await client.send({"type": "http.response.start", "status": 200, "headers": headers})
            last = await self._stream(client, context, plan, generation, answer, first)
            await account.close(generation, context.outcome)
            await client.send({"type": "http.response.body", "body": last + DONE})
            return
        choices = [WholeChoice() for _ in range(plan.num_choices)]
        while True:
            with context.deadline.enforced():
                deltas = await generation.next()
            if not deltas:
                break
            client.check()
            for delta in deltas:
                answer.add(choices[delta.index], delta)
        await generation.last_events()
        body = answer.whole(choices, generation.usage())
        await account.close(generation)
        headers = _headers(model, reservation, generation)
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await client.send({"type": "http.response.start", "status": 200, "headers": headers})
        # In pieces, so that this ends when the client has read nearly all: what is kept for it is counted until then.
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            piece = {"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)}
            await client.send(piece)

    async def _stream(
        self,
        client: ClientWatch,
        context: RequestContext,
        plan: GenerationPlan,
        generation: Generation,
        answer: AnswerFormat,
        deltas: Sequence[Delta],
    ) -> bytes:
        """Sends what comes; returns what is left to send before `[DONE]`: the usage, or the error."""
        try:
            chunk = answer.opening(plan.num_choices)
            while deltas:
                chunk += b"".join(map(answer.delta, deltas))
                if chunk:
                    await client.send({"type": "http.response.body", "body": chunk, "more_body": True})
                with context.deadline.enforced():
                    deltas, chunk = await generation.next(), b""
            await generation.last_events()
            return answer.closing(generation.usage())
        except ClientGone:
            raise
        except Exception as error:
            failure = from_exception(error)
            context.outcome, context.param = failure.code, failure.param
            if failure.status == 500:
                log.error("stream_failed", request_id=context.label, id=context.internal_id, exc_info=error)
            await generation.cut()  # so that what was drawn is known
            return sse(failure.body())


def _headers(
    model: ResolvedModel, reservation: Reservation, generation: Generation
) -> list[tuple[bytes, bytes]]:
    headers = dict(limit_headers(reservation.requests, reservation.tokens))
    if model.adapter is not None:
        headers["x-loraplex-adapter"] = adapter_label(model.adapter)
        if generation.adapter_state is not None:
            headers["x-loraplex-adapter-state"] = generation.adapter_state
    return [(name.encode(), value.encode()) for name, value in headers.items()]
