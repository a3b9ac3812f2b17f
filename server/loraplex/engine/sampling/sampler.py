"""Sampling from logits, all rows at once.

A row's options act in this order: penalties, logit_bias, min_tokens, the grammar's mask, then either the largest logit
(temperature 0) or temperature, top_k, top_p, min_p and a draw. Repetition penalty divides positive and multiplies
negative logits of the tokens of prompt and output (Keskar et al., 2019); presence and frequency penalties count output
tokens only, as in OpenAI's API. Tokens that tie with the last one that top_k or top_p lets through are let through as
well. A draw inverts the cumulative distribution, in the order of the vocabulary, at the row's own number of [0, 1): so
it depends on neither batch-mates nor a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.batch import (
    MIN_TEMPERATURE,
    Draws,
    Penalties,
    Ranking,
    SamplingBatch,
    TokenHistory,
    build_sampling_batch,
)
from loraplex.engine.sampling.rows import TokenCounts, build_sample_rows
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.sampling.scoring import TokenScores, score_tokens, torch_log_sum_exp
from loraplex.kernels.bundle import Backend, Kernels
from loraplex.kernels.sampling.types import TokenMasks

_CANDIDATES = 1024
"""How many of the best tokens a row is sorted by on a CPU before all of them are."""


class Sampler(Protocol):
    """Draws a step's tokens: `plan` on the thread that plans, in the order of the steps, the rest on the worker."""

    def plan(
        self, rows: Sequence[SampledRow], *, eos_ids: frozenset[int], upload: HostToDevice
    ) -> SamplingBatch:
        """Parameters of the rows that are sampled, in the order of the logits."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sample` of this module."""
        ...

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
        ...


class _Scorer:
    """The scores of any Sampler. `log_sum_exp`: [L, V] → [L, 1]."""

    def __init__(self, log_sum_exp: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._log_sum_exp = log_sum_exp

    def score(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_top: int,
        *,
        listed: torch.Tensor | None = None,
        ranked: bool = False,
    ) -> TokenScores:
        return score_tokens(
            logits, tokens, num_top, listed=listed, ranked=ranked, log_sum_exp=self._log_sum_exp
        )


class TorchSampler(_Scorer):
    """A Sampler of torch operations, on any device."""

    def __init__(
        self, vocab_size: int, log_sum_exp: Callable[[torch.Tensor], torch.Tensor] = torch_log_sum_exp
    ) -> None:
        super().__init__(log_sum_exp)
        self._vocab_size = vocab_size
        self._history = TokenHistory()

    def plan(
        self, rows: Sequence[SampledRow], *, eos_ids: frozenset[int], upload: HostToDevice
    ) -> SamplingBatch:
        return build_sampling_batch(
            rows, vocab_size=self._vocab_size, eos_ids=eos_ids, history=self._history, upload=upload
        )

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(logits, batch, last_tokens, masks)


class NumbaSampler(TorchSampler):
    """The same, with kernels for what every row needs, its largest logit and its draw, and for log probabilities."""

    def __init__(self, vocab_size: int) -> None:
        # numba takes a second to import.
        from loraplex.kernels.sampling.numba_argmax import largest
        from loraplex.kernels.sampling.numba_logsumexp import log_sum_exp
        from loraplex.kernels.sampling.numba_sampling import draw

        super().__init__(vocab_size, log_sum_exp)
        self._largest = largest
        self._draw = draw

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        if batch.penalties is None and batch.bias is None and batch.banned is None:
            tokens, ok = self._largest(logits, masks)
        else:
            _, ok = self._largest(logits)
            _edit(logits, batch, last_tokens)
            tokens, _ = self._largest(logits, masks)  # what is banned is not finite any more
            ok &= logits.gather(1, tokens[:, None])[:, 0].isfinite()
        if (draws := batch.draws) is not None:
            self._draw(
                logits,
                tokens,
                ok,
                rows=draws.rows,
                temperature=draws.temperature.clamp_min(MIN_TEMPERATURE),
                uniform=draws.uniform,
                min_p=torch.zeros_like(draws.temperature) if draws.min_p is None else draws.min_p,
                top_k=_of_all(draws, "top_k", logits.shape[1]),
                top_p=_of_all(draws, "top_p", 1.0),
            )
        return tokens.masked_fill_(~ok, 0), ok


def _of_all(draws: Draws, limit: Literal["top_k", "top_p"], off: float) -> torch.Tensor:
    """[R, 1]: a limit of all sampled rows, those without it too."""
    kind = torch.int64 if limit == "top_k" else torch.float64
    values = torch.full_like(draws.uniform, off, dtype=kind)
    if draws.ranking is not None:
        values.index_copy_(0, draws.ranking.index, getattr(draws.ranking, limit))
    return values


class TritonSampler(_Scorer):
    """A Sampler that draws in a few launches whatever the rows' options; see
    `loraplex.kernels.sampling.triton_sampling` for how its draws may differ from `sample`."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        # Triton need not be there where it does not run.
        from loraplex.kernels.sampling.triton_logsumexp import log_sum_exp, warm_up
        from loraplex.kernels.sampling.triton_sampling import TritonSampling

        super().__init__(log_sum_exp)
        self._vocab_size = vocab_size
        self._counts = TokenCounts(vocab_size)
        self._sampling = TritonSampling(max_rows, vocab_size, device)
        # Compiling takes seconds, which no request should wait for.
        self._sampling.warm_up()
        warm_up(vocab_size, device)

    def plan(
        self, rows: Sequence[SampledRow], *, eos_ids: frozenset[int], upload: HostToDevice
    ) -> SamplingBatch:
        options = build_sample_rows(
            rows, vocab_size=self._vocab_size, eos_ids=eos_ids, counts=self._counts, upload=upload
        )
        return SamplingBatch(len(rows), rows=options)

    def sample(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.rows is not None, "this batch was planned for another sampler"
        return self._sampling.draw(logits, batch.rows, last_tokens, masks)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, last_tokens: torch.Tensor, masks: TokenMasks | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row.

    logits: [S, V] float32, overwritten; last_tokens: [S] int64, the input token of each row (an output token that
    the host does not know yet, for the pending rows of `batch.penalties`). Returns tokens [S] int64 and ok [S]
    bool: False where the row's logits were not all finite, or its options left no token to draw; its token is 0.
    """
    least, most = torch.aminmax(logits, dim=-1)
    ok = least.isfinite() & most.isfinite()
    _edit(logits, batch, last_tokens)
    if masks is not None:
        _bar_tokens(logits, masks)
    best, tokens = logits.max(dim=-1)
    ok &= best.isfinite()
    if batch.draws is not None:
        rows = batch.draws.rows
        sampled = _draw(logits.index_select(0, rows), best.index_select(0, rows), batch.draws)
        tokens = tokens.index_copy(0, rows, sampled)
    return tokens.masked_fill(~ok, 0), ok


def _edit(logits: torch.Tensor, batch: SamplingBatch, last_tokens: torch.Tensor) -> None:
    """Changes of single logits before a token is chosen."""
    if batch.penalties is not None:
        _penalise(logits, batch.penalties, last_tokens)
    if batch.bias is not None:
        logits.view(-1).index_add_(0, *batch.bias)
    if batch.banned is not None:
        logits.view(-1).index_fill_(0, batch.banned, float("-inf"))


def _bar_tokens(logits: torch.Tensor, masks: TokenMasks) -> None:
    x = logits.index_select(0, masks.rows)
    shifts = torch.arange(32, dtype=torch.int32, device=x.device)
    allowed = (masks.bits[:, :, None] >> shifts & 1).flatten(1)[:, : x.shape[1]]
    logits.index_copy_(0, masks.rows, x.masked_fill_(allowed == 0, float("-inf")))


def _penalise(logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor) -> None:
    """Changes the logits of the tokens that occurred, and no others: a vocabulary has many more. A token that occurred
    several times is computed as often, with the same result: to find those that differ, a GPU would be waited for."""
    vocab_size = logits.shape[1]
    flat_pending = penalties.pending * vocab_size + last_tokens.index_select(
        0, penalties.rows.index_select(0, penalties.pending)
    )
    outputs = torch.cat((penalties.outputs, flat_pending))
    counts = torch.zeros(penalties.rows.shape[0] * vocab_size, dtype=logits.dtype, device=logits.device)
    counts.scatter_add_(0, outputs, torch.ones_like(outputs, dtype=logits.dtype))
    occurred = torch.cat((penalties.context, flat_pending))
    places, tokens = occurred.div(vocab_size, rounding_mode="floor"), occurred.remainder(vocab_size)
    count = counts.index_select(0, occurred)
    rows = penalties.rows.index_select(0, places)
    repetition, frequency, presence = (
        each.view(-1).index_select(0, places)
        for each in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    x = logits[rows, tokens]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits[rows, tokens] = x - count * frequency - (count > 0) * presence


def _draw(x: torch.Tensor, best: torch.Tensor, draws: Draws) -> torch.Tensor:
    """x: [R, V] logits, overwritten; best: [R] their maxima. Returns [R] int64."""
    x.sub_(best[:, None]).div_(draws.temperature.clamp_min(MIN_TEMPERATURE))
    weights = x.exp_()  # the best token has weight 1
    if draws.ranking is not None:
        ranking = draws.ranking
        ranked = weights.index_select(0, ranking.index)
        ranked.masked_fill_(ranked < _thresholds(ranked, ranking)[:, None], 0.0)
        weights.index_copy_(0, ranking.index, ranked)
    if draws.min_p is not None:
        weights.masked_fill_(weights < draws.min_p, 0.0)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = draws.uniform * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp_max_(x.shape[1] - 1)  # beyond the end only for a row that failed


def _thresholds(weights: torch.Tensor, ranking: Ranking) -> torch.Tensor:
    """[F]: the least weight that top_k and top_p let through, in each row of weights [F, V].

    On a CPU, where sorting a vocabulary costs as much as a small model's step, a row is sorted by its best 1024
    tokens first, and fully only if these do not decide it. On a GPU, where it is cheap and asking would stall the
    queue, all are sorted.
    """
    size, vocab_size = weights.shape
    if weights.device.type != "cpu" or vocab_size <= _CANDIDATES:
        return _ranked_thresholds(weights, ranking.top_k, ranking.top_p, vocab_size)[0]
    shallow = [f for f in range(size) if ranking.depths[f] <= _CANDIDATES or ranking.depths[f] == vocab_size]
    answer = torch.zeros(size, dtype=weights.dtype)
    undecided = set(range(size)) - set(shallow)
    if shallow:
        thresholds, decided = _ranked_thresholds(
            weights[shallow], ranking.top_k[shallow], ranking.top_p[shallow], _CANDIDATES
        )
        answer[shallow] = thresholds
        undecided |= {f for f, done in zip(shallow, decided.tolist(), strict=True) if not done}
    if undecided:
        deep = sorted(undecided)
        answer[deep] = _ranked_thresholds(
            weights[deep], ranking.top_k[deep], ranking.top_p[deep], vocab_size
        )[0]
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
