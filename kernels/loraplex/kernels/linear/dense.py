"""A base linear: y = x·Wᵀ + b."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch.nn import functional

from loraplex.kernels.linear.packed import PackedLinear

_PACKED_FOR_ROWS = 16
"""Rows that oneDNN chooses its layout for. What it chooses for one row is slow for many, not the other way round."""
_HALF = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class PackedDense(PackedLinear):
    """A weight in floats that torch multiplies with."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.weight, bias)


def pack_weight(weight: torch.Tensor) -> PackedDense:
    """The weight [out, in] of a base linear as `linear` reads it fastest: on a CPU in 16 bits, in oneDNN's own layout,
    which is chosen once for all numbers of rows. The same tensor where there is nothing to gain, or the processor
    lacks the instructions."""
    out_features, in_features = weight.shape
    packed = weight
    if weight.device.type == "cpu" and weight.dtype in _HALF:
        # It raises of processors without the instructions, and of builds without oneDNN.
        with contextlib.suppress(RuntimeError, AttributeError):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return PackedDense((out_features, in_features), weight.dtype, packed)


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's products in this dtype are fit for use on this device. Where oneDNN has none for a processor,
    torch's own take about a second for what oneDNN does in some milliseconds."""
    if device.type != "cpu":
        return True
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in], weight [out, in], which may be in oneDNN's layout, bias [out] → [..., out], all of one dtype.

    On the CPU, 16-bit products go through oneDNN, which compiles kernels for each number of rows and keeps them:
    about half a megabyte a shape, over a gigabyte where steps have any number of rows up to a few hundred. There the
    rows are padded with zeros to one of a few tens of numbers, which also costs less time than the compiling.
    """
    if x.device.type != "cpu" or x.dtype not in _HALF:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    padding = padded_rows(num_rows) - num_rows
    if padding:
        rows = functional.pad(rows, (0, 0, 0, padding))
    y: torch.Tensor
    if weight.is_mkldnn:
        y = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        y = functional.linear(rows, weight, bias)
    return y[:num_rows].view(*x.shape[:-1], weight.shape[0])


def padded_rows(num_rows: int) -> int:
    """The least number of the series 1…4, 8…32 by 4, …128 by 8, …512 by 32, and on by 128."""
    if num_rows <= 4:
        return num_rows
    step = 4 if num_rows <= 32 else 8 if num_rows <= 128 else 32 if num_rows <= 512 else 128
    return -(-num_rows // step) * step
