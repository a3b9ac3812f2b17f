"""Rotary position embedding (Su et al., 2021) in the split-halves layout of the Llama family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

_TABLE_STEP = 1024
"""Positions that a table grows by."""


def rope_cos_sin(
    positions: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position · frequency, times `attention_factor`.

    positions: [T] int64; inv_freq: [R/2] float32; returns two of [T, 1, R/2] float32.
    """
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * attention_factor)[:, None], (angles.sin() * attention_factor)[:, None]


class CosSinTable:
    """`rope_cos_sin` of one rotation, looked up, for a CPU. A position's numbers are computed once, so they do not
    depend on the other rows of a step; torch's cosine also wakes OpenMP's threads for each step.

    Grows to the highest position that was asked for. For one thread at a time.
    """

    def __init__(self, inv_freq: torch.Tensor, attention_factor: float) -> None:
        self._inv_freq = inv_freq
        self._factor = attention_factor
        self._cos, self._sin = (torch.empty(0, 1, len(inv_freq)) for _ in range(2))

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of [T, 1, R/2] float32. positions: [T] int64, at least one."""
        highest = int(positions.max())
        if highest >= len(self._cos):
            begin = len(self._cos)
            end = -(-max(highest + 1, 2 * begin) // _TABLE_STEP) * _TABLE_STEP
            more = rope_cos_sin(torch.arange(begin, end), self._inv_freq, self._factor)
            self._cos, self._sin = torch.cat((self._cos, more[0])), torch.cat((self._sin, more[1]))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotation(
    inv_freq: Sequence[float], attention_factor: float, device: torch.device
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`rope_cos_sin` of positions on a device."""
    frequencies = torch.tensor(inv_freq, dtype=torch.float32, device=device)
    if device.type == "cpu":
        return CosSinTable(frequencies, attention_factor).rows
    return partial(rope_cos_sin, inv_freq=frequencies, attention_factor=attention_factor)


def scaling_by_position(
    beta: float, length: int, end: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The factors 1 + beta · ln(1 + ⌊p ÷ length⌋) of positions p below `end`, rounded to `dtype`, as cos and sin of a
    rotation that turns nothing: from positions [T] to two of [T, 1, head_dim/2] float32."""
    steps = torch.arange(-(-end // length), dtype=torch.float32)
    factors = (1 + beta * torch.log(1 + steps)).to(dtype).float()
    cos = factors[:, None, None].repeat(1, 1, head_dim // 2).to(device)
    sin = torch.zeros_like(cos)

    def rows(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = positions // length
        return cos.index_select(0, at), sin.index_select(0, at)

    return rows


def check_norms(
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
    head_dim: int,
    kinds: int,
) -> None:
    """Raises ValueError where the norms of a layer's heads do not fit each other or their size. `kinds`: how many of
    keys and values lie behind the queries."""
    if kinds and (q_norm is None) is not (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither")
    if q_norm is None and v_norm is not None:
        raise ValueError("values are normed where queries and keys are")
    for weight in (q_norm, k_norm, v_norm):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"a norm's weight of {list(weight.shape)} does not fit heads of size {head_dim}")


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
