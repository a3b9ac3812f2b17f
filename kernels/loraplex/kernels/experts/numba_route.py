"""The router's choice on a CPU, compiled by numba: `route` of `loraplex.kernels.experts.torch_experts`."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch

from loraplex.kernels.experts.torch_experts import LEAST_SUM
from loraplex.kernels.experts.types import RouterKind, Routes
from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    first_lane,
    jit,
    load_first,
    read_float32,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    write_float32,
    write_int64,
)

_SCORES = {"softmax": 0, "softmax_of_top": 1, "sigmoid": 2}
_SOFTMAX, _SOFTMAX_OF_TOP, _SIGMOID = _SCORES.values()
_LEAST_SUM, _INFINITE = LEAST_SUM, np.float32(np.inf)


def route(
    logits: torch.Tensor,
    kind: RouterKind,
    correction: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Routes:
    """Raises ValueError where they do not fit."""
    rows, experts = logits.shape
    fits = experts == kind.num_experts and logits.stride(1) == 1
    for by_expert in (correction, scales):
        if by_expert is not None:
            fits = fits and by_expert.shape == (experts,) and by_expert.dtype is torch.float32
    if forced is not None:
        known = forced.shape == (rows, kind.top_k) and int(forced.min()) >= 0
        fits = fits and known and int(forced.max()) < experts
    if not fits:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} do not fit {kind}")
    ids = torch.empty(rows, kind.top_k, dtype=torch.int64)
    if forced is not None:
        ids.copy_(forced)
    weights = torch.empty(rows, kind.top_k)
    _route_all.run(
        (LIKE[logits.dtype],),
        logits.data_ptr(),
        logits.stride(0) * logits.element_size(),
        experts,
        0 if correction is None else correction.data_ptr(),
        kind.top_k,
        _SCORES[kind.scores],
        int(kind.normalise),
        kind.scaling,
        kind.groups,
        kind.top_groups,
        int(kind.weights_in_float32),
        int(forced is not None),
        0 if scales is None else scales.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        rows_of_unit(rows),
        alone=rows * experts <= SMALL // 64,
    )
    return Routes(ids, weights)


@jit
def _score(logits, correction, kind, scores, chosen_by, like):
    """One row's scores, in float64 number by number as there are few, and what experts are chosen by."""
    num, most = len(scores), -_INFINITE
    for e in range(num):
        scores[e] = first_lane(load_first(logits + e * size_of(like), 1, like))
        most = max(most, scores[e])
    if kind == _SOFTMAX:
        total = 0.0
        for e in range(num):
            total += math.exp(np.float64(scores[e] - most))
        for e in range(num):
            scores[e] = np.float32(math.exp(np.float64(scores[e] - most)) / total)
    elif kind == _SIGMOID:
        for e in range(num):
            scores[e] = np.float32(1.0 / (1.0 + math.exp(-np.float64(scores[e]))))
    for e in range(num):
        chosen_by[e] = scores[e]
        if correction != 0:
            chosen_by[e] += read_float32(correction + e * 4)


@jit
def _leave_out(chosen_by, groups, top_groups, best):
    """Take the experts of all but the best groups out of the choice; of equal groups the higher number goes first."""
    size = len(chosen_by) // groups
    for g in range(groups):
        first = second = -_INFINITE
        for e in range(g * size, (g + 1) * size):
            if chosen_by[e] > first:
                first, second = chosen_by[e], first
            elif chosen_by[e] > second:
                second = chosen_by[e]
        best[g] = first + second if size > 1 else first
    for _ in range(groups - top_groups):
        worst = -1
        for g in range(groups):
            if best[g] != _INFINITE and (worst < 0 or best[g] <= best[worst]):
                worst = g
        if worst >= 0:
            best[worst] = _INFINITE
            for e in range(worst * size, (worst + 1) * size):
                chosen_by[e] = -_INFINITE


@jit
def _choose(chosen_by, top_k, ids):
    for j in range(top_k):
        top = 0
        for e in range(1, len(chosen_by)):
            if chosen_by[e] > chosen_by[top]:
                top = e
        write_int64(top, ids + j * 8)
        chosen_by[top] = -_INFINITE


@jit
def _weigh(scores, ids, top_k, kind, normalise, scaling, in_float32, by_expert, weights, like):
    most, total = -_INFINITE, 0.0
    for j in range(top_k):
        most = max(most, scores[read_int64(ids + j * 8)])
    for j in range(top_k):
        score = np.float64(scores[read_int64(ids + j * 8)])
        total += math.exp(score - most) if kind == _SOFTMAX_OF_TOP else score
    if kind == _SIGMOID:
        total += _LEAST_SUM
    for j in range(top_k):
        expert = read_int64(ids + j * 8)
        score = np.float64(scores[expert])
        share = math.exp(score - most) if kind == _SOFTMAX_OF_TOP else score
        if kind == _SOFTMAX_OF_TOP or normalise != 0:
            share /= total
        share *= scaling
        if by_expert != 0:
            share *= np.float64(read_float32(by_expert + expert * 4))
        weight = np.float32(share)
        write_float32(
            weight if in_float32 != 0 else first_lane(rounded(splat(weight), like)), weights + j * 4
        )


def _route_units(team, arguments, like):
    logits, row_bytes, experts = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    correction, top_k, kind = (read_int64(arguments + 24), read_int64(arguments + 32),
                               read_int64(arguments + 40))  # fmt: skip
    normalise, scaling, groups = (read_int64(arguments + 48), read_float64(arguments + 56),
                                  read_int64(arguments + 64))  # fmt: skip
    top_groups, in_float32, forced = (read_int64(arguments + 72), read_int64(arguments + 80),
                                      read_int64(arguments + 88))  # fmt: skip
    by_expert, ids, weights = (read_int64(arguments + 96), read_int64(arguments + 104),
                               read_int64(arguments + 112))  # fmt: skip
    rows, share = read_int64(arguments + 120), read_int64(arguments + 128)
    scores, chosen_by = np.empty(experts, np.float32), np.empty(experts, np.float32)
    best = np.empty(groups, np.float32)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            own = ids + row * top_k * 8
            _score(logits + row * row_bytes, correction, kind, scores, chosen_by, like)
            if forced == 0:
                if groups > 1:
                    _leave_out(chosen_by, groups, top_groups, best)
                _choose(chosen_by, top_k, own)
            to = weights + row * top_k * 4
            _weigh(scores, own, top_k, kind, normalise, scaling, in_float32, by_expert, to, like)


_route_all = Kernel(_route_units, "qqqqqqqdqqqqqqqqq")
