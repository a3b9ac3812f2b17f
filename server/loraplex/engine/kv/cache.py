"""The memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, zip_longest
from math import prod

import torch

from loraplex.engine.kv.layers import CacheKind, LayerGroup, groups_by_layer, layer_groups
from loraplex.engine.kv.states import offsets
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.attention.kv_codes import head_width
from loraplex.kernels.host_memory import untouched_zeros
from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentMemory, recurrent_memory


def block_bytes(caches: Sequence[CacheKind], dtype: torch.dtype) -> int:
    """Bytes of one block: 16 positions of the layers of one group, K and V; in int8 with the scales of its codes."""
    return dtype.itemsize * sum(_place_sizes(caches, layer_groups(caches), dtype))


def _layer_shape(layer: CacheKind, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """[16, 2, Hkv, D] of one layer's part of a block, in int8 D + 2."""
    return BLOCK_SIZE, 2, layer.kv_heads, head_width(layer.head_dim, dtype)


def _place_sizes(caches: Sequence[CacheKind], groups: Sequence[LayerGroup], dtype: torch.dtype) -> list[int]:
    """The elements of each place of a block: what the group needs that has the most in it."""
    sizes = [prod(_layer_shape(layer, dtype)) for layer in caches]
    return [
        max(sum(sizes[index] for index in found) for found in places)
        for places in zip_longest(*(group.places for group in groups), fillvalue=())
    ]


def _unused_bytes(
    group: LayerGroup, sizes: Sequence[int], caches: Sequence[CacheKind], dtype: torch.dtype
) -> tuple[slice, ...]:
    found, begin = [], 0
    for size, layers in zip_longest(sizes, group.places, fillvalue=()):
        assert isinstance(size, int), "a group has no more places than a block"
        used = sum(prod(_layer_shape(caches[index], dtype)) for index in layers)
        found.append(slice((begin + used) * dtype.itemsize, (begin + size) * dtype.itemsize))
        begin += size
    return tuple(part for part in found if part.start < part.stop)


class KVCache:
    """The preallocated blocks of all layers. A block id names 16 positions of each layer of one group
    (`loraplex.engine.kv.layers`). The n-th places of all groups are the same memory, for a block belongs to one group
    at a time. All is one piece, `tensor`; a layer that shares another's has its view. `states` [num_states, bytes] has
    the states, and `state_windows` [num_windows, bytes] the windows behind them.

    Invariant, for kernels that read what is not written yet (`AttentionKernel.reads_unwritten`): where a block belongs
    to a sequence, its positions beyond the sequence's end hold zeros. A block's last owner may have left anything
    there, NaN included, and a masked NaN still spoils a sum.
    """

    def __init__(
        self,
        caches: Sequence[CacheKind],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        num_states: int = 0,
        num_windows: int = 0,
    ) -> None:
        groups = layer_groups(caches)
        self.num_blocks = num_blocks
        self.num_groups = len(groups)
        sizes = _place_sizes(caches, groups, dtype)
        self._state_offsets = offsets(layer.state_bytes for layer in caches)
        self._window_offsets = offsets(layer.window_bytes for layer in caches)
        sizes_of = (num_states, self._state_offsets[-1]), (num_windows, self._window_offsets[-1])
        if device.type == "cpu":
            self.tensor = untouched_zeros((num_blocks * sum(sizes),), dtype)
            self.states, self.state_windows = (untouched_zeros(size, torch.uint8) for size in sizes_of)
        else:
            self.tensor = torch.zeros(num_blocks * sum(sizes), dtype=dtype, device=device)
            self.states, self.state_windows = (
                torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes_of
            )
        self._recurrent: dict[int, RecurrentMemory] = {}
        pools, begin = [], 0
        for size, same in groupby(sizes):
            count = sum(1 for _ in same)
            end = begin + count * num_blocks * size
            pools.append(self.tensor[begin:end].view(count, num_blocks, size))
            begin = end
        self.pools: tuple[torch.Tensor, ...] = tuple(pools)
        """[places, N, elements] of adjacent places of one size."""
        views: dict[int, torch.Tensor] = {}
        for group in groups:
            for place, found in zip(chain.from_iterable(pools), group.places, strict=False):
                begin = 0
                for index in found:
                    shape = _layer_shape(caches[index], dtype)
                    end = begin + prod(shape)
                    views[index] = place[:, begin:end].view(num_blocks, *shape)
                    begin = end
        self.unused = tuple(_unused_bytes(group, sizes, caches, dtype) for group in groups)
        """The bytes of a block, place after place, that layers of each group do not write."""
        sources = [index if layer.shares is None else layer.shares for index, layer in enumerate(caches)]
        self._layers = tuple(views.get(index, self.tensor[:0]) for index in sources)
        self.group_of = groups_by_layer(caches)
        """The number of each layer's group; of one without blocks it means nothing."""
        self.windows = tuple(groups[number].window for number in self.group_of)
        """The positions that are kept for each layer; None: all."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes + self.states.nbytes + self.state_windows.nbytes

    def layer(self, index: int) -> torch.Tensor:
        """[N, 16, 2, Hkv, D] of the layer's own sizes, K before V; of codes, in int8, [N, 16, 2, Hkv, D + 2]
        (`loraplex.kernels.attention.kv_codes`). A view."""
        return self._layers[index]

    def state(self, index: int) -> torch.Tensor:
        """[num_states, bytes] uint8: the layer's part of each state, from a multiple of 64 bytes on. A view."""
        start, end = self._state_offsets[index : index + 2]
        return self.states[:, start:end]

    def window(self, index: int) -> torch.Tensor:
        """[num_windows, bytes] uint8: the layer's part of each window, from a multiple of 64 bytes on. A view."""
        start, end = self._window_offsets[index : index + 2]
        return self.state_windows[:, start:end]

    def recurrent(self, index: int, heads: RecurrentHeads, dtype: torch.dtype) -> RecurrentMemory:
        """Both for the kernels of a layer of these sizes that computes in `dtype`: views, made once."""
        found = self._recurrent.get(index)
        if found is None:
            found = recurrent_memory(heads, dtype, self.state(index), self.window(index))
            self._recurrent[index] = found
        return found

    def expect(self, blocks: torch.Tensor) -> None:
        """A step will begin to write to these blocks. blocks: [n] int64. For the thread that plans."""

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Clear blocks whose first position is written in this step. blocks: [n] int64."""
        if blocks.shape[0]:
            for pool in self.pools:
                pool.index_fill_(1, blocks, 0)
