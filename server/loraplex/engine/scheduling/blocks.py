"""The KV pool's blocks: their references, and the keys under which their content is found again.

Numbers only: the tensors are the runner's. A block is in one of three states.
  held    by one sequence or, where its content is a shared prefix, by several (its reference count)
  cached  not referenced, but its content has a key, so that a later sequence can reuse it
  empty   not referenced, and without a key
Cached and empty blocks are both free. They lie in one list, which is taken from at its head: empty blocks first,
then the cached ones, the least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Row
from itertools import chain

from loraplex.engine.types import BlockKey


class BlockManager:
    """Reference counts, the free list and the prefix index of `num_blocks` blocks, numbered from 0.

    Misuse (taking more than is free, releasing what is not held) is a bug of the engine's own and raises
    AssertionError before anything changes.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"the KV pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give out, the cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - len(self._free)

    def lookup(self, keys: Row[BlockKey]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first, whose content is in the pool. Takes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these are free now, so that sharing them would shrink `num_free`."""
        return sum(not self._refs[block] for block in block_ids)

    def num_freed(self, block_ids: Iterable[int], given_up: Counter[int]) -> int:
        """How many blocks would come free if a sequence gave up these, after others that gave up what `given_up`
        counts; adds its own to that."""
        freed = 0
        for block in block_ids:
            given_up[block] += 1
            freed += given_up[block] == self._refs[block]
        return freed

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold found blocks for one sequence more."""
        for block in block_ids:
            if self._refs[block] == 0:
                assert self._key_of[block] is not None, f"block {block} is empty: there is nothing to share"
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one sequence. What a cached one among them held is forgotten."""
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free: check num_free first"
        taken: list[int] = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._drop_key(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def release(self, block_ids: Row[int]) -> None:
        """Give up one sequence's hold on its blocks, given in the order of positions.

        The tail goes to the free list first: a chain is found from its start, so its last link is the one to
        lose first.
        """
        for block in block_ids:
            assert self._refs[block] > 0, f"block {block} is released, but has no reference"
        for block in reversed(block_ids):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, key: BlockKey) -> None:
        """Name the content of a held block that has been computed in full. If another block has that name
        already, this one stays nameless: a twin is only a waste of memory, which ends with its sequence."""
        assert self._refs[block] > 0, f"block {block} is registered, but has no reference"
        if key in self._block_of or self._key_of[block] is not None:
            return
        self._block_of[key] = block
        self._key_of[block] = key

    def disown(self, keys: Iterable[BlockKey]) -> None:
        """Remove these keys from the cache; references to their blocks stay."""
        for key in keys:
            block = self._block_of.get(key)
            if block is not None:
                self._drop_key(block)
                if not self._refs[block]:
                    self._free.move_to_end(block, last=False)

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None

    def check_integrity(self, tables: Iterable[Row[int]]) -> None:
        """Raise AssertionError unless `tables`, the block lists of all sequences that there are, account for
        every reference, and the free list and the index agree with them."""
        held = Counter(chain.from_iterable(tables))
        refs = {block: count for block, count in enumerate(self._refs) if count}
        assert refs == held, f"blocks are counted as {refs}, but held as {dict(held)}"
        free = {block for block, count in enumerate(self._refs) if not count}
        assert free == self._free.keys(), (
            f"free blocks are {sorted(free)}, the free list has {sorted(self._free)}"
        )
        named = {key: block for block, key in enumerate(self._key_of) if key is not None}
        assert named == self._block_of, "the prefix index and the blocks' own keys differ"
