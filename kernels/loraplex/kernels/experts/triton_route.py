"""The router's choice in Triton: `route` of `loraplex.kernels.experts.torch_experts`, a program for each row."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.experts.torch_experts import LEAST_SUM
from loraplex.kernels.experts.types import RouterKind, Routes

_LEAST_SUM = tl.constexpr(LEAST_SUM)
_NONE = tl.constexpr(float("-inf"))


def route(
    logits: torch.Tensor,
    kind: RouterKind,
    correction: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Routes:
    """`forced` has to name experts that there are: it is not read on the host. A row with a NaN gets experts that there
    are too. Raises ValueError where shapes or dtypes do not fit."""
    rows, experts = logits.shape
    fits = experts == kind.num_experts and logits.stride(1) == 1
    if correction is not None:
        fits = fits and correction.shape == (experts,) and correction.dtype is torch.float32
    if forced is not None:
        fits = fits and forced.shape == (rows, kind.top_k) and forced.is_contiguous()
    if scales is not None:  # multiplied behind the kernel, and not rounded there
        fits = fits and scales.shape == (experts,) and kind.weights_in_float32
    if not fits:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} do not fit {kind}")
    ids = torch.empty(rows, kind.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, kind.top_k, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(experts)
    if rows:
        route_program[(rows,)](
            logits,
            logits.stride(0),
            weights if correction is None else correction,
            ids if forced is None else forced,
            ids,
            weights,
            kind.scaling,
            EXPERTS=experts,
            BLOCK_E=block,
            TOP_K=kind.top_k,
            BLOCK_K=triton.next_power_of_2(kind.top_k),
            GROUPS=kind.groups,
            BLOCK_G=triton.next_power_of_2(kind.groups),
            TOP_GROUPS=kind.top_groups,
            SCORES=kind.scores,
            NORMALISE=kind.normalise,
            CORRECTED=correction is not None,
            FORCED=forced is not None,
            ROUNDED=not kind.weights_in_float32,
            num_warps=max(1, min(8, block // 256)),
        )
    return Routes(ids, weights if scales is None else weights * scales[ids])


@triton.jit
def route_program(
    logits_ptr,
    logits_row,
    correction_ptr,
    forced_ptr,
    ids_ptr,
    weights_ptr,
    scaling,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALISE: tl.constexpr,
    CORRECTED: tl.constexpr,
    FORCED: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Experts and weights of a row, in float32 inside. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    x = tl.load(logits_ptr + row * logits_row + e, mask=e < EXPERTS, other=_NONE).to(tl.float32)
    scores = x
    if SCORES == "softmax":
        grown = tl.exp(x - tl.max(x, 0))
        scores = grown / tl.sum(grown, 0)
    elif SCORES == "sigmoid":
        scores = 1 / (1 + tl.exp(-x))
    by = scores
    if CORRECTED:
        by += tl.load(correction_ptr + e, mask=e < EXPERTS, other=0.0)
    # A NaN is never the largest, or no lane would hold what is largest.
    by = tl.where((e < EXPERTS) & (by == by), by, _NONE)  # noqa: PLR0124
    if GROUPS > 1:
        by = _in_best_groups(by, EXPERTS, BLOCK_E, GROUPS, BLOCK_G, TOP_GROUPS)
    ids = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.full([BLOCK_K], _NONE, tl.float32)
    for j in range(TOP_K):
        if FORCED:
            at = tl.load(forced_ptr + row * TOP_K + j).to(tl.int32)
        else:
            at = _first(by, tl.max(by, 0), BLOCK_E)
            by = tl.where(e == at, _NONE, by)
        ids = tl.where(k == j, at, ids)
        chosen = tl.where(k == j, tl.sum(tl.where(e == at, scores, 0.0), 0), chosen)
    if SCORES == "softmax_of_top":
        grown = tl.exp(chosen - tl.max(chosen, 0))
        weights = grown / tl.sum(grown, 0)
    else:
        weights = tl.where(k < TOP_K, chosen, 0.0)
        if NORMALISE:
            total = tl.sum(weights, 0)
            if SCORES == "sigmoid":
                total += _LEAST_SUM
            weights = weights / total
    weights *= scaling
    if ROUNDED:
        weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    tl.store(ids_ptr + row * TOP_K + k, ids.to(tl.int64), mask=k < TOP_K)
    tl.store(weights_ptr + row * TOP_K + k, weights, mask=k < TOP_K)


@triton.jit
def _first(x, value, BLOCK: tl.constexpr):
    """The lowest number of a lane that holds the value."""
    return tl.min(tl.where(x == value, tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def _in_best_groups(
    by,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """`by` without the experts of all groups but those with the largest sums of their best two."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    e = tl.arange(0, BLOCK_E)
    g = tl.arange(0, BLOCK_G)
    sums = tl.full([BLOCK_G], _NONE, tl.float32)
    for group in range(GROUPS):
        own = tl.where(e // SIZE == group, by, _NONE)
        best = tl.max(own, 0)
        if SIZE > 1:
            best += tl.max(tl.where(e == _first(own, best, BLOCK_E), _NONE, own), 0)
        sums = tl.where(g == group, best, sums)
    kept = tl.zeros([BLOCK_E], tl.int32)
    for _ in range(TOP_GROUPS):
        at = _first(sums, tl.max(sums, 0), BLOCK_G)
        kept = tl.where(e // SIZE == at, 1, kept)
        sums = tl.where(g == at, _NONE, sums)
    return tl.where(kept > 0, by, _NONE)
