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
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Row
from typing import Generic, TypeVar

from loraplex.engine.types import BlockKey

K = TypeVar("K", bound=Hashable)

_MOST_LISTS = 6
"""Walks that were broken off leave lists behind: beyond this number the two with the last used keys become one."""


class UseOrder(Generic[K]):
    """Distinct keys, the least recently used first. Each call costs the same, however many there are,
    except the beginning of a walk behind many that were broken off.

    A walk meets the keys that are here when it begins, the most recently used first. It does not meet those that are
    removed, used or added as the newest meanwhile. Keys lie in several lists one behind the other: those that the walk
    has not met, those that it has met, and those that were used since it began."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        self._met: OrderedDict[K, None] = OrderedDict()
        self._since: OrderedDict[K, None] = OrderedDict.fromkeys(keys)
        self._lists = [self._met, self._since]  # before these two, what the walk has not met

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def __bool__(self) -> bool:
        return any(self._lists)

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._lists)

    def __iter__(self) -> Iterator[K]:
        for part in self._lists:
            yield from part

    def add(self, key: K) -> None:
        """Add a key as the most recently used one. It must not be here."""
        self._since[key] = None

    def add_oldest(self, key: K) -> None:
        """Add a key as the least recently used one. It must not be here."""
        self._lists[0][key] = None
        self._lists[0].move_to_end(key, last=False)

    def remove(self, key: K) -> None:
        """Raises KeyError where the key is not here."""
        for part in reversed(self._lists):
            if key in part:
                del part[key]
                return
        raise KeyError(key)

    def use(self, key: K) -> None:
        """A key that is here is the most recently used one from now on. Raises KeyError."""
        self.remove(key)
        self.add(key)

    def oldest(self) -> K:
        """The least recently used key. Raises KeyError where there is none."""
        for part in self._lists:
            if part:
                return next(iter(part))
        raise KeyError("no key is here")

    def pop_oldest(self) -> K:
        """Remove the least recently used key and return it. Raises KeyError where there is none."""
        for part in self._lists:
            if part:
                return part.popitem(last=False)[0]
        raise KeyError("no key is here")

    def begin_walk(self) -> None:
        """Begin a walk; one that goes on ends."""
        unmet = [part for part in self._lists if part]
        while len(unmet) > _MOST_LISTS:
            newest = unmet.pop()
            unmet[-1].update(newest)
        self._met, self._since = OrderedDict(), OrderedDict()
        self._lists = [*unmet, self._met, self._since]

    def walk(self) -> K | None:
        """The next key of the walk; None: it has ended."""
        while len(self._lists) > 2:
            if self._lists[-3]:
                key, _ = self._lists[-3].popitem()
                self._met[key] = None
                self._met.move_to_end(key, last=False)
                return key
            del self._lists[-3]
        return None


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
        self._empty = UseOrder(range(num_blocks))
        self._of_departed = UseOrder[int]()
        self._cached = UseOrder[int]()
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

    def begin_idle_walk(self) -> None:
        """Begin to walk the cached blocks."""
        self._cached.begin_walk()
        self._of_departed.begin_walk()

    def walk_idle(self) -> int | None:
        """The next cached block, the most recently used first, those of departed adapters last; None: the walk has
        ended. Blocks that were used since it began are left out."""
        block = self._cached.walk()
        return self._of_departed.walk() if block is None else block

    def idle_key(self, block: int) -> BlockKey | None:
        """The key of a cached block, unless only lines of batches have used it."""
        return None if block in self._spare else self._key_of[block]

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
                self._free_list(block).remove(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks for one sequence. What a cached one among them held is forgotten."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free: check num_free first"
        taken: list[int] = []
        for _ in range(count):
            block = (self._empty or self._of_departed or self._cached).pop_oldest()
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
                if self._key_of[block] is None or block in self._spare:
                    self._free_list(block).add_oldest(block)
                else:
                    self._free_list(block).add(block)

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
                    self._of_departed.remove(block)
                    self._cached.add_oldest(block)  # not used for longer than the others
            return
        self._departed.add(digest)
        for block in reversed(blocks):  # the tails of chains first
            if block in self._cached:
                self._cached.remove(block)
                self._of_departed.add(block)

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
                    self._free_list(block).remove(block)
                    self._empty.add_oldest(block)
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

    def _free_list(self, block: int) -> UseOrder[int]:
        """The list of a free block, by its key."""
        key = self._key_of[block]
        if key is None:
            return self._empty
        return self._of_departed if key[0][1] in self._departed else self._cached
