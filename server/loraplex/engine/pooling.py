"""Embeddings and logits of heads: the hidden states of a prompt behind the final norm, pooled. No torch.

"last" and "cls" are the hidden states of the prompt's last and first token. "mean" is the mean over all of its tokens.
A prompt comes in slices that depend on what else is computed, and a sum of floating-point numbers depends on its order.
So hidden states are added as fixed-point numbers in 64 bits: the sum is exact, whatever the slices. "classify" gives
the logits of a head for the last token, "token_classify" those for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.pooled import HeadTask, VectorPooling

Pooling = VectorPooling | HeadTask
POOLINGS: tuple[VectorPooling, ...] = get_args(VectorPooling)
OF_EVERY_TOKEN: tuple[Pooling, ...] = ("mean", "token_classify")
HEAD_TASKS: tuple[HeadTask, ...] = get_args(HeadTask)

_LIMIT_BITS = 16
MAX_HIDDEN = float(1 << _LIMIT_BITS)
"""Hidden states must be below it, in magnitude. Behind a norm they are by far."""


def fraction_bits(num_prompt: int) -> int:
    """Binary places behind the point for the mean of `num_prompt` tokens. All of them below `MAX_HIDDEN`, the sum stays
    below 2^62. One hidden state is rounded by 2^-29 at most where there are 100,000."""
    return 62 - _LIMIT_BITS - num_prompt.bit_length()


@dataclass(frozen=True, slots=True)
class PooledPart:
    """The part of a pooled prompt that one slice gives. `num_positions`: how many of its positions are pooled.
    `values`, little-endian: of a mean int64 [C], the sum of these positions' hidden states times 2^`fraction_bits`; of
    one token float32 [C], or of a head [labels], empty where the slice does not hold it; of every token float32
    [positions, labels]."""

    num_positions: int
    values: bytes


class PooledPrompt:
    """The parts of one prompt, added up. Each position is to be added once."""

    def __init__(self, pooling: Pooling, num_prompt: int) -> None:
        self.num_positions = 0
        self._pooling = pooling
        self._num_prompt = num_prompt
        self._total: NDArray[np.int64] | None = None
        self._parts: list[bytes] = []

    def add(self, part: PooledPart) -> None:
        self.num_positions += part.num_positions
        if not part.num_positions:
            return
        if self._pooling != "mean":
            self._parts.append(part.values)
            return
        values = np.frombuffer(part.values, "<i8")
        self._total = values if self._total is None else self._total + values

    def vector(self) -> bytes:
        """float32, little-endian: [C], not normalised; of a head [labels], or [tokens, labels]."""
        if self._pooling != "mean":
            return b"".join(self._parts)
        assert self._total is not None
        assert self.num_positions == self._num_prompt
        scale = self._num_prompt * 2.0 ** fraction_bits(self._num_prompt)
        return (self._total / scale).astype("<f4").tobytes()
