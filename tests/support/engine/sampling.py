"""Rows about to draw, and what their options mean in float64."""

from __future__ import annotations

from collections import Counter

import numpy as np

from loraplex.engine.sampling.sampled_row import SampledRow
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence

EOS = frozenset({2})


def row(
    name: str, params: SamplingParams, *, prompt: tuple[int, ...] = (3, 4), output: tuple[int, ...] = (),
    pending: int | None = None,
) -> SampledRow:  # fmt: skip
    """A row about to draw its next token; `pending` is an output token that only the device knows."""
    count = len(output) + (pending is not None)
    start = len(prompt) + count - 1
    request = EngineRequest(name, "t", prompt, params)
    return SampledRow(
        ScheduledSequence(
            request, 0, 0, start, 1, (0,), (0,), -1, True, pending is not None, count, outputs=output
        )
    )


def reference_weights(
    logits: np.ndarray, item: SampledRow, pending: int | None, allowed: np.ndarray | None = None
) -> np.ndarray:
    """The unnormalised distribution of one row, written down plainly in float64; one-hot if greedy. `allowed` [V] bool:
    its grammar's mask."""
    p = item.request.sampling
    x = logits.astype(np.float64).copy()
    output = [*item.outputs, *(() if pending is None else (pending,))]
    context = [*item.request.prompt_ids, *output]
    for token in set(context):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in p.logit_bias:
        x[token] += bias
    if item.output_index < p.min_tokens:
        for token in (set() if p.ignore_eos else EOS) | set(p.stop_token_ids):
            x[token] = -np.inf
    if allowed is not None:
        x[~allowed] = -np.inf
    if p.temperature == 0:
        return (np.arange(len(x)) == x.argmax()).astype(np.float64)
    w = np.exp((x - x.max()) / p.temperature)
    if p.top_k:
        w = np.where(w >= np.sort(w)[-min(p.top_k, len(w))], w, 0)
    if p.top_p < 1:
        ranked = np.sort(w)[::-1]
        last = np.searchsorted(np.cumsum(ranked), p.top_p * w.sum())
        w = np.where(w >= ranked[min(last, len(w) - 1)], w, 0)
    return np.where(w >= p.min_p, w, 0)


def cuts(w: np.ndarray) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(w))) / w.sum()
