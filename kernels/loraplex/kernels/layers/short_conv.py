"""A gated short convolution: of the last rows of each sequence, channel by channel."""

from __future__ import annotations

import torch

from loraplex.kernels.attention import BLOCK_SIZE


def short_conv(
    gates: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    previous: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """c · conv(b · x), causal, of width K (LFM2; Liquid AI, 2025). b · x of each row is kept in the layer's cache, and
    the K - 1 rows before it are read from there.

    gates: [T, 3·C], b before c before x. cache: [N, P, …] of C numbers a position, in the same dtype. slots: [T], and
    previous: [T, K - 1], both block·P + offset; previous is -1 before a sequence's beginning. weight: [K, C] and bias:
    [C] float32, the weight of the row itself last. Returns [T, C]. Products are summed in the order of the rows, in
    float32: a row has the same bits in any step.
    """
    b, c, x = gates.chunk(3, dim=1)
    kept = b * x
    cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = kept.view(-1, *cache.shape[2:])
    known = previous >= 0
    places = torch.where(known, previous, 0)
    before = cache[places // BLOCK_SIZE, places % BLOCK_SIZE].view(*previous.shape, -1).float()
    # A position that no sequence has holds anything, and 0·NaN is NaN.
    before = torch.where(known[:, :, None], before, 0.0)
    total = torch.zeros_like(kept, dtype=torch.float32) if bias is None else bias.expand(kept.shape).clone()
    for step in range(len(weight) - 1):
        total.add_(before[:, step] * weight[step])
    total.add_(kept.float() * weight[-1])
    return c * total.to(kept.dtype)
