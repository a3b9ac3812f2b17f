"""Log probabilities of given tokens and of the most likely ones, for the rows of a step that ask for them.

They are log_softmax of the model's own logits in float32: before penalties, bias, temperature and all else that acts
on the draw, as OpenAI's API has it. Nothing here runs in a step without requests for log probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.logprobs import Logprobs

_MAX_BYTES = 32 << 20
"""Bound of the logits that are worked on at a time, unless one row alone has more."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of L rows: `values` [L, 1 + k] float32, the given token's log probability and then those of the k most
    likely tokens, the likeliest first; `ids` [L, k] int32, which these are. Of equally likely ones the lower id is
    first. Where they were asked for: `listed` [L, M] float32, the log probabilities of tokens that are named; `ranks`
    [L] int32, how many tokens are as likely as the given one at least."""

    values: torch.Tensor
    ids: torch.Tensor
    listed: torch.Tensor | None = None
    ranks: torch.Tensor | None = None

    def to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        """Each of them copied."""
        listed = None if self.listed is None else copy(self.listed)
        ranks = None if self.ranks is None else copy(self.ranks)
        return TokenScores(copy(self.values), copy(self.ids), listed, ranks)

    def numpy(self) -> HostScores:
        """The same arrays, where they are on the host."""
        return HostScores(
            self.values.numpy(),
            self.ids.numpy(),
            None if self.listed is None else self.listed.numpy(),
            None if self.ranks is None else self.ranks.numpy(),
        )


@dataclass(frozen=True, slots=True)
class HostScores:
    """TokenScores on the host."""

    values: NDArray[Any]
    ids: NDArray[Any]
    listed: NDArray[Any] | None
    ranks: NDArray[Any] | None


def torch_log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(dim=-1, keepdim=True)


def score_tokens(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    *,
    listed: torch.Tensor | None = None,
    ranked: bool = False,
    log_sum_exp: Callable[[torch.Tensor], torch.Tensor] = torch_log_sum_exp,
) -> TokenScores:
    """logits [L, V] float32, L ≥ 1, left as they are; tokens [L] int64, below V. `num_top` k is cut to V. Values are
    not finite where a row's logits are not. `listed` [L, M] int64, below V: tokens that are named; `ranked`: ranks are
    wanted. `log_sum_exp`: [L, V] → [L, 1]."""
    vocab_size = logits.shape[1]
    num_top = min(num_top, vocab_size)
    size = max(1, _MAX_BYTES // (4 * vocab_size))
    values, ids, of_listed, ranks = [], [], [], []
    for first in range(0, logits.shape[0], size):
        x = logits[first : first + size]
        own = x.gather(1, tokens[first : first + size, None])
        best, found = x.topk(num_top)
        # topk leaves the order of equals open.
        found, order = found.sort(dim=-1)
        best, by_value = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
        total = log_sum_exp(x)
        values.append(torch.cat((own, best), dim=1) - total)
        ids.append(found.gather(1, by_value).to(torch.int32))
        if listed is not None:
            of_listed.append(x.gather(1, listed[first : first + size]) - total)
        if ranked:
            ranks.append((x >= own).sum(dim=-1, dtype=torch.int32))
    return TokenScores(
        torch.cat(values),
        torch.cat(ids),
        torch.cat(of_listed) if of_listed else None,
        torch.cat(ranks) if ranks else None,
    )


def pack(
    scores: HostScores, rows: slice, num_top: int, *, named: Sequence[int] = (), ranked: bool = False
) -> Logprobs:
    """With `num_top` of the most likely tokens, or fewer if there are no more, and behind them those that are `named`
    for these rows."""
    num_top = min(num_top, scores.ids.shape[1])
    values, ids = scores.values[rows, : 1 + num_top], scores.ids[rows, :num_top]
    if named:
        assert scores.listed is not None
        values = np.concatenate((values, scores.listed[rows, : len(named)]), axis=1)
        ids = np.concatenate((ids, np.tile(np.array(named, ids.dtype), (len(ids), 1))), axis=1)
    return Logprobs(
        num_top + len(named),
        values.astype("<f4").tobytes(),
        ids.astype("<i4").tobytes(),
        scores.ranks[rows].astype("<i4").tobytes() if ranked and scores.ranks is not None else b"",
    )
