"""Weights of linears as codes in groups: w[n, k] = scales[n, k // group] · codes[n, k] + offsets[n, k // group].

This is the reference of `linear` over such a weight, in torch's operations, for any device. It is exact except for the
order of its sums: a code is a small whole number, which bfloat16 and float16 hold, so that a group's products are
summed in float32 before its scale comes to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.kernels.linear.packed import PackedLinear

_MOST_VALUES = 1 << 22
"""Weights that are widened at a time."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [N, K]: `codes` [N, K] int8, `scales` [N, G] and `offsets` [N, G] float32 (None: all are 0), for G
    groups of `group` inputs each."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int

    def __post_init__(self) -> None:
        (rows, inputs), groups = self.codes.shape, self.scales.shape[1]
        shapes = {tuple(part.shape) for part in (self.scales, self.offsets) if part is not None}
        if self.group * groups != inputs or shapes != {(rows, groups)}:
            raise ValueError(
                f"{groups} groups of {self.group} do not make the codes {list(self.codes.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self.codes.shape
        return rows, inputs

    def rows(self, first: int, last: int) -> GroupedWeight:
        """The outputs first … last-1, as views."""
        offsets = None if self.offsets is None else self.offsets[first:last]
        return GroupedWeight(self.codes[first:last], self.scales[first:last], offsets, self.group)

    def to(self, device: torch.device) -> GroupedWeight:
        """The same on a device."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return GroupedWeight(self.codes.to(device), self.scales.to(device), offsets, self.group)

    def dense(self) -> torch.Tensor:
        """[N, K] float32: a product and a sum, each rounded to float32."""
        rows, inputs = self.shape
        grouped = self.codes.view(rows, -1, self.group).float() * self.scales.unsqueeze(-1)
        if self.offsets is not None:
            grouped += self.offsets.unsqueeze(-1)
        return grouped.view(rows, inputs)


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
