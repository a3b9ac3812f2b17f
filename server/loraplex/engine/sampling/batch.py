"""The sampling parameters of a step's rows, gathered on the planning thread before the rows can change."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.host_to_device import HostToDevice
from loraplex.engine.sampling.noise import uniform
from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.kernels.sampling.types import SampleRows

MIN_TEMPERATURE = 1e-20
"""Below it float32 would divide by zero. The largest logit has won long before."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P of the sampled rows: `rows` [P]; `repetition`, `presence`, `frequency` [P, 1] float32; `context`
    and `outputs`: flat indices p·V + token of every token of the sequence, and of every output token, as often as it
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
    """Ranking of F of the sampled rows, positions `index` [F] among them: `top_k` [F, 1] int64 (the vocabulary's size
    where it is off) and `top_p` [F, 1] float64. `depths` is top_k on the host, where it decides how far a row must be
    sorted."""

    index: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draws:
    """Draws of the R sampled rows that are not greedy: `rows` [R] int64, `temperature` [R, 1] float32, `uniform` [R, 1]
    float64 in [0, 1), `min_p` [R, 1] float32 or None where no row has one."""

    rows: torch.Tensor
    temperature: torch.Tensor
    uniform: torch.Tensor
    min_p: torch.Tensor | None
    ranking: Ranking | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One step's S sampled rows; a part is None where no row needs it. Flat indices are s·V + token. `rows`: the same
    for drawing in Triton, instead of `penalties`, `bias`, `banned` and `draws`."""

    num_rows: int
    penalties: Penalties | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    banned: torch.Tensor | None = None
    draws: Draws | None = None
    rows: SampleRows | None = None


class TokenHistory:
    """The tokens of sequences as integer arrays, grown from step to step instead of converted again, and their biases.
    For the planning thread alone."""

    def __init__(self) -> None:
        self._known: dict[str, array[int]] = {}
        self._biases: dict[str, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def tokens(self, row: SampledRow) -> NDArray[np.int64]:
        """[P + O], prompt and answer of a row that tells its outputs, with the drafted tokens that it assumes: a copy.
        A sequence only ever grows."""
        known = self._known.get(row.request_id)
        if known is None:
            known = self._known[row.request_id] = array("q", row.request.prompt_ids)
        known.extend(row.outputs[len(known) - row.num_prompt :])
        return np.array(known + array("q", row.drafted) if row.offset else known, dtype=np.int64)

    def retain_requests(self, request_ids: Iterable[str]) -> None:
        """Forget all others."""
        if self._known or self._biases:
            keep = set(request_ids)
            self._known = {k: v for k, v in self._known.items() if k in keep}
            self._biases = {k: v for k, v in self._biases.items() if k in keep}

    def bias(self, row: SampledRow, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens of `logit_bias` and what is added to each, those beyond the vocabulary left out."""
        known = self._biases.get(row.request_id)
        if known is None:
            given = row.request.sampling.logit_bias
            tokens = np.array([token for token, _ in given], dtype=np.int64)
            values = np.array([value for _, value in given], dtype=np.float32)
            fits = (tokens >= 0) & (tokens < vocab_size)
            known = self._biases[row.request_id] = tokens[fits], values[fits]
        return known


def build_sampling_batch(
    rows: Sequence[SampledRow],
    *,
    vocab_size: int,
    eos_ids: frozenset[int],
    history: TokenHistory,
    upload: HostToDevice,
) -> SamplingBatch:
    """`rows` are in the order of the logits. Token ids beyond the vocabulary are passed
    over: they can neither occur nor be sampled."""
    history.retain_requests(row.request_id for row in rows)
    return SamplingBatch(
        num_rows=len(rows),
        penalties=_penalties(rows, vocab_size, history, upload),
        bias=_bias(rows, vocab_size, history, upload),
        banned=_banned(rows, vocab_size, eos_ids, upload),
        draws=_draws(rows, vocab_size, upload),
    )


def _penalties(
    rows: Sequence[SampledRow], vocab_size: int, history: TokenHistory, upload: HostToDevice
) -> Penalties | None:
    chosen = [(s, row) for s, row in enumerate(rows) if row.request.sampling.has_penalty]
    if not chosen:
        return None
    context: list[NDArray[np.int64]] = []
    outputs: list[NDArray[np.int64]] = []
    for p, (_, row) in enumerate(chosen):
        tokens = history.tokens(row)
        answer = tokens[row.num_prompt :]
        for found, into in ((tokens, context), (answer, outputs)):
            into.append(found[(found >= 0) & (found < vocab_size)] + p * vocab_size)
    params = [row.request.sampling for _, row in chosen]
    pending = [p for p, (_, row) in enumerate(chosen) if row.pending_input]
    return Penalties(
        rows=upload.ints([s for s, _ in chosen]),
        repetition=upload.floats([p.repetition_penalty for p in params])[:, None],
        presence=upload.floats([p.presence_penalty for p in params])[:, None],
        frequency=upload.floats([p.frequency_penalty for p in params])[:, None],
        context=upload.ints(np.concatenate(context)),
        outputs=upload.ints(np.concatenate(outputs)),
        pending=upload.ints(pending),
    )


def _bias(
    rows: Sequence[SampledRow], vocab_size: int, history: TokenHistory, upload: HostToDevice
) -> tuple[torch.Tensor, torch.Tensor] | None:
    found = [
        (s, *history.bias(row, vocab_size)) for s, row in enumerate(rows) if row.request.sampling.logit_bias
    ]
    if not any(len(tokens) for _, tokens, _ in found):
        return None
    indices = np.concatenate([tokens + s * vocab_size for s, tokens, _ in found])
    return upload.ints(indices), upload.floats(np.concatenate([values for _, _, values in found]))


def _banned(
    rows: Sequence[SampledRow], vocab_size: int, eos_ids: frozenset[int], upload: HostToDevice
) -> torch.Tensor | None:
    indices = [
        s * vocab_size + token
        for s, row in enumerate(rows)
        for token in barred_tokens(row, vocab_size, eos_ids)
    ]
    return upload.ints(indices) if indices else None


def barred_tokens(row: SampledRow, vocab_size: int, eos_ids: frozenset[int]) -> list[int]:
    """The tokens that would end a row before its `min_tokens`, in ascending order. A row with a grammar has them barred
    by its mask, unless the grammar allows nothing else."""
    params = row.request.sampling
    if row.output_index >= params.min_tokens or row.request.grammar is not None:
        return []
    ends = set(params.stop_token_ids) if params.ignore_eos else eos_ids.union(params.stop_token_ids)
    return sorted(token for token in ends if 0 <= token < vocab_size)


def _draws(rows: Sequence[SampledRow], vocab_size: int, upload: HostToDevice) -> Draws | None:
    chosen = [(s, row) for s, row in enumerate(rows) if row.request.sampling.temperature > 0.0]
    if not chosen:
        return None
    params = [row.request.sampling for _, row in chosen]
    noise = [uniform(p.seed, p.choice, row.output_index) for p, (_, row) in zip(params, chosen, strict=True)]
    ranked = [r for r, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    ranking = None
    if ranked:
        depths = tuple(params[r].top_k if 0 < params[r].top_k < vocab_size else vocab_size for r in ranked)
        top_p = upload.doubles([params[r].top_p for r in ranked])
        ranking = Ranking(upload.ints(ranked), upload.ints(depths)[:, None], top_p[:, None], depths)
    return Draws(
        rows=upload.ints([s for s, _ in chosen]),
        temperature=upload.floats([p.temperature for p in params])[:, None],
        uniform=upload.doubles(noise)[:, None],
        min_p=upload.floats([p.min_p for p in params])[:, None]
        if any(p.min_p > 0.0 for p in params)
        else None,
        ranking=ranking,
    )
