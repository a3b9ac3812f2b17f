"""Checks of a request before it enters the engine."""

from __future__ import annotations

import math

from loraplex.engine.config import SchedulerConfig
from loraplex.engine.logprobs import MAX_LOGPROB_TOKEN_IDS, MAX_TOP_LOGPROBS
from loraplex.engine.types import EngineError, EngineRequest

MAX_TOKEN_ID = 2**31 - 1
MAX_GRAMMAR_CHARS = 1 << 20
"""Most characters of a grammar's text."""
"""Beyond these limits the sums of service per weight would lose single tokens."""


def check_request(
    request: EngineRequest, config: SchedulerConfig, *, takes_grammars: bool
) -> EngineError | None:
    """The error if this request can never be served; None if it can.

    The API checks most of this before. Here it protects the scheduler's invariants.
    """
    num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
    if num_prompt == 0 or max_tokens < 0:
        return EngineError(
            "internal_error", "a request needs at least one prompt token, and 0 or more to generate"
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) > MAX_TOKEN_ID:
        return EngineError("internal_error", f"a prompt token is not within 0 … {MAX_TOKEN_ID}")
    for asked in (request.sampling.logprobs, request.sampling.prompt_logprobs):
        if asked is not None and not 0 <= asked <= MAX_TOP_LOGPROBS:
            return EngineError(
                "internal_error", f"{asked} log probabilities a token, not within 0 … {MAX_TOP_LOGPROBS}"
            )
    if not 0 <= request.sampling.scored_from < num_prompt:
        return EngineError(
            "internal_error", f"scores from position {request.sampling.scored_from} of {num_prompt} on"
        )
    if not 0 <= request.adapter_from < num_prompt or (request.adapter_from and request.adapter is None):
        return EngineError(
            "internal_error", f"an adapter that acts from position {request.adapter_from} of {num_prompt} on"
        )
    if request.pooling is not None and (
        max_tokens or request.grammar is not None or request.sampling.prompt_logprobs is not None
    ):
        return EngineError("internal_error", "a request that is pooled samples nothing and scores nothing")
    if (refusal := _check_generated(request)) is not None:
        return refusal
    if request.batch and not request.background:
        return EngineError("internal_error", "a line of a batch is a background request")
    if request.is_shadow and (
        (request.grammar, request.pooling, request.generated, request.adapter_from) != (None, None, (), 0)
    ):
        return EngineError("internal_error", "a shadow takes no grammar, pooling, generated tokens or place")
    named = request.sampling.logprob_token_ids
    if named and (
        request.sampling.logprobs is None
        or len(named) > MAX_LOGPROB_TOKEN_IDS
        or not 0 <= min(named) <= max(named) <= MAX_TOKEN_ID
    ):
        return EngineError(
            "internal_error",
            f"logprob_token_ids takes at most {MAX_LOGPROB_TOKEN_IDS} token ids, and needs logprobs",
        )
    if request.grammar is not None and (not takes_grammars or len(request.grammar) > MAX_GRAMMAR_CHARS):
        return EngineError(
            "grammar_failed",
            f"a grammar of {len(request.grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
            if takes_grammars
            else "this engine takes no grammars",
        )
    if request.max_load is not None and not (math.isfinite(request.max_load) and request.max_load >= 0):
        return EngineError("internal_error", f"max_load is {request.max_load}, not a number of seconds")
    if (refusal := check_deadline(request.deadline)) is not None:
        return refusal
    if num_prompt + max_tokens > config.max_model_len:
        return EngineError(
            "context_length_exceeded",
            f"{num_prompt} prompt tokens and up to {max_tokens} to generate exceed the context of "
            f"{config.max_model_len} tokens",
        )
    needed = config.block_needs.of(
        num_prompt + max(0, max_tokens - 1)
    )  # the last token is sampled, but never computed
    if needed > config.num_blocks:
        return EngineError(
            "context_length_exceeded",
            f"{num_prompt} prompt tokens and up to {max_tokens} to generate need {needed} KV blocks, which exceeds the "
            f"available context size: the pool has {config.num_blocks}",
        )
    return None


def _check_generated(request: EngineRequest) -> EngineError | None:
    """The error if the request cannot go on behind the tokens that another engine has delivered. With `max_tokens`, the
    context and the KV pool are checked for them too."""
    generated, max_tokens = request.generated, request.sampling.max_tokens
    if not generated:
        return None
    if len(generated) > max_tokens or request.pooling is not None:
        return EngineError(
            "internal_error",
            f"{len(generated)} tokens were generated before, of {max_tokens} that are wanted",
        )
    if not 0 <= min(generated) <= max(generated) <= MAX_TOKEN_ID:
        return EngineError("internal_error", f"a generated token is not within 0 … {MAX_TOKEN_ID}")
    return None


def check_deadline(deadline: float | None) -> EngineError | None:
    """The error if a deadline is no number of seconds."""
    if deadline is None or math.isfinite(deadline):
        return None
    return EngineError("internal_error", f"the deadline is {deadline}, not a number of seconds")


def check_room(config: SchedulerConfig, num_waiting: int) -> EngineError | None:
    """The error if the queue is full."""
    if num_waiting >= config.max_waiting:
        return EngineError(
            "server_overloaded", f"{config.max_waiting} requests are waiting already; try again later"
        )
    return None


def too_slow(request: EngineRequest, seconds: float) -> EngineError:
    """The refusal of a request whose adapter needs `seconds` to the device, longer than the request waits."""
    assert request.adapter is not None
    assert request.max_load is not None
    adapter = request.adapter
    return EngineError(
        "adapter_unavailable",
        f"adapter {adapter.name}@v{adapter.version} cannot be on the device within the "
        f"{1000 * request.max_load:g} ms that the request allows; it is being loaded",
        retry_after_s=seconds,
        is_own=True,
    )
