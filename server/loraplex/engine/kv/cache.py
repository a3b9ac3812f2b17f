"""The memory of the KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from loraplex.engine.kv.layers import CacheKind, LayerGroup, layer_groups
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import head_width
from loraplex.kernels.host_memory import untouched_zeros


def block_bytes(caches: Sequence[CacheKind], dtype: torch.dtype) -> int:
    """Bytes of one block: 16 positions of the layers of one group, K and V; in int8 with the scales of its codes."""
    places = _places(caches, layer_groups(caches), dtype)
    return dtype.itemsize * sum(len(found) * prod(block) for block, found in places.items())


def _places(
    caches: Sequence[CacheKind], groups: Sequence[LayerGroup], dtype: torch.dtype
) -> dict[tuple[int, ...], list[list[int]]]:
    """The layers that lie in each place, one of each group at most, by the sizes of a layer's block."""
    places: dict[tuple[int, ...], list[list[int]]] = {}
    for group in groups:
        taken: Counter[tuple[int, ...]] = Counter()
        for index in group.layers:
            layer = caches[index]
            block = (BLOCK_SIZE, 2, layer.kv_heads, head_width(layer.head_dim, dtype))
            found = places.setdefault(block, [])
            if taken[block] == len(found):
                found.append([])
            found[taken[block]].append(index)
            taken[block] += 1
    return places


class KVCache:
    """The preallocated blocks of all layers. A block id names 16 positions of each layer of one group
    (`loraplex.engine.kv.layers`). The n-th layers of all groups lie in the same memory, for a block belongs to one
    group at a time. All is one piece, `tensor`; a layer that shares another's has its view.

    Invariant, for kernels that read what is not written yet (`AttentionKernel.reads_unwritten`): where a block belongs
    to a sequence, its positions beyond the sequence's end hold zeros. A block's last owner may have left anything
    there, NaN included, and a masked NaN still spoils a sum.
    """

    def __init__(
        self, caches: Sequence[CacheKind], num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        groups = layer_groups(caches)
        self.num_blocks = num_blocks
        self.num_groups = len(groups)
        places = _places(caches, groups, dtype)
        sizes = [num_blocks * len(found) * prod(block) for block, found in places.items()]
        if device.type == "cpu":
            self.tensor = untouched_zeros((sum(sizes),), dtype)
        else:
            self.tensor = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.pools: tuple[torch.Tensor, ...] = tuple(
            self.tensor[end - size : end].view(len(found), num_blocks, *block)
            for (block, found), size, end in zip(places.items(), sizes, accumulate(sizes), strict=True)
        )
        """[places, N, 16, 2, Hkv, D] for each size, K before V; of codes D + 2."""
        views: dict[int, torch.Tensor] = {}
        for pool, found in zip(self.pools, places.values(), strict=True):
            for view, own in zip(pool.unbind(0), found, strict=True):
                views.update(dict.fromkeys(own, view))
        group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
        sources = [index if layer.shares is None else layer.shares for index, layer in enumerate(caches)]
        self._layers = tuple(views[index] for index in sources)
        self.group_of = tuple(group_of[index] for index in sources)
        """The number of each layer's group."""

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
