"""What Triton computes row by row: each has the bits that it has alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loraplex.kernels.layers import triton_activation, triton_norm, triton_rope
from loraplex.kernels.sampling.triton_logsumexp import log_sum_exp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, COLUMNS = 19, 96
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 24
WEIGHT = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
Function = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def add_norm(x: torch.Tensor) -> torch.Tensor:
    residual = x.flip(1).contiguous()
    normed = triton_norm.add_rms_norm(x, residual, WEIGHT, 1e-5)
    return torch.cat((normed, residual), 1)


def rope(x: torch.Tensor) -> torch.Tensor:
    """Queries, and what the cache got."""
    rows = x.shape[0]
    heads = x.view(rows, HEADS + 2 * KV_HEADS, HEAD_DIM).clone()
    cache = torch.zeros(rows, 1, 2, KV_HEADS, HEAD_DIM, device=DEVICE)
    angles = x[:, :1, None].expand(rows, 1, HEAD_DIM // 2)
    norm = WEIGHT[:HEAD_DIM]
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    triton_rope.rope_and_write_kv(heads, HEADS, cos, sin, cache, slots, q_norm=norm, k_norm=norm, eps=1e-5)
    return torch.cat((heads[:, :HEADS].reshape(rows, -1), cache.view(rows, -1)), 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: triton_norm.rms_norm(x, WEIGHT, 1e-5),
        lambda x: triton_norm.rms_norm(x, WEIGHT.view(3, -1), 1e-5),
        add_norm,
        lambda x: triton_activation.act_and_mul(x, False),
        lambda x: triton_activation.act_and_mul(x, True),
        rope,
        lambda x: log_sum_exp(x, tile=32),
    ],
    ids=["rms_norm", "rms_norm by group", "add_rms_norm", "silu", "gelu", "rope", "log_sum_exp"],
)
def test_a_row_has_the_same_bits_beside_any_others(function: Function) -> None:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    whole = function(x)
    assert whole.isfinite().all()
    for first, last in ((0, 1), (3, 4), (0, 16), (7, 19), (18, 19)):
        assert torch.equal(function(x[first:last].contiguous()), whole[first:last])
