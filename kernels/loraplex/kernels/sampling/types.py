"""The inputs of sampling on the device: a step's options, one number a row, and lists of what changes single
logits. Everything lies in device memory, so that nothing waits for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOKEN_BITS = 20
"""Bits of the token in an entry of `History`; the count is in front of them."""
MAX_VOCAB = (1 << 19) - 1
"""Tokens in a vocabulary: with more, sums of weights could exceed 63 bits (see `sampling.triton_programs`)."""


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that penalties act on. Row s has the entries starts[s] … starts[s + 1]; each names another token.

    `starts` [S + 1] int64, ascending from 0; `entries` [H] int64: count << TOKEN_BITS | token, with how often the token
    occurs in the output, 0 for one that only the prompt has. `repetition`, `presence` and `frequency` [S] float32, 1, 0
    and 0 where they are off; `pending` [S] int64: 1 where the row's input token is one more of its output, which only
    the device knows.
    """

    starts: torch.Tensor
    entries: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    pending: torch.Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Biases of single logits, added after the penalties; -inf bars a token. Row s has starts[s] … starts[s + 1], each
    for another token. `starts` [S + 1] int64, `tokens` [B] int64, `values` [B] float32."""

    starts: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row's token is sampled. [S] each: `temperature` float32, 0 for greedy; `min_p` float32; `top_k` int64,
    off if 0 or not below the size of the vocabulary; `top_p` float64, off from 1; `uniform` float64 in [0, 1).
    `ranked`: whether any row may have top_k or top_p."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor
    ranked: bool


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The options of S rows; a part is None where no row needs it. Without `draws` all are greedy."""

    num_rows: int
    history: History | None = None
    biases: Biases | None = None
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that C of a step's S sampled rows may have. Token t may be drawn if bit t % 32 of word t // 32 is set;
    bits beyond the vocabulary are not read. `rows` [C] int64: the rows, ascending; `places` [S] int64: where a row's
    bits are, -1 for a row that may have any token; `bits` [C, ⌈V / 32⌉] int32, contiguous."""

    rows: torch.Tensor
    places: torch.Tensor
    bits: torch.Tensor
