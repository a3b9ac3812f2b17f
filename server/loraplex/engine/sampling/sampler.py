"""Sampling from logits, all rows at once.

A row's options act in this order: penalties, logit_bias, min_tokens, the grammar's mask, then either the largest logit
(temperature 0) or temperature, top_k, top_p, min_p and a draw. Repetition penalty divides positive and multiplies
negative logits of the tokens of prompt and output (Keskar et al., 2019); presence and frequency penalties count output
tokens only, as in OpenAI's API. Tokens that tie with the last one that top_k or top_p lets through are let through as
well. A draw inverts the cumulative distribution, in the order of the vocabulary, at the row's own number of [0, 1): so
it depends on neither batch-mates nor a generator's state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.batch import RowMemory, build_sample_rows
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.scoring import TokenScores, score_tokens, torch_log_sum_exp
from loraplex.kernels.bundle import Backend, Kernels
from loraplex.kernels.sampling.types import TOKEN_BITS, History, Option, Options, SampleRows, TokenMasks

_CANDIDATES = 1024
"""How many of the best tokens a row is sorted by on a CPU before all of them are."""


class Sampler(ABC):
    """Draws a step's tokens: `plan` on the thread that plans, in the order of the steps, the rest on the worker.
    `log_sum_exp`: [L, V] → [L, 1]."""

    def __init__(self, vocab_size: int, log_sum_exp: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._vocab_size = vocab_size
        self._memory = RowMemory(vocab_size)
        self._log_sum_exp = log_sum_exp

    def plan(
        self, rows: Sequence[SampledRow], *, eos_ids: frozenset[int], upload: HostToDevice
    ) -> SampleRows:
        """Gather the options of the rows that are sampled, in the order of the logits."""
        return build_sample_rows(
            rows, vocab_size=self._vocab_size, eos_ids=eos_ids, memory=self._memory, upload=upload
        )

    @abstractmethod
    def sample(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sample` of this module."""

    def take(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A copy of these rows, numbers [R] int64."""
        return logits.index_select(0, rows)

    def are_finite(self, logits: torch.Tensor) -> torch.Tensor:
        """[S] bool: whether all of a row is."""
        least, most = torch.aminmax(logits, dim=-1)
        return least.isfinite() & most.isfinite()

    def score(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_top: int,
        *,
        listed: torch.Tensor | None = None,
        ranked: bool = False,
    ) -> TokenScores:
        """See `scoring.score_tokens`."""
        return score_tokens(
            logits, tokens, num_top, listed=listed, ranked=ranked, log_sum_exp=self._log_sum_exp
        )


class TorchSampler(Sampler):
    """A Sampler of torch operations, on any device."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, torch_log_sum_exp)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits, rows, last_tokens, masks)


class NumbaSampler(Sampler):
    """The same, with kernels for what every row needs, its largest logit and its draw, and for log probabilities. What
    most steps need wakes none of torch's threads: they then wait on the cores of the kernels' team."""

    def __init__(self, vocab_size: int) -> None:
        # numba takes a second to import.
        from loraplex.kernels.sampling.numba_argmax import largest
        from loraplex.kernels.sampling.numba_logsumexp import log_sum_exp
        from loraplex.kernels.sampling.numba_sampling import draw

        super().__init__(vocab_size, log_sum_exp)
        self._largest = largest
        self._draw = draw

    def take(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(logits.numpy()[rows.numpy()])

    def are_finite(self, logits: torch.Tensor) -> torch.Tensor:
        return self._largest(logits)[1]

    def sample(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        if rows.history is None and rows.biases is None:
            tokens, ok = self._largest(logits, masks)
        else:
            _, ok = self._largest(logits)
            _edit(logits, rows, last_tokens)
            tokens, _ = self._largest(logits, masks)  # what is banned is not finite any more
            ok &= logits.gather(1, tokens[:, None])[:, 0].isfinite()
        if rows.options is not None:
            self._draw(logits, tokens, ok, rows.options)
        return tokens.masked_fill_(~ok, 0), ok


class TritonSampler(Sampler):
    """A Sampler that draws in a few launches whatever the rows' options; see
    `loraplex.kernels.sampling.triton_sampling` for how its draws may differ from `sample`."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        # Triton need not be there where it does not run.
        from loraplex.kernels.sampling.triton_logsumexp import log_sum_exp, warm_up
        from loraplex.kernels.sampling.triton_sampling import TritonSampling

        super().__init__(vocab_size, log_sum_exp)
        self._sampling = TritonSampling(max_rows, vocab_size, device)
        # Compiling takes seconds, which no request should wait for.
        self._sampling.warm_up()
        warm_up(vocab_size, device)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._sampling.draw(logits, rows, last_tokens, masks)


def sample(
    logits: torch.Tensor, rows: SampleRows, last_tokens: torch.Tensor, masks: TokenMasks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row.

    logits: [S, V] float32, overwritten; last_tokens: [S] int64, the input token of each row (an output token that
    the host does not know yet, for the pending rows of `rows.history`). Returns tokens [S] int64 and ok [S]
    bool: False where the row's logits were not all finite, or its options left no token to draw; its token is 0.
    """
    least, most = torch.aminmax(logits, dim=-1)
    ok = least.isfinite() & most.isfinite()
    _edit(logits, rows, last_tokens)
    if masks is not None:
        _bar_tokens(logits, masks)
    best, tokens = logits.max(dim=-1)
    ok &= best.isfinite()
    if rows.options is not None and len(drawn := rows.options.drawn):
        index = torch.from_numpy(drawn).to(logits.device)
        sampled = _draw(logits.index_select(0, index), best.index_select(0, index), rows.options, index)
        tokens = tokens.index_copy(0, index, sampled)
    return tokens.masked_fill(~ok, 0), ok


def _edit(logits: torch.Tensor, rows: SampleRows, last_tokens: torch.Tensor) -> None:
    """Changes of single logits before a token is chosen."""
    if rows.history is not None:
        assert rows.options is not None, "penalties without options"
        _penalise(logits, rows.history, rows.options.device, last_tokens)
    if (biases := rows.biases) is not None:
        found = _row_numbers(biases.starts, len(biases.tokens))
        logits.view(-1).index_add_(0, found * logits.shape[1] + biases.tokens, biases.values)


def _row_numbers(starts: torch.Tensor, size: int) -> torch.Tensor:
    """[size]: the row of each item of lists that begin at `starts` [S + 1]."""
    return torch.repeat_interleave(starts.diff(), output_size=size)


def _bar_tokens(logits: torch.Tensor, masks: TokenMasks) -> None:
    x = logits.index_select(0, masks.rows)
    shifts = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = (masks.bits[:, :, None] >> shifts & 1).flatten(1)[:, : x.shape[1]]
    logits.index_copy_(0, masks.rows, x.masked_fill_(allowed == 0, float("-inf")))


def _penalise(
    logits: torch.Tensor, history: History, options: torch.Tensor, last_tokens: torch.Tensor
) -> None:
    """Changes the logits of the tokens that occurred, and no others: a vocabulary has many more. options [S, K]
    float64."""
    rows = _row_numbers(history.starts, len(history.entries))
    tokens = history.entries & (1 << TOKEN_BITS) - 1
    # The token that only the device knows counts once more, or stands behind the others.
    again = (history.pending.index_select(0, rows) > 0) & (tokens == last_tokens.index_select(0, rows))
    fresh = history.pending.index_fill(0, rows[again], 0).nonzero()[:, 0]
    rows, tokens = torch.cat((rows, fresh)), torch.cat((tokens, last_tokens.index_select(0, fresh)))
    count = torch.cat(((history.entries >> TOKEN_BITS) + again, torch.ones_like(fresh))).float()
    repetition, frequency, presence = (
        options[:, option].float().index_select(0, rows)
        for option in (Option.REPETITION_PENALTY, Option.FREQUENCY_PENALTY, Option.PRESENCE_PENALTY)
    )
    places, flat = rows * logits.shape[1] + tokens, logits.view(-1)
    x = flat.index_select(0, places)
    x = torch.where(x > 0, x / repetition, x * repetition)
    flat.index_copy_(0, places, x - count * frequency - (count > 0) * presence)


def _draw(x: torch.Tensor, best: torch.Tensor, options: Options, index: torch.Tensor) -> torch.Tensor:
    """x: [R, V] logits of the rows `index` [R], overwritten; best: [R] their maxima. Returns [R] int64."""
    own = options.device.index_select(0, index)
    x.sub_(best[:, None]).div_(own[:, Option.TEMPERATURE, None].float())
    weights = x.exp_()  # the best token has weight 1
    ranked = np.searchsorted(options.drawn, options.ranked(x.shape[1]))
    if len(ranked):
        places = torch.from_numpy(ranked).to(x.device)
        chosen = weights.index_select(0, places)
        chosen.masked_fill_(chosen < _thresholds(chosen, own.index_select(0, places))[:, None], 0.0)
        weights.index_copy_(0, places, chosen)
    if (options.host[:, Option.MIN_P] > 0).any():
        weights.masked_fill_(weights < own[:, Option.MIN_P, None].float(), 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = own[:, Option.UNIFORM, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_max_(x.shape[1] - 1)  # beyond the end only for a row that failed


def _thresholds(weights: torch.Tensor, options: torch.Tensor) -> torch.Tensor:
    """[F]: the least weight that top_k and top_p let through, in each row of weights [F, V].

    On a CPU, where sorting a vocabulary costs as much as a small model's step, a row is sorted by its best 1024
    tokens first, and fully only if these do not decide it. On a GPU, where it is cheap and asking would stall the
    queue, all are sorted.
    """
    vocab_size = weights.shape[1]
    k, p = options[:, Option.TOP_K, None].long(), options[:, Option.TOP_P, None]
    k = torch.where((k > 0) & (k < vocab_size), k, vocab_size)
    if weights.device.type != "cpu" or vocab_size <= _CANDIDATES:
        return _ranked_thresholds(weights, k, p, vocab_size)[0]
    answer = torch.zeros(len(k), dtype=weights.dtype)
    shallow = ((k <= _CANDIDATES) | (k == vocab_size))[:, 0].nonzero()[:, 0]
    deep = ((k > _CANDIDATES) & (k < vocab_size))[:, 0].nonzero()[:, 0]
    if len(shallow):
        thresholds, decided = _ranked_thresholds(weights[shallow], k[shallow], p[shallow], _CANDIDATES)
        answer[shallow] = thresholds
        deep = torch.cat((deep, shallow[~decided])).sort().values
    if len(deep):
        answer[deep] = _ranked_thresholds(weights[deep], k[deep], p[deep], vocab_size)[0]
    return answer


def _ranked_thresholds(
    weights: torch.Tensor, k: torch.Tensor, p: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [F, 1] int64, p [F, 1] float64 → [F] thresholds, and [F] bool: whether the best `depth` tokens decided the
    row."""
    vocab_size = weights.shape[1]
    ranked = (weights.topk(depth) if depth < vocab_size else weights.sort(descending=True)).values
    limited = k <= depth
    by_k = ranked.gather(1, (k - 1).clamp_max(depth - 1)) * limited
    # top_p shares out what top_k left.
    total = (weights * (weights >= by_k)).sum(dim=-1, keepdim=True, dtype=torch.float64)
    cumulative = ranked.cumsum(dim=-1, dtype=torch.float64)
    last = (cumulative < p * total).sum(dim=-1, keepdim=True)
    by_p = ranked.gather(1, last.clamp_max(depth - 1)) * (p < 1.0)
    decided = limited | (last < depth) if depth < vocab_size else torch.ones_like(limited)
    return torch.maximum(by_k, by_p)[:, 0], decided[:, 0]


_SAMPLERS: dict[Backend, Callable[[int, int, torch.device], Sampler]] = {
    "torch": lambda vocab_size, max_rows, device: TorchSampler(vocab_size),
    "numba": lambda vocab_size, max_rows, device: NumbaSampler(vocab_size),
    "triton": TritonSampler,
}


def make_sampler(kernels: Kernels, *, vocab_size: int, max_rows: int) -> Sampler:
    """The sampler beside these kernels. `max_rows`: the most that a step samples. Raises ValueError for a vocabulary
    that they can't take."""
    return _SAMPLERS[kernels.backend](vocab_size, max_rows, kernels.device)
