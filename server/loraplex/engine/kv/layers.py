"""The needs of a model's layers: what each keeps of a sequence, and how many blocks that takes. No torch.

Layers are cut into groups of one head size, one number of KV heads and one window each. A block holds 16 positions of
one group's layers, and all blocks take the same memory. So the same block serves layers that keep all positions, or
others that keep the last ones, and the number of free blocks says what is left for both. (Groups: vLLM's hybrid KV
cache manager.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from loraplex.kernels.attention import BLOCK_SIZE

STATE_GROUP = 255
"""Stands for the states of a model beside the numbers of its groups."""
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


@dataclass(frozen=True, slots=True)
class PrefixNeeds:
    """The needs of a sequence that begins behind n blocks. Layers are in groups with these `windows`, and keep a state
    if `has_state`. A group that keeps all positions needs all n blocks, and one with a window those that position 16·n
    sees. The state behind block n - 1 is as the last block of a group STATE_GROUP, which needs no other.

    `has(index, group)` says of block `index` whether a group has it."""

    windows: tuple[int | None, ...]
    has_state: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether each block that comes makes the prefix longer: there is one group, which keeps all, and no state."""
        return self.windows == (None,) and not self.has_state

    def first(self, group: int, size: int) -> int:
        """The first block that a group needs of a prefix of `size` blocks."""
        if group == STATE_GROUP:
            return size - 1
        window = self.windows[group]
        return 0 if window is None else blocks_unseen(window, size)

    def keeping_all(self) -> list[int]:
        return [group for group, window in enumerate(self.windows) if window is None]

    def seeing_last(self) -> list[int]:
        """The groups that need the last blocks alone, the cheapest to ask first."""
        states = [STATE_GROUP] if self.has_state else []
        return states + [group for group, window in enumerate(self.windows) if window is not None]

    def leading(self, most: int, has: Callable[[int, int], bool]) -> int:
        """The first of `most` blocks that all groups have which keep all positions: how many they are."""
        groups = self.keeping_all()
        return next((n for n in range(most) if not all(has(n, group) for group in groups)), most)

    def longest(self, most: int, has: Callable[[int, int], bool]) -> int:
        """The largest prefix of at most `most` blocks that has what it needs, where those that keep all positions have
        `most`. No block is asked for twice."""
        groups, size = self.seeing_last(), most
        known = dict.fromkeys(groups, size)  # from here on a group has all blocks below `size`
        while size > 0:
            for group in groups:
                index, first = min(known[group], size), self.first(group, size)
                while index > first and has(index - 1, group):
                    index -= 1
                known[group] = index
                if index > first:  # a shorter prefix that has this block lacks it too
                    size = index - 1
                    break
            else:
                return size
        return 0

    def entries(self, size: int) -> list[tuple[int, int]]:
        """(Index, group) of all blocks of a prefix, without its state: those of groups with a window come last."""
        found = [(index, group) for index in range(size) for group in self.keeping_all()]
        for group in self.seeing_last():
            if group != STATE_GROUP:
                found += [(index, group) for index in range(self.first(group, size), size)]
        return found


def block_needs(caches: Sequence[CacheKind], most_ahead: int) -> BlockNeeds:
    """Those of a model with these layers; `most_ahead` as there."""
    return BlockNeeds(tuple(group.window for group in layer_groups(caches)), most_ahead)
