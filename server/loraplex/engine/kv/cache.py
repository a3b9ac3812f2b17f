"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from loraplex.engine.kv.layers import CacheKind
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import head_width
from loraplex.kernels.host_memory import untouched_zeros


def block_elements(layer: CacheKind, dtype: torch.dtype) -> int:
    """Elements of one block of this layer, K and V; in int8 with the scales of its codes. 0 for one without its own."""
    return prod(_block_sizes(layer, dtype)) if layer.shares is None else 0


def _block_sizes(layer: CacheKind, dtype: torch.dtype) -> tuple[int, int, int, int]:
    return BLOCK_SIZE, 2, layer.kv_heads, head_width(layer.head_dim, dtype)


class KVCache:
    """The preallocated blocks of all layers, N of each layer: a block id names the same 16 positions in each. They lie
    in one piece of memory, `tensor`, layers of equal sizes one after the other. A layer that shares another's has its
    view.

    Invariant, for kernels that read what is not written yet (`AttentionKernel.reads_unwritten`): where a block belongs
    to a sequence, its positions beyond the sequence's end hold zeros. A block's last owner may have left anything
    there, NaN included, and a masked NaN still spoils a sum.
    """

    def __init__(
        self, caches: Sequence[CacheKind], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        owners: dict[tuple[int, ...], list[int]] = {}  # layers with blocks of their own, by a block's sizes
        for index, layer in enumerate(caches):
            if layer.shares is None:
                owners.setdefault(_block_sizes(layer, dtype), []).append(index)
        sizes = [num_blocks * len(own) * prod(block) for block, own in owners.items()]
        if device.type == "cpu":
            self.tensor = untouched_zeros((sum(sizes),), dtype)
        else:
            self.tensor = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.pools: tuple[torch.Tensor, ...] = tuple(
            self.tensor[end - size : end].view(len(own), num_blocks, *block)
            for (block, own), size, end in zip(owners.items(), sizes, accumulate(sizes), strict=True)
        )
        """[layers, N, 16, 2, Hkv, D] for each size, K before V; of codes D + 2."""
        views: dict[int, torch.Tensor] = {}
        for pool, own in zip(self.pools, owners.values(), strict=True):
            views.update(zip(own, pool.unbind(0), strict=True))
        self._layers = tuple(
            views[index if layer.shares is None else layer.shares] for index, layer in enumerate(caches)
        )

    def layer(self, index: int) -> torch.Tensor:
        """[N, 16, 2, Hkv, D] of the layer's own sizes, K before V; of codes, in int8, [N, 16, 2, Hkv, D + 2]
        (`loraplex.kernels.attention.kv_codes`). A view."""
        return self._layers[index]

    def expect(self, blocks: torch.Tensor) -> None:
        """A step will begin to write to these blocks. blocks: [n] int64. For the thread that plans."""

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Clear blocks whose first position is written in this step. blocks: [n] int64."""
        if blocks.shape[0]:
            for pool in self.pools:
                pool.index_fill_(1, blocks, 0)
