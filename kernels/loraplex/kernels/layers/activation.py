"""The gated activation of the feed-forward part."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up (SwiGLU; Shazeer, 2020). gate_up: [T, 2·I], gate before up; returns [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up with the tanh approximation of GELU (GeGLU; Shazeer, 2020). Shapes as in `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)
