"""Mixtures of experts in torch's operations: the formulas, and what other implementations are compared with.

ids, w = the k largest of the scores of a row's logits, in falling order, equal ones by number
y[t]   = Σⱼ w[t, j] · down(act(gate_up(x[t])))  of expert ids[t, j], in the order of j
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.kernels.experts.types import (
    ExpertActivation,
    ExpertOps,
    ExpertRows,
    PackedExperts,
    RouterKind,
    Routes,
)
from loraplex.kernels.layers.activation import act_and_mul
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.weight_form import WeightForm

LEAST_SUM = 1e-20
"""Added to a sum of sigmoids that weights are divided by."""
Pack = Callable[[Any, WeightForm, torch.dtype], PackedLinear]
Activate = Callable[[torch.Tensor, bool], torch.Tensor]


def expert_ops(pack: Pack, activate: Activate = act_and_mul) -> ExpertOps:
    """The operations over linears that a backend packs one by one. They read the routes on the host."""

    def pack_all(weights: Iterable[Any], form: WeightForm, dtype: torch.dtype) -> PackedExperts:
        return LinearByExpert.of([pack(weight, form, dtype) for weight in weights])

    def act(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
        if kind.name == "clamped":
            return clamped(gate_up, kind)
        return activate(gate_up, kind.name == "gelu_tanh")

    return ExpertOps(route, group, gather, pack_all, LinearByExpert.of, act, combine, add_gated, keep_starts)


def route(
    logits: torch.Tensor,
    kind: RouterKind,
    correction: torch.Tensor | None = None,
    forced: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Routes:
    scores = logits.float()
    if kind.scores == "softmax":
        scores = scores.softmax(1)
    elif kind.scores == "sigmoid":
        scores = scores.sigmoid()
    ids = _choose(scores if correction is None else scores + correction, kind) if forced is None else forced
    weights = scores.gather(1, ids)
    if kind.scores == "softmax_of_top":
        weights = weights.softmax(1)
    elif kind.normalise:
        least = LEAST_SUM if kind.scores == "sigmoid" else 0.0
        weights = weights / (weights.sum(1, keepdim=True) + least)
    weights = weights * kind.scaling
    if scales is not None:
        weights = weights * scales[ids]
    return Routes(ids, weights if kind.weights_in_float32 else weights.to(logits.dtype).float())


def _choose(scores: torch.Tensor, kind: RouterKind) -> torch.Tensor:
    if kind.groups > 1:
        by_group = scores.view(len(scores), kind.groups, -1)
        sums = by_group.topk(min(2, by_group.shape[2]), 2).values.sum(2)
        left_out = _largest(sums, kind.groups)[:, kind.top_groups :]
        mask = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, left_out, True)
        scores = by_group.masked_fill(mask[:, :, None], -torch.inf).view_as(scores)
    return _largest(scores, kind.top_k)


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def group(routes: Routes, num_experts: int) -> ExpertRows:
    chosen = routes.ids.reshape(-1)
    order = chosen.argsort(stable=True)
    starts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    starts[1:] = chosen.bincount(minlength=num_experts).cumsum(0)
    place_of = torch.empty_like(order)
    place_of[order] = torch.arange(len(order), device=order.device)
    return ExpertRows(starts, order // routes.ids.shape[1], place_of.view_as(routes.ids))


def gather(x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    return x[rows.row_of]


def clamped(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, 1)
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return ((up + 1) * (gate * (kind.alpha * gate).sigmoid())).to(gate_up.dtype)


def combine(y: torch.Tensor, routes: Routes, rows: ExpertRows) -> torch.Tensor:
    total = torch.zeros(len(routes.ids), y.shape[1], device=y.device)
    for weights, places in zip(routes.weights.T, rows.place_of.T, strict=True):
        total += weights[:, None] * y[places].float()
    return total.to(y.dtype)


def add_gated(out: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
    out.add_(y * gate.sigmoid())


def keep_starts(rows: ExpertRows, into: torch.Tensor) -> None:
    into.copy_(rows.starts)


@dataclass(frozen=True, slots=True)
class LinearByExpert(PackedExperts):
    """A linear for each expert."""

    linears: tuple[PackedLinear, ...]

    @staticmethod
    def of(linears: Sequence[PackedLinear]) -> LinearByExpert:
        """Raises ValueError for none, and for linears of several shapes."""
        shapes = {linear.shape for linear in linears}
        if len(shapes) != 1:
            raise ValueError(f"experts have one shape, and these have {sorted(shapes)}")
        return LinearByExpert((len(linears), *linears[0].shape), linears[0].dtype, tuple(linears))

    def __call__(self, x: torch.Tensor, rows: ExpertRows, bias: torch.Tensor | None = None) -> torch.Tensor:
        experts, columns, inputs = self.shape
        if x.shape != (len(rows.row_of), inputs) or (bias is not None and bias.shape != (experts, columns)):
            raise ValueError(f"x {list(x.shape)} does not fit weights {list(self.shape)}")
        y = torch.empty(len(x), columns, dtype=x.dtype, device=x.device)
        # What is read on the host cannot be repeated: a copy is an operation that a recording refuses.
        starts = rows.starts.clone().tolist()
        for expert, (first, last) in enumerate(itertools.pairwise(starts)):
            if first < last:
                own = None if bias is None else bias[expert]
                y[first:last] = self.linears[expert](x[first:last], own)
        return y
