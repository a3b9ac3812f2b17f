"""The index of blocks in host memory: what the device's pool forgets is found there. Numbers only, no torch.

A block of a cached prefix is written when the pool is about to give it to another sequence, unless only lines of
batches used it. Its key is that of the pool, with tenant and adapter digest, so nothing of one tenant is found by
another. The copies themselves are `BlockCopy`s in the step's plan, done in their order before its forward pass: an
entry is made when its copy is planned, and what reads it is planned later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass

from loraplex.engine.types import BlockKey

_MOST_OF_POOL = 2
"""A tenant takes at most one part in this number of the pool."""


@dataclass(slots=True)
class HostCounts:
    """Blocks since the engine began, and seconds."""

    written: int = 0
    restored: int = 0
    evicted: int = 0
    """Blocks that made room for others."""
    refused: int = 0
    """Blocks of deleted versions, which are not written."""
    restore_s: float = 0.0
    """Seconds that requests waited, together, for prefixes that took more than a step."""


class HostTier:
    """The keys of `num_slots` blocks in host memory. A full pool loses the block that was used least recently; a tenant
    that has as much as one may take loses its own."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.counts = HostCounts()
        self._most = max(1, num_slots // _MOST_OF_POOL)
        self._empty = [*reversed(range(num_slots))]
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # the least recently used first
        self._of_tenant: dict[str, OrderedDict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def find(self, keys: Row[BlockKey]) -> Row[BlockKey]:
        """The longest run of `keys`, from the first, that is here."""
        count = next((n for n, key in enumerate(keys) if key not in self._slots), len(keys))
        return keys[:count]

    def read(self, key: BlockKey) -> int | None:
        """The slot of a block that is used now; None where it is not here."""
        if key not in self._slots:
            return None
        self._slots.move_to_end(key)
        self._of_tenant[key[0][0]].move_to_end(key)
        return self._slots[key]

    def write(self, key: BlockKey) -> int | None:
        """The slot that a block is to be copied to; None where it is here already."""
        if self.read(key) is not None:
            return None
        own = self._of_tenant.get(key[0][0])
        if own is not None and len(own) >= self._most:
            self._evict(next(iter(own)))
        elif not self._empty:
            self._evict(next(iter(self._slots)))
        slot = self._empty.pop()
        self._slots[key] = slot
        self._of_tenant.setdefault(key[0][0], OrderedDict())[key] = None
        self.counts.written += 1
        return slot

    def erase(self, digest: str) -> None:
        """Nothing of an adapter version is found any more."""
        self.disown([key for key in self._slots if key[0][1] == digest])

    def disown(self, keys: Iterable[BlockKey]) -> None:
        """Nothing is found under these keys any more."""
        for key in keys:
            if key in self._slots:
                self._remove(key)

    def _evict(self, key: BlockKey) -> None:
        self._remove(key)
        self.counts.evicted += 1

    def _remove(self, key: BlockKey) -> None:
        self._empty.append(self._slots.pop(key))
        own = self._of_tenant[key[0][0]]
        del own[key]
        if not own:
            del self._of_tenant[key[0][0]]
