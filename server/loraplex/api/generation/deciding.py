"""The choices of a request that decides: one token of each answer, and then the scores of what is longer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import msgspec

from loraplex.api.generation.generation import SETTLE_S, Generation, RunningChoice, failure_of
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.metrics import Metrics
from loraplex.api.openai.delta import Delta
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent, Usage
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.text.processor import TextProcessor


class Deciding(Generation):
    """A generation whose deltas come together, when all is known. Choices of several tokens are scored behind the
    prompt once its KV is in the prefix cache."""

    _engine: Engines
    _terms: TenantTerms
    _requests: Sequence[EngineRequest]
    """The first one of each prompt."""

    def __init__(
        self,
        plan: GenerationPlan,
        choices: Sequence[RunningChoice],
        metrics: Metrics,
        *,
        timed: bool = True,
    ) -> None:
        super().__init__(plan, choices, metrics, timed=timed)
        self._held: list[Delta] = []
        self._firsts: dict[int, Mapping[int, float]] = {}
        """Log probabilities of tokens that an answer may begin with, by prompt."""
        self._scorings: list[RequestStream] = []
        self._num_scored = 0
        self._is_told = False

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
        made = super().start(
            engine, text, plan, requests, metrics, terms=terms, continues=continues, timed=timed
        )
        made._engine, made._terms, made._requests = engine, terms, requests[:: plan.n]
        return made

    async def next(self) -> list[Delta]:
        """All that is told, and then nothing."""
        if self._is_told:
            return []
        while deltas := await super().next():
            self._held += deltas
        told = await self._probabilities()
        self._is_told = True
        return [
            msgspec.structs.replace(delta, choice_probabilities=told[delta.index // self._plan.n])
            if delta.finish_reason
            else delta
            for delta in self._held
        ]

    def _take(self, choice: RunningChoice, event: TokenEvent) -> list[Delta]:
        if event.token_ids and event.scores is not None and event.scores.output is not None:
            _, found = next(event.scores.output.rows())
            self._firsts[choice.index // self._plan.n] = dict(found)
        return super()._take(choice, event)

    async def _probabilities(self) -> list[Sequence[Any]]:
        """The items of the choices behind each prompt. Raises ApiError."""
        decision = self._plan.decision
        assert decision is not None
        scorings = [
            _scoring(request, tokens, number)
            for request in self._requests
            for number, tokens in enumerate(decision.longer)
        ]
        # The engine takes few sequences of batches: a line has no more of them than answers.
        at_once = self._plan.num_choices if self._requests[0].background else max(1, len(scorings))
        logprobs = []
        for start in range(0, len(scorings), at_once):
            streams = self._engine.submit(*scorings[start : start + at_once], terms=self._terms)
            self._scorings += streams
            logprobs += [await self._logprob(stream) for stream in streams]
        count = len(decision.longer)
        return [
            decision.told(self._firsts[place], logprobs[place * count : (place + 1) * count])
            for place in range(len(self._requests))
        ]

    async def _logprob(self, stream: RequestStream) -> float:
        """The log probability of all that stands behind the prompt. Raises ApiError."""
        total = 0.0
        async for event in stream:
            if (failure := failure_of(event)) is not None:
                raise failure
            if event.scores is not None and event.scores.prompt is not None:
                total += sum(own for own, _ in event.scores.prompt.rows())
        self._num_scored += len(stream.request.prompt_ids) - 1 - stream.request.sampling.scored_from
        return total

    def usage(self) -> Usage:
        """With the tokens of scored choices, which are read behind the prompt."""
        usage = super().usage()
        return replace(usage, prompt_tokens=usage.prompt_tokens + self._num_scored)

    async def close(self) -> None:
        for stream in self._scorings:
            stream.abort()
        await super().close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for stream in self._scorings:
                    async for _ in stream:
                        pass


def _scoring(request: EngineRequest, tokens: tuple[int, ...], number: int) -> EngineRequest:
    """The request that scores a choice behind the prompt of `request`."""
    sampling = SamplingParams(
        max_tokens=0, prompt_logprobs=0, scored_from=len(request.prompt_ids) - 1, seed=request.sampling.seed
    )
    return replace(
        request,
        request_id=f"{request.request_id}-{number}",
        prompt_ids=(*request.prompt_ids, *tokens),
        sampling=sampling,
        grammar=None,
    )
