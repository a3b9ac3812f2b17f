"""Drawing tokens from logits, all rows at once.

A row's options act in this order: penalties, logit_bias, min_tokens, then either the largest logit (temperature 0)
or temperature, top_k, top_p, min_p and a draw. Repetition penalty divides positive and multiplies negative logits
of the tokens of prompt and output (Keskar et al., 2019); presence and frequency penalties count output tokens only,
as in OpenAI's API. Tokens that tie with the last one that top_k or top_p lets through are let through as well.
A draw inverts the cumulative distribution, in the order of the vocabulary, at the row's own number of [0, 1): so
it depends on neither batch-mates nor a generator's state.
"""

from __future__ import annotations

import torch

from loraplex.engine.sampling_batch import Draws, Penalties, Ranking, SamplingBatch

_CANDIDATES = 1024
"""How many of the best tokens a row is sorted by on a CPU before all of them are."""
_MIN_TEMPERATURE = 1e-20
"""Below it float32 would divide by zero. The largest logit has won long before."""


def sample(
    logits: torch.Tensor, batch: SamplingBatch, last_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    logits: [S, V] float32, overwritten; last_tokens: [S] int64, the input token of each row (an output token that
    the host does not know yet, for the pending rows of `batch.penalties`). Returns tokens [S] int64 and ok [S]
    bool: False where the row's logits were not all finite, or its options left no token to draw; its token is 0.
    """
    least, most = torch.aminmax(logits, dim=-1)
    ok = least.isfinite() & most.isfinite()
    if batch.penalties is not None:
        _penalise(logits, batch.penalties, last_tokens)
    if batch.bias is not None:
        logits.view(-1).index_add_(0, *batch.bias)
    if batch.banned is not None:
        logits.view(-1).index_fill_(0, batch.banned, float("-inf"))
    best, tokens = logits.max(dim=-1)
    ok &= best.isfinite()
    if batch.draws is not None:
        rows = batch.draws.rows
        drawn = _draw(logits.index_select(0, rows), best.index_select(0, rows), batch.draws)
        tokens = tokens.index_copy(0, rows, drawn)
    return tokens.masked_fill(~ok, 0), ok


def _penalise(logits: torch.Tensor, penalties: Penalties, last_tokens: torch.Tensor) -> None:
    x = logits.index_select(0, penalties.rows)
    flat_pending = penalties.pending * x.shape[1] + last_tokens.index_select(
        0, penalties.rows.index_select(0, penalties.pending)
    )
    occurs = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    occurs.view(-1).index_fill_(0, torch.cat((penalties.context, flat_pending)), True)
    outputs = torch.cat((penalties.outputs, flat_pending))
    counts = torch.zeros_like(x)
    counts.view(-1).scatter_add_(0, outputs, torch.ones_like(outputs, dtype=x.dtype))
    scaled = torch.where(x > 0, x / penalties.repetition, x * penalties.repetition)
    x = torch.where(occurs, scaled, x)
    x = x - counts * penalties.frequency - (counts > 0) * penalties.presence
    logits.index_copy_(0, penalties.rows, x)


def _draw(x: torch.Tensor, best: torch.Tensor, draws: Draws) -> torch.Tensor:
    """x: [R, V] logits, overwritten; best: [R] their maxima. Returns [R] int64."""
    x.sub_(best[:, None]).div_(draws.temperature.clamp_min(_MIN_TEMPERATURE))
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
