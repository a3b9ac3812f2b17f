"""Drawn weights of linears, what they stand for, and the same with a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from loraplex.kernels.linear.stored import FloatWeight, GroupedWeight

FAULTS = ("neighbouring scale", "no offsets", "codes of another row")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grouped(
    columns: int, inputs: int, group: int, *, bits: int = 8, zeros: str = "", least: int = -8
) -> GroupedWeight:
    """`zeros`: "whole" numbers of each group, "floats", or none. `least`: the smallest code of 4 bits."""
    generator = torch.Generator().manual_seed(columns + inputs)
    groups = (columns, inputs // group)
    lowest, count = (least, 16) if bits == 4 else (-128, 256)
    codes = torch.randint(lowest, lowest + count, (columns, inputs), generator=generator).to(torch.int8)
    scales = torch.rand(groups, generator=generator) * 0.01
    if zeros == "whole":
        codes -= torch.randint(-8, 8, groups, generator=generator).to(torch.int8).repeat_interleave(group, 1)
    offsets = torch.randn(groups, generator=generator) if zeros == "floats" else None
    return GroupedWeight(codes, scales, offsets, group)


def floats(columns: int, inputs: int, group: int, *, activations: bool = True) -> FloatWeight:
    values = (drawn(columns, inputs, seed=columns + inputs) * 60).to(torch.float8_e4m3fn)
    scales = torch.rand(columns, inputs // group, generator=torch.Generator().manual_seed(inputs)) * 0.01
    return FloatWeight(values, scales, activations)


def dense(weight: Any) -> torch.Tensor:
    """[N, K] float64."""
    scales = weight.scales.double().repeat_interleave(weight.group, 1)
    if isinstance(weight, FloatWeight):
        return weight.values.double() * scales
    found = weight.codes.double() * scales
    if weight.offsets is not None:
        found += weight.offsets.double().repeat_interleave(weight.group, 1)
    return found


def exact(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product with the weights that a checkpoint of x's dtype would hold, in float64."""
    y = x.double() @ dense(weight).to(x.device, x.dtype).double().T
    return y if bias is None else y + bias.double()


def spoilt(weight: Any, fault: str) -> Any:
    """`weight` with one of FAULTS."""
    if fault == "neighbouring scale":
        return replace(weight, scales=weight.scales.roll(1, 1))
    if fault == "no offsets":
        return replace(weight, offsets=None)
    if isinstance(weight, FloatWeight):
        rolled = weight.values.view(torch.uint8).roll(1, 0)
        return replace(weight, values=rolled.view(torch.float8_e4m3fn))
    return replace(weight, codes=weight.codes.roll(1, 0))
