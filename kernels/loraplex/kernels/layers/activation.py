"""The activations of a feed-forward."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu as _gelu
from torch.nn.functional import silu


def act_and_mul(gate_up: torch.Tensor, gelu: bool, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up (SwiGLU), or gelu(gate) · up with the tanh approximation of GELU (GeGLU; Shazeer, 2020).

    gate_up: [T, 2·I], gate before up; or the gate alone, [T, I], and `up` [T, I]. Returns [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1) if up is None else (gate_up, up)
    return (_gelu(gate, approximate="tanh") if gelu else silu(gate)).mul_(up)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)² (So et al., "Primer", 2021), rounded once. x: [T, I]; returns its shape."""
    return x.relu().square_()
