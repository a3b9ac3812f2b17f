"""The choices of one request while the engine makes them: their events in, their text out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from loraplex.api.errors import ApiError, from_engine
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.generation.tool_use import PLAIN
from loraplex.api.metrics import Metrics
from loraplex.api.openai.delta import Delta
from loraplex.api.openai.echo import Echo
from loraplex.api.openai.logprobs import ScoredToken
from loraplex.api.openai.schemas import CompletionRequest
from loraplex.api.outcome import RequestOutcome, SequenceEnd
from loraplex.control.usage.records import CANCELLED
from loraplex.engine.logprobs import ScoreRow
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import AdapterState, EngineRequest, FinishReason, TokenEvent, Usage
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.output.parser import OutputParser
from loraplex.serving.output.parts import AnswerText
from loraplex.serving.text.detokenize import TextStream
from loraplex.serving.text.processor import TextProcessor

LAST_EVENT_S = 2.0
"""How long an answer waits for the terminal event of a sequence that a stop string ended; it comes within a step."""
SETTLE_S = 60.0
"""How long the books wait for it. An engine that is stuck is killed before, which ends all of its sequences."""


@dataclass(slots=True)
class RunningChoice:
    index: int
    stream: RequestStream
    text: TextStream
    parser: OutputParser
    started: float
    echo: Echo | None = None
    echoed: bool = False  # of the choice that brings its log probabilities: in all that share it
    unshown: deque[tuple[int, ScoreRow]] = field(default_factory=deque)  # tokens that wait for their text
    num_chars: int = 0  # of its text so far
    num_told: int = 0  # tokens whose log probabilities were told
    num_reasoning: int = 0  # tokens up to the end of its reasoning
    held: list[Delta] = field(default_factory=list)  # until its echo is told
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: Literal["stop", "length"] | None = None
    terminal: TokenEvent | None = None
    read: asyncio.Task[TokenEvent] | None = field(default=None, repr=False)

    @property
    def shown_all(self) -> bool:
        return self.finish_reason is not None or self.terminal is not None

    @property
    def prompt_tokens(self) -> int:
        """0 of a sequence that never began: the engine tells. Where it died before it could tell, of one without a
        token."""
        usage = self.terminal.usage if self.terminal is not None else None
        if usage is not None:
            return usage.prompt_tokens
        return len(self.stream.request.prompt_ids) if self.stream.num_received else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens that the engine sampled, read here or not; if it died before it could tell, those that it had
        sent. An answer that a stop string ends counts up to the token that completed the string: how many more were
        drawn before the engine heard of it is chance, and not the caller's."""
        if self.text.finished_by_stop is not None:
            return self.text.num_tokens
        usage = self.terminal.usage if self.terminal is not None else None
        return self.stream.num_received if usage is None else usage.completion_tokens

    @property
    def cached_tokens(self) -> int:
        usage = self.terminal.usage if self.terminal is not None else None
        return min(usage.cached_tokens, len(self.stream.request.prompt_ids)) if usage is not None else 0

    @property
    def reason(self) -> FinishReason:
        """How its sequence ended; "abort" where the engine did not tell."""
        if self.finish_reason is not None:
            return self.finish_reason
        ended = self.terminal.finish_reason if self.terminal is not None else None
        return "error" if ended == "error" else "abort"

    def end(self) -> SequenceEnd:
        """The facts of its end, as far as they are known now."""
        request, terminal = self.stream.request, self.terminal
        shared = None
        if request.adapter is not None and request.adapter_from:
            # Blocks before the place alone are the base's: those found are whole ones.
            shared = min(self.cached_tokens, request.adapter_from // BLOCK_SIZE * BLOCK_SIZE)
        return SequenceEnd(
            self.reason,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            max_tokens=request.sampling.max_tokens,
            seconds=(self.last_token or time.monotonic()) - self.started,
            shared_tokens=shared,
            timing=None if terminal is None else terminal.timing,
            error=None if terminal is None or terminal.error is None else terminal.error.code,
        )


class Generation:
    """Made by `start`; `next` until it returns nothing; then, whatever happened, `close`."""

    def __init__(
        self, plan: GenerationPlan, choices: Sequence[RunningChoice], metrics: Metrics, *, timed: bool = True
    ) -> None:
        self._plan = plan
        self._timed = timed
        self._choices = choices
        self._metrics = metrics
        self._outcome: RequestOutcome | None = None
        self._failure: ApiError | None = None
        self._num_ended = 0  # from the first on
        # Where what is told of a token depends on the part that it belongs to: then nothing told depends on how many
        # came at a time.
        reading, scored = plan.reading, plan.request.wanted_logprobs is not None
        self._scored = scored
        self._by_token = reading.reasons or (reading is not PLAIN and scored)
        self.adapter_state: AdapterState | None = None

    @classmethod
    def start(
        cls,
        engine: Engines,
        text: TextProcessor,
        plan: GenerationPlan,
        requests: Sequence[EngineRequest],
        metrics: Metrics,
        *,
        terms: TenantTerms,
        continues: bool,
        timed: bool = True,
    ) -> Self:
        """Hands all sequences to the engine, or none; `terms` are the tenant's. Histograms count its times where it is
        `timed`. Raises what `submit` raises."""
        choices: list[RunningChoice] = []
        num_top = plan.request.wanted_logprobs
        scored = num_top is not None
        echoes = [
            Echo(spelling, prompt, scored=scored, num_top=num_top)
            for spelling, prompt in zip(plan.echoes, plan.prompts, strict=False)
        ]
        # Before the submission: the engine's process may take its first step at once.
        started = time.monotonic()
        streams = engine.submit(*requests, terms=terms)
        try:
            for index, stream in enumerate(streams):
                stops = text.stream(
                    plan.request.stop,
                    min_tokens=stream.request.sampling.min_tokens,
                    continues=continues,
                    by_token=scored,
                    shown=plan.reading.shown,
                )
                echo = echoes[index // plan.n] if echoes else None
                choices.append(RunningChoice(index, stream, stops, plan.reading.parser(), started, echo))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return cls(plan, choices, metrics, timed=timed)

    async def next(self) -> list[Delta]:
        """The output since the last call, of at least one choice (perhaps no whole character yet); empty once
        all have ended. A sequence that failed raises ApiError, at the call after the one that returned its last
        text. A cancelled call loses nothing."""
        while True:
            self.check()
            live = self._live()
            if not live:
                return []
            events = await self._events(live)
            if deltas := [delta for choice, event in events for delta in self._take(choice, event)]:
                return deltas

    def _live(self) -> Sequence[RunningChoice]:
        """Those to wait for. Embeddings are wanted whole, and there may be thousands: one after the other."""
        if self._plan.request.pooling is None:
            return [choice for choice in self._choices if not choice.shown_all]
        while self._num_ended < len(self._choices) and self._choices[self._num_ended].shown_all:
            self._num_ended += 1
        return self._choices[self._num_ended : self._num_ended + 1]

    def check(self) -> None:
        """Raises ApiError if a sequence has failed."""
        if self._failure is not None:
            raise self._failure

    async def _events(self, live: Sequence[RunningChoice]) -> list[tuple[RunningChoice, TokenEvent]]:
        if len(live) == 1 and live[0].read is None:
            return [(live[0], await anext(live[0].stream))]
        for choice in live:
            if choice.read is None:
                choice.read = asyncio.ensure_future(anext(choice.stream))
        reads = [choice.read for choice in live if choice.read is not None]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        events = []
        for choice in live:
            if choice.read is not None and choice.read.done():
                events.append((choice, choice.read.result()))
                choice.read = None
        return events

    def _take(self, choice: RunningChoice, event: TokenEvent) -> list[Delta]:
        if self.adapter_state is None:
            self.adapter_state = event.adapter_state
        if event.finish_reason is not None:
            choice.terminal = event
            self._failure = failure_of(event) or self._failure
        if event.token_ids:
            self._measure(choice, len(event.token_ids))
        echoed = self._echo(choice, event)
        if self._scored and event.scores is not None:
            rows = () if event.scores.output is None else event.scores.output.rows()
            choice.unshown.extend(zip(event.token_ids, rows, strict=True))
        if self._by_token and len(event.token_ids) > 1:
            deltas = self._deltas_by_token(choice, event)
        else:
            deltas = [self._delta(choice, event, event.token_ids)]
        if choice.echo is None or choice.echo.complete:
            return [*echoed, *deltas]
        choice.held += deltas
        return echoed

    def _deltas_by_token(self, choice: RunningChoice, event: TokenEvent) -> list[Delta]:
        """One for each of the event's tokens, up to the end of a stop string."""
        deltas: list[Delta] = []
        last = len(event.token_ids) - 1
        for index, token_id in enumerate(event.token_ids):
            deltas.append(self._delta(choice, event, (token_id,), is_first=index == 0, is_last=index == last))
            if choice.text.finished_by_stop is not None:
                break
        return deltas

    def _delta(
        self,
        choice: RunningChoice,
        event: TokenEvent,
        token_ids: tuple[int, ...],
        *,
        is_first: bool = True,
        is_last: bool = True,
    ) -> Delta:
        """The text and log probabilities that these tokens of the event add."""
        before = choice.text.num_tokens
        shown = choice.text.push(token_ids, stop_token_id=event.stop_token_id if is_last else None)
        text, by_stop, starts = shown.text, shown.finished_by_stop, shown.tokens
        has_ended = is_last and event.finish_reason is not None
        if has_ended:
            rest = choice.text.finish()
            text, by_stop, starts = text + rest.text, rest.finished_by_stop, starts + rest.tokens
        choice.num_chars += len(text)
        if has_ended and by_stop is None and event.stop_token_id is not None and self._tells_of_ends:
            starts = (*starts, choice.num_chars)
        if by_stop is not None and self._plan.request.TELLS_ALL_TOKENS:
            left = choice.text.num_tokens - choice.num_told - len(starts)
            starts = (*starts, *(choice.num_chars,) * left)
        if by_stop is not None:
            choice.finish_reason = "stop"
            choice.stream.abort()
        elif has_ended and event.finish_reason in ("stop", "length"):
            choice.finish_reason = event.finish_reason
        fields, num_tokens = self._plan.request, choice.text.num_tokens
        parts = choice.parser.push(text)
        if choice.parser.in_reasoning:
            choice.num_reasoning = num_tokens
        if has_ended or by_stop is not None:
            parts += choice.parser.finish()
        tells_prompt = is_first and fields.prompt_logprobs is not None and event.scores is not None
        return Delta(
            choice.index,
            parts,
            self._told_reason(choice),
            self._scored_tokens(choice, starts) if self._scored else None,
            num_tokens,
            token_ids[: num_tokens - before] if fields.return_token_ids else (),
            event.scores.prompt if tells_prompt and event.scores is not None else None,
            by_stop,
            choice.num_reasoning,
            event.pooled,
        )

    def _told_reason(self, choice: RunningChoice) -> Literal["stop", "length", "tool_calls"] | None:
        """How the answer says that the choice ended."""
        called = choice.parser.num_calls and self._plan.reading.calls_end
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    @property
    def _tells_of_ends(self) -> bool:
        """Whether log probabilities hold the token that ends an answer: in completions, as OpenAI's and vLLM's do.
        Who cuts an echo's list by the number of tokens asked for, as lm-eval does, would lose one of the prompt."""
        return isinstance(self._plan.request, CompletionRequest)

    def _echo(self, choice: RunningChoice, event: TokenEvent) -> list[Delta]:
        """The prompt's text and log probabilities that this event completes, in all choices that share the prompt. The
        first of them brings its log probabilities; what the others say meanwhile is held."""
        echo = choice.echo
        if echo is None or choice.echoed:
            return []
        if not self._scored:
            choice.echoed = True
            return [Delta(choice.index, (AnswerText(echo.take(None)[0]),))]
        if choice.index % self._plan.n:
            return []
        text, tokens = echo.take(None if event.scores is None else event.scores.prompt)
        deltas: list[Delta] = []
        for other in self._choices[choice.index : choice.index + self._plan.n]:
            deltas.append(Delta(other.index, (AnswerText(text),), tokens=tokens))
            if echo.complete:
                deltas += other.held
                other.held.clear()
        choice.echoed = echo.complete
        return deltas

    def _scored_tokens(self, choice: RunningChoice, starts: Sequence[int]) -> tuple[ScoredToken, ...]:
        """The next tokens of a choice, whose texts begin there."""
        offset = 0 if choice.echo is None else len(choice.echo)
        choice.num_told += len(starts)
        scored = []
        for start in starts:
            token_id, (logprob, top) = choice.unshown.popleft()
            top = top[: self._plan.num_told]
            if self._plan.request.logprob_token_ids is not None:
                # The token itself, and then those that are named, in their order.
                top = ((token_id, logprob), *(entry for entry in top if entry[0] != token_id))
            scored.append(ScoredToken(token_id, logprob, top, offset + start))
        return tuple(scored)

    def _measure(self, choice: RunningChoice, num_tokens: int) -> None:
        now = time.monotonic()
        if choice.last_token is None:
            choice.first_token = now
            if self._timed:
                self._metrics.first_token(now - choice.started)
            num_tokens -= 1
        if num_tokens and self._timed:
            self._metrics.next_tokens(now - (choice.last_token or now), num_tokens)
        choice.last_token = now

    async def cut(self) -> None:
        """End what still runs."""
        for choice in self._choices:
            choice.stream.abort()
        await self.last_events()

    async def last_events(self, timeout_s: float = LAST_EVENT_S) -> None:
        """Wait for the terminal events of sequences that were aborted, so that usage is the engine's own."""
        running = [choice for choice in self._choices if choice.terminal is None]
        if not running:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(self._last_event, running))

    async def _last_event(self, choice: RunningChoice) -> None:
        read, choice.read = choice.read, None
        if read is not None:
            read.cancel()
            await asyncio.wait([read])
            if not read.cancelled() and read.exception() is None and read.result().finish_reason is not None:
                choice.terminal = read.result()
        while choice.terminal is None:
            try:
                event = await anext(choice.stream)
            except StopAsyncIteration:
                return
            if event.finish_reason is not None:
                choice.terminal = event

    def usage(self) -> Usage:
        """Usage of the whole request: a prompt counts once, however many choices it has; tokens count up to the one
        that completed a stop string."""
        # Of a prompt's choices the first may have been refused, and another begun.
        of_prompts = self._choices_by_prompt()
        return Usage(
            sum(max(choice.prompt_tokens for choice in choices) for choices in of_prompts),
            sum(choice.completion_tokens for choice in self._choices),
            sum(choices[0].cached_tokens for choices in of_prompts),
        )

    def _choices_by_prompt(self) -> list[Sequence[RunningChoice]]:
        n = self._plan.n
        return [self._choices[start : start + n] for start in range(0, len(self._choices), n)]

    @property
    def only_answer(self) -> tuple[EngineRequest, tuple[int, ...]] | None:
        """The engine's request for the only sequence, and its output tokens up to the one that completed a stop string;
        None of several sequences."""
        if len(self._choices) > 1:
            return None
        stream, num_tokens = self._choices[0].stream, self._choices[0].text.num_tokens
        return stream.request, tuple(stream.received[:num_tokens])

    def outcome(self, failure: str | None = None) -> RequestOutcome:
        """The outcome of the whole request, as of the first call. `failure` is how it ended where it did not come to
        its proper end."""
        if self._outcome is None:
            ends = [choice.end() for choice in self._choices]
            reasons = {choice.finish_reason for choice in self._choices}
            proper = CANCELLED if None in reasons else "length" if "length" in reasons else "stop"
            self._outcome = RequestOutcome(
                status=failure or proper,
                usage=self.usage(),
                queue_s=max((end.timing.queue_s for end in ends if end.timing is not None), default=0.0),
                first_token_at=min(
                    (choice.first_token for choice in self._choices if choice.first_token is not None),
                    default=None,
                ),
                adapter_state=self.adapter_state,
                n=self._plan.n,
                sequences=ends,
            )
        return self._outcome

    async def close(self) -> None:
        """Abort what still runs, and wait a moment for its end."""
        for choice in self._choices:
            choice.stream.abort()
        await self.last_events(SETTLE_S)


def failure_of(event: TokenEvent) -> ApiError | None:
    """The error with which a sequence ended by itself."""
    if event.finish_reason == "error":
        return from_engine(event.error)
    if event.finish_reason == "abort":
        return ApiError("engine_restarting", "The server ended this request early. Please try again.")
    return None
