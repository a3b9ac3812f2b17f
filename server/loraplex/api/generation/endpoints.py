"""The way of one request that generates, on any of the routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio
import structlog
from starlette.types import Receive, Scope, Send

from loraplex.adapters.admission.chat_files import OwnChat
from loraplex.api.auth import authenticate
from loraplex.api.context import DataContext, context_of
from loraplex.api.deadline import Deadline
from loraplex.api.deps import ApiServices
from loraplex.api.errors import from_exception, in_client_terms, invalid
from loraplex.api.fingerprint import HEADER, fingerprint
from loraplex.api.generation.charge import Charge, admitted
from loraplex.api.generation.client_watch import ClientWatch, watch_client
from loraplex.api.generation.constraints import checked_grammar
from loraplex.api.generation.deciding import Deciding
from loraplex.api.generation.decision import Decision, is_decision, read_decision
from loraplex.api.generation.generation import Generation
from loraplex.api.generation.invocation import invoke
from loraplex.api.generation.kinds import (
    AnswerTo,
    Kind,
    Prompts,
    Request,
    StreamedAnswer,
    own_chat_tokens,
    read_prompt,
)
from loraplex.api.generation.own_chat import own_tokens
from loraplex.api.generation.planning import GenerationPlan, engine_requests, make_plan
from loraplex.api.generation.tenant_capacity import TenantCapacity
from loraplex.api.generation.usage_entry import UsageEntry, status_of
from loraplex.api.limit_headers import limit_headers
from loraplex.api.metrics import adapter_label, count_request
from loraplex.api.millisecond_headers import MAX_LOAD_HEADER, read_milliseconds
from loraplex.api.openai.body import parse_json, read_json
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.formats import WholeChoice
from loraplex.api.openai.logprobs import PromptLogprobs
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.schemas import ChatRequest
from loraplex.api.outcome import RequestOutcome
from loraplex.api.pooling.prompts import PooledPrompts, own_tokens_of
from loraplex.control.types import Principal, Reservation, ResolvedModel
from loraplex.control.usage.outcome import PROPER
from loraplex.control.usage.records import CANCELLED
from loraplex.http.errors import ClientGone
from loraplex.serving.errors import ServingError, WorkTimeSpent, WorkUnavailable
from loraplex.serving.output.formats import OutputFormats
from loraplex.serving.text.chat_template import writes_pairs

PIECE_BYTES = 256 << 10
INLINE_BYTES = 64 << 10
"""A body up to so large is parsed and checked on the event loop; a larger one, in a thread."""
TURN_S = 0.005
"""Longest time that one answer may hold the event loop."""
BATCH = "batch:"
"""Before the route of a batch's request in the ledger."""
PING_S = 15.0
"""A stream is not silent for much longer while its answer goes on: a call that is held until it is complete may take
minutes, and proxies cut a connection after one."""

log = structlog.get_logger("loraplex.api")


class GenerationEndpoint:
    """An ASGI app for one of the routes; all share `capacity`."""

    def __init__(
        self,
        services: ApiServices,
        kind: Kind,
        capacity: TenantCapacity,
        *,
        background: bool = False,
        model: ResolvedModel | None = None,
    ) -> None:
        """`background`: its requests run in what others leave, and say nothing of a release's versions. `model` answers
        all of them, whatever they name; None: the one that they name."""
        self._services = services
        self._background = background
        self._model = model
        self._kind = kind
        self._capacity = capacity
        self._logprobs = kind.logprobs(services.text.token)
        self._prompt_logprobs = PromptLogprobs(services.text.token)

    @property
    def path(self) -> str:
        return self._kind.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, context = self._services, context_of(scope)
        principal = await authenticate(scope, services.authenticator, self._kind.key_header)
        async with admitted(services.limiter, services.metrics, context, principal) as charge:
            context.deadline = Deadline.of(scope, context.started)
            context.max_load_ms = read_milliseconds(scope, MAX_LOAD_HEADER, 0)
            self._kind.check_head(scope)
            with (
                self._capacity.request(context.tenant_id),
                self._capacity.body(context.tenant_id) as take,
                in_client_terms(lambda field: context.client_field(field)),
            ):
                await self._serve(scope, receive, send, charge, take)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, charge: Charge, take: Callable[[int], None]
    ) -> None:
        services, context, principal = self._services, context_of(scope), charge.principal
        timeout = services.stall_timeout
        with context.deadline.enforced():
            body = await read_json(scope, receive, max_bytes=services.max_body, timeout_s=timeout, take=take)
            request = await self._parse(body, principal, context)
            context.model = request.model
        del body
        if context.trace is not None:
            context.trace.asked(request)
        context.client_field = request.client_field
        async with watch_client(receive, send, context, timeout) as client:
            with context.deadline.enforced():
                model = self._model or await services.resolver.resolve(
                    principal, request.model, user=request.user
                )
                if self._background:
                    model = replace(model, release=None)
                context.adapter, context.resolved = model.adapter, True
                request = self._kind.fit(request, model, services.engine.info)
                own = None if services.own_chats is None else await services.own_chats.of(model)
                prompts = await self._tokenise(request, self._formats(model), principal, own)
                prompts, places = await self._invoke(prompts, request, model, principal)
            with context.deadline.enforced():
                decision = await self._decision(request, principal)
            plan = make_plan(
                request,
                prompts.token_ids,
                max_model_len=services.max_model_len,
                vocab_size=services.engine.info.vocab_size,
                default_max_tokens=services.default_max_tokens,
                echoes=prompts.echoes,
                reading=prompts.reading,
                decision=decision,
            )
            self._check_choices(plan)
            with context.deadline.enforced():
                grammar = await checked_grammar(
                    request, prompts.reading, principal.tenant_id or "", services.grammars, self._capacity
                )
            plan = replace(plan, grammar=grammar, end_ids=() if own is None else own.eos_ids, places=places)
            kept = self._kind.kept(plan, services.engine.info)
            with self._capacity.kept_logprobs(principal.tenant_id or "", kept):
                await self._reserved(client, context, charge, model, plan)

    async def _parse(self, body: bytes, principal: Principal, context: DataContext) -> Request:
        def parse() -> Request:
            given = parse_json(body)
            # Before anything can be wrong, so that the log of a refusal names it.
            if isinstance(given, dict) and isinstance(model := given.get("model"), str):
                context.model = model
            return self._kind.request(parse_request(self._kind.schema, given))

        if len(body) <= INLINE_BYTES:
            return parse()
        return await self._capacity.in_thread(principal.tenant_id or "", parse)

    async def _tokenise(
        self, request: Request, formats: OutputFormats, principal: Principal, own: OwnChat | None
    ) -> Prompts:
        services, tenant = self._services, principal.tenant_id or ""
        text, in_thread = services.text, partial(self._capacity.in_thread, tenant)
        try:
            if own is not None and own.templates:
                assert services.own_chats is not None
                chats = services.own_chats
                if isinstance(request, ChatRequest):
                    return await own_chat_tokens(chats, in_thread, tenant, text, request, formats, own)
                if isinstance(request, PooledPrompts) and request.has_pairs and writes_pairs(own.templates):
                    encode = partial(own_tokens, chats, in_thread, tenant, own, tools=(), formats=formats)
                    return Prompts(await own_tokens_of(request, services.max_model_len, encode))
            return await in_thread(self._kind.tokenise, text, request, services.max_model_len, formats)
        except (WorkUnavailable, WorkTimeSpent):
            raise
        except ServingError as error:  # too long, or not what the template takes
            raise invalid(self._kind.source, error.message, error.code) from error

    async def _invoke(
        self, prompts: Prompts, request: Request, model: ResolvedModel, principal: Principal
    ) -> tuple[Prompts, tuple[int | None, ...]]:
        if model.adapter is None or not model.adapter.invocation:
            return prompts, ()
        text, read = self._services.text, None
        if isinstance(request, ChatRequest):
            read = partial(read_prompt, text, request, self._formats(model))
        tenant = principal.tenant_id or ""
        return await self._capacity.in_thread(
            tenant, invoke, prompts, model, self._kind.source, text.spell, read
        )

    async def _decision(self, request: Request, principal: Principal) -> Decision | None:
        if not is_decision(request):
            return None
        tenant, text = principal.tenant_id or "", self._services.text
        return await self._capacity.in_thread(tenant, read_decision, request, text)

    def _formats(self, model: ResolvedModel) -> OutputFormats:
        serving = model.serving
        return self._services.formats.of_version(serving.tool_format, serving.reasoning_format)

    def _fingerprint(self, model: ResolvedModel) -> str:
        services = self._services
        chat_digest = None if services.own_chats is None else model.serving.chat_digest
        return fingerprint(
            services.engine.info, services.text_build, model.adapter, self._formats(model), chat_digest
        )

    def _check_choices(self, plan: GenerationPlan) -> None:
        """Check that all choices fit into an empty queue: they are sent together, before the engine runs any of
        them."""
        most = self._services.engine.info.max_waiting
        if (number := plan.num_sequences) > most:
            message = f"{number} sequences were asked for; this server takes at most {most} at a time."
            raise invalid(plan.sequences_field(self._kind.source), message)

    async def _reserved(
        self,
        client: ClientWatch,
        context: DataContext,
        charge: Charge,
        model: ResolvedModel,
        plan: GenerationPlan,
    ) -> None:
        """However this ends, no sequence is left running and no usage entry without its row. The charge is settled
        after both."""
        services, principal = self._services, charge.principal
        reservation = await charge.reserve(plan, self._kind.source)
        generation: Generation | None = None
        entry: UsageEntry | None = None
        failure: str | None = None
        try:
            path = f"{BATCH}{self._kind.path}" if self._background else self._kind.path
            entry = UsageEntry.open(services, context, principal, model, plan, path)
            client.check()
            context.deadline.check()
            requests = engine_requests(
                plan,
                internal_id=context.internal_id,
                tenant_id=principal.tenant_id or "",
                adapter=model.adapter,
                max_output_tokens=reservation.max_output_tokens,
                deadline_s=context.deadline.left_s,
                max_load_s=None if context.max_load_ms is None else context.max_load_ms / 1000,
                background=self._background,
            )
            generates = Generation if plan.decision is None else Deciding
            generation = generates.start(
                services.engine,
                services.text,
                plan,
                requests,
                services.metrics,
                terms=principal.terms,
                continues=self._kind.continues,
                timed=not self._background,
            )
            await self._answer(client, context, model, reservation, plan, generation, entry)
        except BaseException as error:
            failure = status_of(error)
            raise
        finally:
            with anyio.CancelScope(shield=True):
                outcome = RequestOutcome(failure or CANCELLED)
                if generation is not None:
                    await generation.close()
                    outcome = context.generated = generation.outcome(failure)
                    count_request(services.metrics, context.tenant_id, model.adapter, outcome)
                    context.prompt_tokens = outcome.usage.prompt_tokens
                    context.completion_tokens = outcome.usage.completion_tokens
                    if context.trace is not None:
                        context.trace.generated(f"{self._kind.id_prefix}{context.internal_id}", outcome)
                if entry is not None:
                    await entry.close(outcome)
            if services.shadows is not None and generation is not None and outcome.status in PROPER:
                stops = plan.request.stop
                services.shadows.offer(context.internal_id, model, generation.only_answer, stops)

    async def _answer(
        self,
        client: ClientWatch,
        context: DataContext,
        model: ResolvedModel,
        reservation: Reservation,
        plan: GenerationPlan,
        generation: Generation,
        entry: UsageEntry,
    ) -> None:
        of_answer = self._fingerprint(model)
        answer = self._kind.answer(
            AnswerTo(
                f"{self._kind.id_prefix}{context.internal_id}",
                context.label,
                int(time.time()),
                plan.request,
                plan.prompts,
                plan.max_tokens,
                plan.n,
                self._logprobs,
                self._prompt_logprobs,
                plan.reading.reasons,
                of_answer,
            )
        )
        if plan.request.stream:
            assert isinstance(answer, StreamedAnswer)
            # What fails before the first event is still a proper HTTP status.
            with context.deadline.enforced():
                first = await generation.next()
                generation.check()
            headers = _headers(model, reservation, generation, of_answer)
            headers += [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
            ]
            headers += [(b"x-accel-buffering", b"no")]
            await client.send({"type": "http.response.start", "status": 200, "headers": headers})
            # In a task of its own: what wakes the request's own task goes through all layers of the application.
            last = await asyncio.create_task(self._stream(client, context, plan, generation, answer, first))
            await entry.close(generation.outcome(context.outcome))
            await client.send_body(last + answer.end, more=False)
            return
        choices = [WholeChoice() for _ in range(plan.num_choices)]
        turned = time.monotonic()
        while True:
            with context.deadline.enforced():
                deltas = await generation.next()
            if not deltas:
                break
            client.check()
            for delta in deltas:
                answer.add(choices[delta.index], delta)
            if time.monotonic() - turned > TURN_S:
                # What has come already is read without a turn of the loop, and others are answered in between.
                await asyncio.sleep(0)
                turned = time.monotonic()
        await generation.last_events()
        body = answer.whole(choices, generation.usage())
        await entry.close(generation.outcome())
        headers = _headers(model, reservation, generation, of_answer)
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await client.send({"type": "http.response.start", "status": 200, "headers": headers})
        # In pieces, so that this ends when the client has read nearly all: what is kept for it is counted until then.
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await client.send_body(body[start:end], more=end < len(body))

    async def _stream(
        self,
        client: ClientWatch,
        context: DataContext,
        plan: GenerationPlan,
        generation: Generation,
        answer: StreamedAnswer,
        deltas: Sequence[Delta],
    ) -> bytes:
        """Sends what comes; returns what is left to send before the end: the usage, or the error."""
        try:
            chunk, sent = answer.opening(plan.num_choices), time.monotonic()
            while deltas:
                chunk += b"".join(map(answer.delta, deltas))
                if not chunk and time.monotonic() - sent >= PING_S:
                    chunk = answer.ping
                if chunk:
                    await client.send_body(chunk)
                    sent = time.monotonic()
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
            return answer.failed(failure)


def _headers(
    model: ResolvedModel, reservation: Reservation, generation: Generation, of_answer: str
) -> list[tuple[bytes, bytes]]:
    headers = dict(limit_headers(reservation.windows))
    headers[HEADER] = of_answer
    if model.adapter is not None:
        headers["x-loraplex-adapter"] = adapter_label(model.adapter)
        if generation.adapter_state is not None:
            headers["x-loraplex-adapter-state"] = generation.adapter_state
    return [(name.encode(), value.encode()) for name, value in headers.items()]
