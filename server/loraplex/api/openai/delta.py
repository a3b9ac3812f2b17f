"""The new part of one choice of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loraplex.api.openai.logprobs import ScoredToken
from loraplex.engine.logprobs import Logprobs
from loraplex.serving.output.parts import Part, text_of


class Delta(msgspec.Struct, frozen=True, gc=False):
    """Parts of one choice that may be shown now, and how the choice ended if it did. A choice that ends with calls of
    tools has the reason "tool_calls". `tokens` are those whose text came with the parts, of every kind; None where
    their log probabilities were not asked for. `num_tokens`: how many the choice has by now; `token_ids`: those that
    came, shown or not, and `prompt`: log probabilities of the prompt's next tokens, where these were asked for.
    `stop_string`: the one that ended the choice. `num_reasoning`: how many of its tokens are reasoning so far.
    `choice_probabilities`, with the end of one that decides: what is told of each choice of the request.
    `pooled`: the hidden states of the prompt that were asked for, float32 [C], little-endian."""

    index: int
    parts: tuple[Part, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    tokens: tuple[ScoredToken, ...] | None = None
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    prompt: Logprobs | None = None
    stop_string: str | None = None
    num_reasoning: int = 0
    pooled: bytes | None = None
    choice_probabilities: Sequence[Any] | None = None

    @property
    def text(self) -> str:
        """Without reasoning and calls."""
        return text_of(self.parts)
