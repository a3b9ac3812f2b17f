"""RMSNorm, and the residual addition before it."""

from __future__ import annotations

import torch
from torch.nn.functional import rms_norm as _rms_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside (Zhang and Sennrich, 2019).

    x: [..., C]; weight: [C] of x's dtype, or of float32 where it must not be rounded first, as Gemma's; returns x's
    shape and dtype. With a weight [G, C], x is [..., G·C], and each group of C numbers has a norm of its own.
    """
    if weight.dim() > 1:
        groups = x.float().view(*x.shape[:-1], *weight.shape)
        return (_rms_norm(groups, weight.shape[-1:], None, eps) * weight).to(x.dtype).view(x.shape)
    if weight.dtype is x.dtype:
        return _rms_norm(x, weight.shape, weight, eps)
    return _rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> torch.Tensor:
    """residual = (residual + x) · scale, in place; returns rms_norm(residual). x, residual: [T, C] of one dtype, which
    the sum is rounded to before it is scaled."""
    residual.add_(x)
    if scale != 1.0:
        residual.mul_(scale)
    return rms_norm(residual, weight, eps)
