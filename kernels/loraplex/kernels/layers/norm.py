"""RMSNorm, and the residual addition before it."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm as _rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside (Zhang and Sennrich, 2019).

    x: [..., C]; weight: [C]; returns x's shape and dtype.
    """
    return _rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x, in place; returns rms_norm(residual). x, residual: [T, C] of one dtype."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rms_norm_float32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` with a weight in float32, rounded once after the weight, as Gemma computes it.

    x: [..., C]; weight: [C] float32; returns x's shape and dtype.
    """
    return _rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def add_rms_norm_float32(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x, in place; returns rms_norm_float32(residual). x, residual: [T, C] of one dtype."""
    residual.add_(x)
    return rms_norm_float32(residual, weight, eps)
