"""The KV pool's blocks: their references, and the keys under which their content is found again.

Numbers only: the tensors are the runner's. A block is in one of three states.
  held    by one sequence or, where its content is a shared prefix, by several (its reference count)
  cached  not referenced, but its content has a key, so that a later sequence can reuse it
  empty   not referenced, and without a key
Cached and empty blocks are both free. Empty ones are allocated first, then the cached ones of departed adapters
(neither on the device nor in host memory, or deleted), then the other cached ones, the least recently used first. What
only lines of batches have computed and used counts as not used at all: a batch loses no other request its prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Row

from loraplex.engine.types import BlockKey


class BlockManager:
    """Reference counts, the free lists and the prefix index of `num_blocks` blocks, numbered from 0.

    A request on a departed adapter has to wait for a load anyway, and one on a deleted adapter cannot come: their
    blocks are worth less than those of adapters in memory, and of the base. To tell the manager that an adapter left or
    came back costs as much as the adapter has cached blocks; nothing is searched in a step.

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
        # The free blocks, the first to be allocated first.
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._of_departed: OrderedDict[int, None] = OrderedDict()
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._of_adapter: dict[str, dict[int, None]] = {}  # blocks with a key, by the digest in it
        self._departed: set[str] = set()  # digests, of those that have blocks
        self._spare: set[int] = set()  # of lines of batches alone

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give out, the cached ones included."""
        return len(self._empty) + len(self._of_departed) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Referenced blocks."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can be found."""
        return self.num_free - len(self._empty)

    def lookup(self, keys: Row[BlockKey]) -> list[int]:
        """The blocks of the longest run of `keys`, from the first, whose content is in the pool. Takes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def lookup_all(self, keys: Row[BlockKey]) -> list[int]:
        """The block of each key, -1 where its content is not in the pool. Takes nothing."""
        return [self._block_of.get(key, -1) for key in keys]

    def idle_keys(self) -> list[BlockKey]:
        """The keys of cached blocks that requests have used which are no lines of batches; the most recently used
        first, those of departed adapters last."""
        blocks = (*reversed(self._cached), *reversed(self._of_departed))
        keys = (self._key_of[block] for block in blocks if block not in self._spare)
        return [key for key in keys if key is not None]

    def idle_block(self, key: BlockKey) -> int | None:
        """The block of such a key; None for any other."""
        block = self._block_of.get(key)
        return None if block is None or self._refs[block] or block in self._spare else block

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

    def share(self, block_ids: Iterable[int], *, is_spare: bool = False) -> None:
        """Hold found blocks for one sequence more. `is_spare`: for a line of a batch."""
        if not is_spare and self._spare:
            self._spare.difference_update(block_ids)
        for block in block_ids:
            if self._refs[block] == 0:
                assert self._key_of[block] is not None, f"block {block} is empty: there is nothing to share"
                del self._free_list(block)[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one sequence. What a cached one among them held is forgotten."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free: check num_free first"
        taken: list[int] = []
        for _ in range(count):
            block, _ = (self._empty or self._of_departed or self._cached).popitem(last=False)
            key = self._key_of[block]
            if key is not None and block not in self._spare:
                self.on_forgotten(block, key)
            self._drop_key(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def on_forgotten(self, block: int, key: BlockKey) -> None:
        """A cached block, which requests have used that are no lines of batches, is about to be allocated."""

    def release(self, block_ids: Row[int]) -> None:
        """Give up one sequence's hold on its blocks, given in the order of positions.

        The tail goes to its free list first: a chain is found from its start, so its last link is the one to
        lose first.
        """
        for block in block_ids:
            assert block >= 0 < self._refs[block], f"block {block} is released, but has no reference"
        for block in reversed(block_ids):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free_list(block)[block] = None
                if self._key_of[block] is None or block in self._spare:
                    self._free_list(block).move_to_end(block, last=False)

    def register(self, block: int, key: BlockKey, *, is_spare: bool = False) -> None:
        """Name the content of a held block that has been computed in full, `is_spare` for a line of a batch. If another
        block has that name already, this one stays nameless: a twin is only a waste of memory, which ends with its
        sequence."""
        assert self._refs[block] > 0, f"block {block} is registered, but has no reference"
        if not is_spare and self._spare:
            self._spare.discard(self._block_of.get(key, block))
        if key in self._block_of or self._key_of[block] is not None:
            return
        if is_spare:
            self._spare.add(block)
        self._block_of[key] = block
        self._key_of[block] = key
        digest = key[0][1]
        if digest is not None:
            self._of_adapter.setdefault(digest, {})[block] = None

    def register_all(self, named: Iterable[tuple[int, BlockKey]], *, is_spare: bool = False) -> None:
        for block, key in named:
            self.register(block, key, is_spare=is_spare)

    def set_resident(self, digest: str, is_resident: bool) -> None:
        """An adapter came into memory, or left it: its cached blocks are allocated like the others', or before them."""
        blocks = self._of_adapter.get(digest)
        if not blocks or is_resident == (digest not in self._departed):
            return
        if is_resident:
            self._departed.remove(digest)
            for block in blocks:
                if block in self._of_departed:
                    del self._of_departed[block]
                    self._cached[block] = None
                    self._cached.move_to_end(block, last=False)  # not used for longer than the others
            return
        self._departed.add(digest)
        for block in reversed(blocks):  # the tails of chains first
            if block in self._cached:
                del self._cached[block]
                self._of_departed[block] = None

    def keys_of(self, digest: str) -> list[BlockKey]:
        """The keys of an adapter's blocks."""
        keys = (self._key_of[block] for block in self._of_adapter.get(digest, ()))
        return [key for key in keys if key is not None]

    def keys_of_tenant(self, tenant_id: str) -> list[BlockKey]:
        """The keys of a tenant's blocks. Looks at all."""
        return [key for key in self._block_of if key[0][0] == tenant_id]

    def disown(self, keys: Iterable[BlockKey]) -> None:
        """Remove these keys from the cache; references to their blocks stay."""
        for key in keys:
            block = self._block_of.get(key)
            if block is not None:
                if not self._refs[block]:
                    del self._free_list(block)[block]
                    self._empty[block] = None
                    self._empty.move_to_end(block, last=False)
                self._drop_key(block)

    def _drop_key(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            self._spare.discard(block)
            digest = key[0][1]
            if digest is not None:
                del self._of_adapter[digest][block]
                if not self._of_adapter[digest]:
                    del self._of_adapter[digest]
                    self._departed.discard(digest)

    def _free_list(self, block: int) -> OrderedDict[int, None]:
        """The list of a free block, by its key."""
        key = self._key_of[block]
        if key is None:
            return self._empty
        return self._of_departed if key[0][1] in self._departed else self._cached
