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

from loraplex.engine.types import BlockKey, Namespace

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
    """The keys of `num_slots` blocks in host memory.

    Each tenant that has any has a share of the pool by its weight. A full pool loses the block that was used least
    recently of those whose tenant has more than its share. A tenant that has as much as one may take loses its own."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.counts = HostCounts()
        self._most = max(1, num_slots // _MOST_OF_POOL)
        self._empty = [*reversed(range(num_slots))]
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # the least recently used first
        self._of_tenant: dict[str, OrderedDict[BlockKey, None]] = {}
        self._weights: dict[str, float] = {}  # of all tenants that have another than 1
        self._total_weight = 0.0  # of the tenants with blocks

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
        tenant = key[0][0]
        own = self._of_tenant.get(tenant, ())
        if len(own) >= self._most:
            self._evict(next(iter(own)))
        elif not self._empty:
            self._evict(self._victim(tenant))
        self._slots[key] = self._empty.pop()
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = OrderedDict()
            self._sum_weights()
        self._of_tenant[tenant][key] = None
        self.counts.written += 1
        return self._slots[key]

    def erase(self, digest: str) -> None:
        """Nothing of an adapter version is found any more."""
        self.disown([key for key in self._slots if key[0][1] == digest])

    def keys_of_tenant(self, tenant_id: str) -> list[BlockKey]:
        return [*self._of_tenant.get(tenant_id, ())]

    def owners(self) -> set[Namespace]:
        """Tenants and versions (None: the base) of all blocks."""
        return {key[0] for key in self._slots}

    def disown(self, keys: Iterable[BlockKey]) -> None:
        """Nothing is found under these keys any more."""
        for key in keys:
            if key in self._slots:
                self._remove(key)

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant's weight (above 0) from now on, 1 until then."""
        self._weights.pop(tenant, None)
        if weight != 1.0:
            self._weights[tenant] = weight
        self._sum_weights()

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _sum_weights(self) -> None:
        self._total_weight = sum(map(self._weight, self._of_tenant))

    def _victim(self, writing: str) -> BlockKey:
        """The block that makes room for one of the tenant `writing`. Those before it are within their tenants' shares;
        they come behind the others, so that they are not looked at again soon."""
        total = self._total_weight + (0 if writing in self._of_tenant else self._weight(writing))
        while True:  # the shares sum up to the pool: with the new block some tenant has more than its own
            key = next(iter(self._slots))
            tenant = key[0][0]
            share = self.num_slots * self._weight(tenant) / total
            if len(self._of_tenant[tenant]) + (tenant == writing) > share:
                return next(iter(self._of_tenant[tenant]))
            self._slots.move_to_end(key)

    def _evict(self, key: BlockKey) -> None:
        self._remove(key)
        self.counts.evicted += 1

    def _remove(self, key: BlockKey) -> None:
        self._empty.append(self._slots.pop(key))
        tenant = key[0][0]
        own = self._of_tenant[tenant]
        del own[key]
        if not own:
            del self._of_tenant[tenant]
            self._sum_weights()
