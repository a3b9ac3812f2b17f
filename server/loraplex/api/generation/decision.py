"""Decisions: a request for one token, with log probabilities, of an answer that is one of some choices. It is told how
likely each choice is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from loraplex.api.errors import ApiError, invalid
from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from loraplex.engine.logprobs import MAX_LOGPROB_TOKEN_IDS
from loraplex.http.text import printable
from loraplex.serving.grammar.builders import MAX_GRAMMAR_BYTES
from loraplex.serving.text.processor import TextProcessor

MAX_CHOICES = MAX_LOGPROB_TOKEN_IDS
MAX_CHOICE_TOKENS = 1024
"""The most tokens of all choices of a decision together."""
FIELD = "structured_outputs.choice"


@dataclass(frozen=True)
class Decision:
    """The choices of a request, each as the tokens that spell it behind the prompt, one at least."""

    choices: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first tokens, each once."""
        return tuple(dict.fromkeys(tokens[0] for tokens in self.tokens))

    @cached_property
    def longer(self) -> tuple[tuple[int, ...], ...]:
        """The choices of several tokens, which are scored each by a sequence of its own."""
        return tuple(tokens for tokens in self.tokens if len(tokens) > 1)

    @property
    def num_scored(self) -> int:
        """Tokens that these sequences have behind the prompt."""
        return sum(map(len, self.longer))

    def told(self, firsts: Mapping[int, float], longer: Sequence[float]) -> list[dict[str, Any]]:
        """The item of each choice, by the log probabilities of first tokens and of the choices of several."""
        rest = iter(longer)
        logprobs = [firsts[tokens[0]] if len(tokens) == 1 else next(rest) for tokens in self.tokens]
        highest = max(logprobs)
        shares = [math.exp(logprob - highest) for logprob in logprobs]
        total = sum(shares)
        return [
            {
                "choice": choice,
                "token_ids": tokens,
                "logprob": logprob,
                "raw_probability": math.exp(logprob),
                "probability": share / total,
            }
            for choice, tokens, logprob, share in zip(
                self.choices, self.tokens, logprobs, shares, strict=True
            )
        ]


def is_decision(request: ChatRequest | CompletionRequest) -> bool:
    structured = request.structured_outputs
    is_choice = structured is not None and structured.choice is not None
    return is_choice and request.wanted_logprobs is not None and request.asked_tokens[1] == 1


def read_decision(request: ChatRequest | CompletionRequest, text: TextProcessor) -> Decision:
    """The decision that a request asks for. Raises ApiError (400) for choices whose probabilities cannot be told."""
    assert request.structured_outputs is not None
    choices = tuple(request.structured_outputs.choice or ())
    if len(choices) > MAX_CHOICES:
        raise _refused(
            f"there are {len(choices)} choices; at most {MAX_CHOICES} have their probabilities told"
        )
    if sum(map(len, choices)) > MAX_GRAMMAR_BYTES:
        raise _refused(f"the choices have more than {MAX_GRAMMAR_BYTES} characters together")
    for place, choice in enumerate(choices):
        if not choice:
            raise _refused("it is empty, and has no probability", place)
        if (first := choices.index(choice)) < place:
            raise _refused(f"it is the same as '{FIELD}[{first}]'", place)
    tokens = []
    for place, choice in enumerate(choices):
        spelled = text.encode_answer(choice)
        if spelled is None:
            raise _refused(f"no tokens of this model spell '{printable(choice, 80)}' as it is", place)
        tokens.append(tuple(spelled))
    decision = Decision(choices, tuple(tokens))
    if (number := sum(map(len, tokens))) > MAX_CHOICE_TOKENS:
        raise _refused(f"the choices have {number} tokens together; at most {MAX_CHOICE_TOKENS} are scored")
    named = dict.fromkeys((*(request.logprob_token_ids or ()), *decision.firsts))
    if len(named) > MAX_LOGPROB_TOKEN_IDS:
        raise invalid(
            "logprob_token_ids",
            f"'logprob_token_ids' and the first tokens of the choices are {len(named)} tokens; at most "
            f"{MAX_LOGPROB_TOKEN_IDS} can be named.",
        )
    return decision


def _refused(reason: str, place: int | None = None) -> ApiError:
    field = FIELD if place is None else f"{FIELD}[{place}]"
    return invalid(
        field,
        f"'{field}' cannot be decided on: {reason}. Ask without 'logprobs', or for more than one token, to have one "
        "of them written without probabilities.",
    )
