"""Log probabilities of given tokens and of the most likely ones, for the rows of a step that ask for them.

They are log_softmax of the model's own logits in float32: before penalties, bias, temperature and all else that acts
on the draw, as OpenAI's API has it. Nothing here runs in a step in which nobody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from loraplex.engine.logprobs import Logprobs

_MAX_BYTES = 32 << 20
"""Bound of the logits that are worked on at a time, unless one row alone has more."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """For L rows: `values` [L, 1 + k] float32, the given token's log probability and then those of the k most likely
    tokens, the likeliest first; `ids` [L, k] int32, which these are. Of equally likely ones the lower id is first."""

    values: torch.Tensor
    ids: torch.Tensor


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(dim=-1, keepdim=True)


def score_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    *,
    log_sum_exp: Callable[[torch.Tensor], torch.Tensor] = _log_sum_exp,
) -> TokenScores:
    """logits [L, V] float32, L ≥ 1, left as they are; tokens [L] int64, below V. `num_top` k is cut to V. Values are
    not finite where a row's logits are not. `log_sum_exp`: [L, V] → [L, 1]."""
    vocab_size = logits.shape[1]
    num_top = min(num_top, vocab_size)
    size = max(1, _MAX_BYTES // (4 * vocab_size))
    values, ids = [], []
    for first in range(0, logits.shape[0], size):
        x = logits[first : first + size]
        own = x.gather(1, tokens[first : first + size, None])
        best, found = x.topk(num_top)
        # topk leaves the order of equals open.
        found, order = found.sort(dim=-1)
        best, by_value = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
        values.append(torch.cat((own, best), dim=1) - log_sum_exp(x))
        ids.append(found.gather(1, by_value).to(torch.int32))
    return TokenScores(torch.cat(values), torch.cat(ids))


def pack(values: NDArray[Any], ids: NDArray[Any], num_top: int) -> Logprobs:
    """Rows of both, on the host, with so many of the most likely tokens, or fewer where there are no more."""
    num_top = min(num_top, ids.shape[1])
    return Logprobs(
        num_top,
        values[:, : 1 + num_top].astype("<f4").tobytes(),
        ids[:, :num_top].astype("<i4").tobytes(),
    )
