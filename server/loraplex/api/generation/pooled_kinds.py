"""The routes that answer with what a version's head gives: classes, scores of pairs, and documents by their scores."""

from __future__ import annotations

from dataclasses import replace

from loraplex.api.generation.kinds import Answer, AnswerTo, Kind, Prompts, Request
from loraplex.api.generation.planning import GenerationPlan
from loraplex.api.openai.logprobs import CompletionLogprobs
from loraplex.api.pooling.answers import ClassifyAnswer, RerankAnswer, ScoreAnswer
from loraplex.api.pooling.prompts import PooledPrompts, fitted, room_of, to_prompts, tokens_of
from loraplex.api.pooling.schemas import ClassifyRequest, RerankRequest, ScoreRequest
from loraplex.control.types import ResolvedModel
from loraplex.engine.reports import EngineInfo
from loraplex.serving.output.formats import OutputFormats
from loraplex.serving.text.processor import TextProcessor


def _tokens(text: TextProcessor, request: Request, max_model_len: int, _: OutputFormats) -> Prompts:
    assert isinstance(request, PooledPrompts)
    return Prompts(tokens_of(request, text, max_model_len))


def _answer(to: AnswerTo) -> Answer:
    request = to.request
    assert isinstance(request, PooledPrompts)
    asked, head = request.asked, request.found_head
    if isinstance(asked, ClassifyRequest):
        return ClassifyAnswer(to.id, to.created, asked, head, to.prompts)
    kind = RerankAnswer if isinstance(asked, RerankRequest) else ScoreAnswer
    return kind(to.id, to.created, asked, head)


def _fit(request: Request, model: ResolvedModel, info: EngineInfo) -> Request:
    assert isinstance(request, PooledPrompts)
    return fitted(request, model, info)


def _kept(plan: GenerationPlan, _: EngineInfo) -> int:
    assert isinstance(plan.request, PooledPrompts)
    return room_of(plan.request, len(plan.prompts), plan.prompt_tokens)


_CLASSIFY = Kind(
    ClassifyRequest,
    _tokens,
    _answer,
    CompletionLogprobs,
    "/classify",
    "classify-",
    "prompt",
    request=to_prompts,
    kept=_kept,
    fit=_fit,
)
_SCORE = replace(_CLASSIFY, schema=ScoreRequest, id_prefix="score-")
_RERANK = replace(_CLASSIFY, schema=RerankRequest, id_prefix="rerank-")

# Clients know each of these by several paths.
CLASSIFY = tuple(replace(_CLASSIFY, path=path) for path in ("/classify", "/v1/classify"))
SCORE = tuple(replace(_SCORE, path=path) for path in ("/score", "/v1/score"))
RERANK = tuple(replace(_RERANK, path=path) for path in ("/v1/rerank", "/rerank", "/v2/rerank"))
