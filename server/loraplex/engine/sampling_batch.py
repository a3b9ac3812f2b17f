"""What the sampler needs to know of a step's rows, gathered on the thread that plans, before the rows can change."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.sampling_noise import uniform
from loraplex.engine.types import SamplingParams, ScheduledSequence
from loraplex.engine.types import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class Penalties:
    """For P of the sampled rows: `rows` [P]; `repetition`, `presence`, `frequency` [P, 1] float32; `context` and
    `outputs`: flat indices p·V + token of every token of the sequence, and of every output token, as often as it
    occurs. `pending` [≤ P] are the p whose newest output token is known to the device alone."""

    rows: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    context: torch.Tensor
    outputs: torch.Tensor
    pending: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ranking:
    """For F of the drawn rows, positions `index` [F] among them: `top_k` (the vocabulary's size where it is off)
    and `top_p`, on the host, because they decide how far a row must be sorted."""

    index: torch.Tensor
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Draws:
    """For the R sampled rows that are not greedy: `rows` [R] int64, `temperature` [R, 1] float32, `uniform` [R, 1]
    float64 in [0, 1), `min_p` [R, 1] float32 or None where no row has one."""

    rows: torch.Tensor
    temperature: torch.Tensor
    uniform: torch.Tensor
    min_p: torch.Tensor | None
    ranking: Ranking | None


@dataclass(frozen=True, slots=True)
class AskedScores:
    """For the L sampled rows whose log probabilities are wanted: `rows` [L] int64 and the same as `sampled` on the
    host, `num_top` how many of the most likely tokens each wants."""

    rows: torch.Tensor
    sampled: tuple[int, ...]
    num_top: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One step's S sampled rows; a part is None where no row needs it. Flat indices are s·V + token."""

    num_rows: int
    penalties: Penalties | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    banned: torch.Tensor | None = None
    draws: Draws | None = None
    scores: AskedScores | None = None


class TokenHistory:
    """The tokens of sequences as integer arrays, grown from step to step instead of converted anew. For the
    planning thread alone."""

    def __init__(self) -> None:
        self._known: dict[str, array[int]] = {}

    def tokens(self, seq: EngineSequence) -> NDArray[np.int64]:
        """[len(seq.token_ids)]: a copy. A sequence only ever grows."""
        known = self._known.setdefault(seq.request_id, array("q"))
        known.extend(seq.token_ids[len(known) :])
        return np.array(known, dtype=np.int64)

    def keep(self, request_ids: Iterable[str]) -> None:
        """Forget all others."""
        if self._known:
            keep = set(request_ids)
            self._known = {k: v for k, v in self._known.items() if k in keep}


def build_sampling_batch(
    rows: Sequence[ScheduledSequence],
    *,
    vocab_size: int,
    eos_ids: frozenset[int],
    history: TokenHistory,
    device: torch.device,
) -> SamplingBatch:
    """`rows` are the slices that sample, in the order of the logits. Token ids beyond the vocabulary are passed
    over: they can neither occur nor be drawn."""
    history.keep(row.seq.request_id for row in rows)
    return SamplingBatch(
        num_rows=len(rows),
        penalties=_penalties(rows, vocab_size, history, device),
        bias=_bias(rows, vocab_size, device),
        banned=_banned(rows, vocab_size, eos_ids, device),
        draws=_draws(rows, vocab_size, device),
        scores=_scores(rows, device),
    )


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _penalties(
    rows: Sequence[ScheduledSequence], vocab_size: int, history: TokenHistory, device: torch.device
) -> Penalties | None:
    chosen = [(s, row) for s, row in enumerate(rows) if _has_penalty(row.seq.request.sampling)]
    if not chosen:
        return None
    context: list[NDArray[np.int64]] = []
    outputs: list[NDArray[np.int64]] = []
    for p, (_, row) in enumerate(chosen):
        tokens = history.tokens(row.seq)
        answer = tokens[row.seq.num_prompt :]
        for found, into in ((tokens, context), (answer, outputs)):
            into.append(found[(found >= 0) & (found < vocab_size)] + p * vocab_size)
    params = [row.seq.request.sampling for _, row in chosen]
    pending = [p for p, (_, row) in enumerate(chosen) if row.pending_input]
    return Penalties(
        rows=_ints([s for s, _ in chosen], device),
        repetition=_floats([p.repetition_penalty for p in params], device),
        presence=_floats([p.presence_penalty for p in params], device),
        frequency=_floats([p.frequency_penalty for p in params], device),
        context=torch.from_numpy(np.concatenate(context)).to(device, non_blocking=True),
        outputs=torch.from_numpy(np.concatenate(outputs)).to(device, non_blocking=True),
        pending=_ints(pending, device),
    )


def _bias(
    rows: Sequence[ScheduledSequence], vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    indices: list[int] = []
    values: list[float] = []
    for s, row in enumerate(rows):
        for token, value in row.seq.request.sampling.logit_bias:
            if 0 <= token < vocab_size:
                indices.append(s * vocab_size + token)
                values.append(value)
    if not indices:
        return None
    return _ints(indices, device), _floats(values, device)[:, 0]


def _banned(
    rows: Sequence[ScheduledSequence], vocab_size: int, eos_ids: frozenset[int], device: torch.device
) -> torch.Tensor | None:
    indices: set[int] = set()
    for s, row in enumerate(rows):
        params = row.seq.request.sampling
        if row.output_index < params.min_tokens:
            ends = set(params.stop_token_ids) if params.ignore_eos else eos_ids.union(params.stop_token_ids)
            indices.update(s * vocab_size + token for token in ends if 0 <= token < vocab_size)
    return _ints(sorted(indices), device) if indices else None


def _draws(rows: Sequence[ScheduledSequence], vocab_size: int, device: torch.device) -> Draws | None:
    chosen = [(s, row) for s, row in enumerate(rows) if row.seq.request.sampling.temperature > 0.0]
    if not chosen:
        return None
    params = [row.seq.request.sampling for _, row in chosen]
    noise = [uniform(p.seed, p.choice, row.output_index) for p, (_, row) in zip(params, chosen, strict=True)]
    ranked = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    ranking = None
    if ranked:
        top_k = tuple(params[r].top_k if 0 < params[r].top_k < vocab_size else vocab_size for r in ranked)
        ranking = Ranking(_ints(ranked, device), top_k, tuple(params[r].top_p for r in ranked))
    return Draws(
        rows=_ints([s for s, _ in chosen], device),
        temperature=_floats([p.temperature for p in params], device),
        uniform=torch.tensor(noise, dtype=torch.float64)[:, None].to(device, non_blocking=True),
        min_p=_floats([p.min_p for p in params], device) if any(p.min_p > 0.0 for p in params) else None,
        ranking=ranking,
    )


def _scores(rows: Sequence[ScheduledSequence], device: torch.device) -> AskedScores | None:
    asked = [(s, row.seq.request.sampling.logprobs) for s, row in enumerate(rows)]
    chosen = {s: num_top for s, num_top in asked if num_top is not None}
    if not chosen:
        return None
    return AskedScores(_ints(list(chosen), device), tuple(chosen), tuple(chosen.values()))


def _ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _floats(values: list[float], device: torch.device) -> torch.Tensor:
    """[n, 1] float32."""
    return torch.tensor(values, dtype=torch.float32)[:, None].to(device, non_blocking=True)
