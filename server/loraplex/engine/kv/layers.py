"""The needs of a model's layers: what each keeps of a sequence, and how many blocks that takes. No torch.

Layers are cut into groups of one head size, one number of KV heads and one window each. A block holds 16 positions of
one group's layers, and all blocks take the same memory. So the same block serves layers that keep all positions, or
others that keep the last ones, and the number of free blocks says what is left for both. (Groups: vLLM's hybrid KV
cache manager.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from loraplex.kernels.attention import BLOCK_SIZE

_MOST_GROUPS = 12
"""Each has tables of its own in each step."""
_LEAST_GAIN = 1 / 8
"""The share of a long sequence's memory that groups must save: else all layers are one group."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The memory of one layer for a sequence: keys and values, [16, 2, kv_heads, head_dim] of a block, or a state, or
    both. A model has a layer with blocks."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """The positions that a row reads, its own included; None: all."""
    shares: int | None = None
    """The index of the layer whose keys and values this layer reads; None: it has its own."""
    state_bytes: int = 0
    """The size of its state (`loraplex.engine.kv.states`); a layer that has nothing else has no heads."""
    window_bytes: int = 0
    """The size of its window, where its state is one of `loraplex.kernels.recurrent`."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that have their blocks in common. `window`: of what they and those that share theirs see; None: all.
    `places`: the layers that lie in each of the equal parts of a block."""

    window: int | None
    places: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.places))


def keeping_all(caches: Sequence[CacheKind]) -> tuple[CacheKind, ...]:
    """The same layers, but that each keeps all positions, whatever it sees of them: one group."""
    return tuple(replace(layer, window=None) for layer in caches)


def layer_groups(caches: Sequence[CacheKind]) -> tuple[LayerGroup, ...]:
    """The groups of a model's layers. A place of a block has room for one layer of the widest kind, or for as many of a
    narrower one as fit. A block has as many places as the kind that needs the fewest, or more, for there are at most
    _MOST_GROUPS groups; a group with fewer layers leaves places empty. Where groups would save little of a long
    sequence, or layers are of too many kinds, all are one group, with a place each, which keeps all positions."""
    own = [index for index, layer in enumerate(caches) if layer.shares is None and layer.kv_heads]
    widths = {index: caches[index].kv_heads * caches[index].head_dim for index in own}
    widest = max(widths.values())
    kinds: dict[tuple[int, int, int | None], list[int]] = {}
    for index in own:
        windows = [layer.window for at, layer in enumerate(caches) if index in (at, layer.shares)]
        seen = max((window for window in windows if window is not None), default=0)
        sizes = caches[index].kv_heads, caches[index].head_dim
        kinds.setdefault((*sizes, None if None in windows else seen), []).append(index)
    places = [
        (window, _cut(found, widest // (kv_heads * head_dim)))
        for (kv_heads, head_dim, window), found in kinds.items()
    ]
    size = min(len(found) for _, found in places)
    while size < len(own) and sum(-(-len(found) // size) for _, found in places) > _MOST_GROUPS:
        size += 1
    groups = [LayerGroup(window, part) for window, found in places for part in _cut(found, size)]
    kept = size * widest * sum(group.window is None for group in groups)
    if len(groups) > _MOST_GROUPS or kept > (1 - _LEAST_GAIN) * sum(widths.values()):
        return (LayerGroup(None, _cut(own, 1)),)
    return tuple(groups)


def groups_by_layer(caches: Sequence[CacheKind]) -> tuple[int, ...]:
    """The number of the group whose blocks each layer reads; of a layer without blocks it means nothing."""
    found = {index: number for number, group in enumerate(layer_groups(caches)) for index in group.layers}
    sources = [index if layer.shares is None else layer.shares for index, layer in enumerate(caches)]
    return tuple(found.get(index, 0) for index in sources)


def _cut(items: Sequence[_Item], size: int) -> tuple[tuple[_Item, ...], ...]:
    """Pieces of `size` items; the last may have fewer."""
    return tuple(tuple(items[first : first + size]) for first in range(0, len(items), size))


def blocks_for(num_tokens: int) -> int:
    """How many blocks of one group hold `num_tokens` positions."""
    return -(-num_tokens // BLOCK_SIZE)


def blocks_unseen(window: int, num_blocks: int) -> int:
    """How many blocks, from the first one on, no row from position 16·num_blocks on sees."""
    return max(0, num_blocks - (window + BLOCK_SIZE - 2) // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """The blocks that sequences of a model need."""

    windows: tuple[int | None, ...] = (None,)
    """One for each group of layers."""
    most_ahead: int = 1
    """The most positions of one sequence that steps in flight compute."""

    def of(self, num_tokens: int, ahead: int | None = None) -> int:
        """The most blocks that a sequence holds on its way to `num_tokens` positions, while `ahead` of them are not
        computed (None: all)."""
        every = blocks_for(num_tokens)
        ahead = min(num_tokens if ahead is None else ahead, self.most_ahead)
        return sum(
            every
            if window is None
            else min(
                every, (window + BLOCK_SIZE - 2) // BLOCK_SIZE + (ahead + BLOCK_SIZE - 2) // BLOCK_SIZE + 1
            )
            for window in self.windows
        )

    def seen(self, num_tokens: int) -> int:
        """Positions of all groups together that a row behind `num_tokens - 1` others reads."""
        return sum(num_tokens if window is None else min(window, num_tokens) for window in self.windows)

    def at_once(self, num_tokens: int, num_blocks: int) -> int:
        """How many sequences of `num_tokens` positions run in these blocks while one of them computes its prompt."""
        return max(0, 1 + (num_blocks - self.of(num_tokens)) // self.of(num_tokens, 1))

    def longest(self, num_blocks: int) -> int:
        """The most positions, a multiple of 16, of a sequence that needs no more blocks than these."""
        return BLOCK_SIZE * (
            bisect_right(range(num_blocks + 2), num_blocks, key=lambda n: self.of(n * BLOCK_SIZE)) - 1
        )


def block_needs(caches: Sequence[CacheKind], most_ahead: int) -> BlockNeeds:
    """Those of a model with these layers; `most_ahead` as there."""
    return BlockNeeds(tuple(group.window for group in layer_groups(caches)), most_ahead)
