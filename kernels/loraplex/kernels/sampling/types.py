"""The inputs of sampling on the device: a step's options, one number a row, and lists of what changes single
logits. Everything lies in device memory, so that nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

TOKEN_BITS = 20
"""Bits of the token in an entry of `History`; the count is in front of them."""
MAX_VOCAB = (1 << 19) - 1
"""Tokens in a vocabulary: with more, sums of weights could exceed 63 bits (see `sampling.triton_programs`)."""


class Option(IntEnum):
    """The columns of a step's options, one row for each sampled row, all in float64. Each but `UNIFORM` is the field of
    SamplingParams with the same name in small letters."""

    TEMPERATURE = 0
    """0 for greedy. Read as float32."""
    TOP_K = 1
    """Off if 0 or not below the size of the vocabulary."""
    TOP_P = 2
    """Off from 1."""
    MIN_P = 3
    """Off if 0. Read as float32."""
    REPETITION_PENALTY = 4
    """Off if 1. Read as float32, as are the two that follow, which are off if 0."""
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    UNIFORM = 7
    """The number of [0, 1) that a draw inverts the cumulative distribution at."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of S rows, [S, len(Option)] float64: on the `host`, where they decide what is launched, and on the
    `device`."""

    host: NDArray[np.float64]
    device: torch.Tensor

    @property
    def drawn(self) -> NDArray[np.int64]:
        """The rows that are not greedy, ascending."""
        return np.flatnonzero(self.host[:, Option.TEMPERATURE] > 0)

    def ranked(self, vocab_size: int) -> NDArray[np.int64]:
        """The rows that are not greedy and have top_k or top_p, ascending."""
        heat, top_k, top_p = self.host[:, : Option.MIN_P].T
        return np.flatnonzero((heat > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1)))


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that penalties act on. Row s has the entries starts[s] … starts[s + 1]; each names another token.

    `starts` [S + 1] int64, ascending from 0; `entries` [H] int64: count << TOKEN_BITS | token, with how often the token
    occurs in the output, 0 for one that only the prompt has. `pending` [S] int64: 1 where the row's input token is one
    more of its output, which only the device knows.
    """

    starts: torch.Tensor
    entries: torch.Tensor
    pending: torch.Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Biases of single logits, added after the penalties; -inf bars a token. Row s has starts[s] … starts[s + 1], each
    for another token. `starts` [S + 1] int64, `tokens` [B] int64, `values` [B] float32."""

    starts: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Requests of S rows; a part is None where no row needs it. Without `options` all are greedy and none has
    penalties; with `history` there are options."""

    num_rows: int
    options: Options | None = None
    history: History | None = None
    biases: Biases | None = None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that C of a step's S sampled rows may have. Token t may be drawn if bit t % 32 of word t // 32 is set;
    bits beyond the vocabulary are not read. `rows` [C] int64: the rows, ascending; `places` [S] int64: where a row's
    bits are, -1 for a row that may have any token; `bits` [C, ⌈V / 32⌉] int32, contiguous."""

    rows: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor
