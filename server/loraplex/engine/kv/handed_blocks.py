"""Prefixes that leave for another engine's host memory, and those that come from there.

Both ways go by the copies of plans, in their order. A block that leaves is read where it is, in the pool or in host
memory, and stays there. A block that comes is filled into a free block of the pool, copied from there to its slot, and
the block is free again: on a GPU a write by the processor to a slot would be in no order with the device's own copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from collections.abc import Sequence as Row
from dataclasses import dataclass

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.tiered_blocks import TieredBlocks
from loraplex.engine.types import BlockCopy, BlockKey


@dataclass(frozen=True, slots=True)
class PrefixForm:
    """The form of blocks: a `name` that engines compare, of all that their content depends on, and their bytes."""

    name: str
    piece_bytes: int


class HandedBlocks(TieredBlocks):
    """The pool and its tiers, for engines that hand prefixes on. All of it needs host memory."""

    # Leaving.

    def begin_ends(self) -> None:
        """Begin to walk the blocks up to which prefixes may be handed on."""
        assert self.host is not None, "nothing is in host memory"
        (self if self.states is None else self.states).begin_idle_walk()
        self.host.order.begin_walk()

    def ends(self) -> Iterator[BlockKey | None]:
        """The rest of that walk, the most recently used first, the pool's before those in host memory. Ends are blocks
        that no running request holds, as its content may yet turn out to be no good; of a model with states those with
        a state behind them. None: one that is no end. The caller may stop after any of them and go on later. What is
        used meanwhile is left to the next walk."""
        assert self.host is not None, "nothing is in host memory"
        pool = self if self.states is None else self.states
        while (block := pool.walk_idle()) is not None:
            yield pool.idle_key(block)
        while (key := self.host.order.walk()) is not None:
            if self.states is None:
                yield key
            else:
                yield prefix_keys.block_of_state(key) if prefix_keys.is_of_state(key) else None

    @property
    def num_places(self) -> int:
        """The most blocks that a prefix here may have."""
        return self.num_blocks + (0 if self.host is None else self.host.num_slots)

    def step_back(self, key: BlockKey, broken: Container[BlockKey]) -> tuple[bool, BlockKey | None]:
        """Whether a block is here, may be handed on and is behind no `broken` one, and the block before it."""
        is_here = self._is_in_host(key) or self.idle_block(key) is not None
        if key not in self._before or key in broken or not is_here or key[0][1] in self._erased:
            return False, None
        return True, self._before[key]

    def before(self, key: BlockKey) -> BlockKey | None:
        """The block before this one in its prefix."""
        return self._before.get(key)

    def parts_of(self, key: BlockKey) -> list[BlockKey]:
        """The names of the pieces, as large as a block each, that a block or a state is read out in."""
        return self._state_parts(key) if prefix_keys.is_of_state(key) else [key]

    def read_out(self, key: BlockKey) -> bool:
        """Have the next copies read a block or a state out, its pieces by their names. False where it is not here."""
        assert self.host is not None, "nothing is in host memory"
        if key[0][1] in self._erased:
            return False
        is_state, slots = prefix_keys.is_of_state(key), self.host.slots_of(key)
        pool = self.states if is_state else self
        source = (
            None if pool is None else pool.idle_block(prefix_keys.block_of_state(key) if is_state else key)
        )
        if not slots and source is None:
            return False
        for part, name in enumerate(self.parts_of(key)):
            block, slot = (-1, slots[part]) if slots else (source, -1)
            assert block is not None
            self.copies.append(BlockCopy(block, slot, True, name, part=part if is_state else None))
        return True

    # Coming.

    def is_known(self, key: BlockKey) -> bool:
        """Whether a block or a state is in the pool or in host memory."""
        if prefix_keys.is_of_state(key):
            states = self.states
            in_pool = states is not None and bool(states.lookup((prefix_keys.block_of_state(key),)))
        else:
            in_pool = key in self._block_of
        return in_pool or self._is_in_host(key)

    def is_erased(self, digest: str | None) -> bool:
        """Whether this version was deleted, while requests ran on it."""
        return digest in self._erased

    def may_bring_in(self, key: BlockKey) -> bool:
        """Whether the next step may bring it, beside what it brings of others, and by which block."""
        assert self.host is not None, "nothing is in host memory"
        return self.num_free > 0 and self._may_restore(self.host.size(key))

    def bring_in(self, key: BlockKey, before: BlockKey | None, pieces: Row[bytes]) -> bool:
        """Have the next copies bring a block or a state to host memory, as the newest there. `pieces`: as many as it
        takes slots. False where the rules of host memory give it no room."""
        assert self.host is not None, "nothing is in host memory"
        through = self.allocate(1)  # first: what it held may go to host memory
        slots = self.host.write(key)
        if not slots:
            self.release(through)
            return False
        for name, slot, piece in zip(self.parts_of(key), slots, pieces, strict=True):
            self.copies.append(BlockCopy(through[0], -1, False, name, piece))
            self.copies.append(BlockCopy(through[0], slot, to_host=True))
        self.release(through)
        self._num_restored += len(slots)
        if not prefix_keys.is_of_state(key):
            self._before[key] = before
        return True

    def _is_in_host(self, key: BlockKey) -> bool:
        return self.host is not None and key in self.host
