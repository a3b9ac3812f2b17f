"""Rotary position embedding (Su et al., 2021) in the split-halves layout of the Llama family."""

from __future__ import annotations

import torch


def rope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position · frequency, times `attention_factor`.

    positions: [T] int64; inv_freq: [R/2] float32; returns two of [T, 1, R/2] float32.
    """
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * attention_factor)[:, None], (angles.sin() * attention_factor)[:, None]


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate each pair (x[d], x[d + R/2]) by its angle, in place: (a, b) → (a·cos - b·sin, b·cos + a·sin).

    x: [T, H, D], last axis contiguous; cos, sin: [T, 1, R/2] float32 with R ≤ D; what is beyond R stays as it is.
    Computed in float32, rounded once.
    """
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    a.copy_(rotated_a)
    b.copy_(rotated_b)
