"""Heads of values that fill no strips of a state: behind each lie zeros, which change nothing."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from loraplex.kernels.recurrent import COLUMNS


def padded_size(dim: int) -> int:
    return -(-dim // COLUMNS) * COLUMNS


def pad_values(x: torch.Tensor, first: int, heads: int, dim: int) -> torch.Tensor:
    """x [..., C] with each of the `heads` of values, which begin at column `first`, in its padded size."""
    more = padded_size(dim) - dim
    if not more:
        return x
    end = first + heads * dim
    values = pad(x[..., first:end].view(*x.shape[:-1], heads, dim), (0, more)).flatten(-2)
    return torch.cat((x[..., :first], values, x[..., end:]), -1)


def without_padding(x: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[T, H·padded] → [T, H·D]"""
    if padded_size(dim) == dim:
        return x
    return x.view(len(x), heads, -1)[:, :, :dim].flatten(1)
