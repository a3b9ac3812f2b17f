"""The reference of a linear over codes in groups, in torch's operations, for any device. It is exact except for the
order of its sums: a code is a small whole number, which bfloat16 and float16 hold, so that a group's products are
summed in float32 before its scale comes to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.stored import GroupedWeight

_MOST_VALUES = 1 << 22
"""Weights that are widened at a time."""


@dataclass(frozen=True, slots=True)
class ReferenceGroups(PackedLinear):
    """A weight in groups that torch's operations multiply with."""

    weight: GroupedWeight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.weight, bias)


def linear(x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], bias [N] or None → [..., N], in x's dtype. Sums are float32, rounded once, behind the bias."""
    out_features, in_features = weight.shape
    rows = x.reshape(-1, in_features).float()
    y = torch.empty(len(rows), out_features, dtype=x.dtype, device=x.device)
    step = max(1, _MOST_VALUES // in_features)
    for first in range(0, out_features, step):
        part = rows @ weight.rows(first, min(first + step, out_features)).dense().T
        y[:, first : first + step] = part if bias is None else part + bias[first : first + step].float()
    return y.view(*x.shape[:-1], out_features)
