"""The index of blocks and states in host memory: what the device's pools forget is found there. Numbers only, no torch.

A block of a cached prefix is written when the pool is about to give it to another sequence, unless only lines of
batches used it; so is a state. Its key is that of the pool, with tenant and adapter digest, so nothing of one tenant is
found by another. The copies themselves are `BlockCopy`s in the step's plan, done in their order before its forward
pass: an entry is made when its copy is planned, and what reads it is planned later.

Memory is in slots of a block's size. A state takes as many of them as hold its bytes, wherever they are free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from loraplex.engine.kv import prefix_keys
from loraplex.engine.kv.blocks import UseOrder
from loraplex.engine.types import BlockKey, Namespace

_MOST_OF_POOL = 2
"""A tenant takes at most one part in this number of the pool."""


def most_of_tenant(num_slots: int) -> int:
    """The slots that one tenant may have."""
    return max(1, num_slots // _MOST_OF_POOL)


@dataclass(slots=True)
class HostCounts:
    """Blocks and states since the engine began, and seconds."""

    written: int = 0
    restored: int = 0
    evicted: int = 0
    """Blocks that made room for others."""
    refused: int = 0
    """Blocks and states of deleted versions, which are not written."""
    states_written: int = 0
    states_restored: int = 0
    states_evicted: int = 0
    restore_s: float = 0.0
    """Seconds that requests waited, together, for prefixes that took more than a step."""


class HostTier:
    """The keys of blocks and states in `num_slots` slots of host memory. `state_slots`: those that a state takes.

    Each tenant that has any slots has a share of them by its weight. A full memory loses what was used least recently
    of those whose tenant has more than its share. A tenant that has as much as one may take loses its own. A state that
    would take the slots of tenants within their shares is not written."""

    def __init__(self, num_slots: int, state_slots: int = 1) -> None:
        self.num_slots = num_slots
        self.counts = HostCounts()
        self.on_removed: Callable[[BlockKey], None] = lambda key: None
        """Called with each key under which nothing is found any more."""
        self.state_slots = state_slots
        self._most = most_of_tenant(num_slots)
        self._empty = [*reversed(range(num_slots))]
        self._slots: dict[BlockKey, tuple[int, ...]] = {}
        self.order = UseOrder[BlockKey]()
        """All keys."""
        self._of_tenant: dict[str, OrderedDict[BlockKey, None]] = {}
        self._taken: Counter[str] = Counter()  # slots by tenant
        self._weights: dict[str, float] = {}  # of all tenants that have another than 1
        self._total_weight = 0.0  # of the tenants with slots

    def __len__(self) -> int:
        """Slots that hold something."""
        return self.num_slots - len(self._empty)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._slots

    def read(self, key: BlockKey) -> tuple[int, ...]:
        """The slots of what is used now, in the order of its bytes; none where it is not here."""
        if key not in self._slots:
            return ()
        self.order.use(key)
        self._of_tenant[key[0][0]].move_to_end(key)
        return self._slots[key]

    def slots_of(self, key: BlockKey) -> tuple[int, ...]:
        """The slots that `read` gives; the key is used no more recently than before."""
        return self._slots.get(key, ())

    def recent(self) -> list[BlockKey]:
        """All keys, the most recently used first."""
        return [*self.order][::-1]

    def write(self, key: BlockKey) -> tuple[int, ...]:
        """The slots that a block or a state is to be copied to; none where it is here already, or finds no room."""
        count = self.size(key)
        if self.read(key) or not self._make_room(key[0][0], count):
            return ()
        slots = self._slots[key] = tuple(self._empty.pop() for _ in range(count))
        self.order.add(key)
        tenant = key[0][0]
        self._taken[tenant] += count
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = OrderedDict()
            self._sum_weights()
        self._of_tenant[tenant][key] = None
        if prefix_keys.is_of_state(key):
            self.counts.states_written += 1
        else:
            self.counts.written += 1
        return slots

    def erase(self, digest: str) -> None:
        """Nothing of an adapter version is found any more."""
        self.disown([key for key in self._slots if key[0][1] == digest])

    def keys_of_tenant(self, tenant_id: str) -> list[BlockKey]:
        return [*self._of_tenant.get(tenant_id, ())]

    def num_taken(self, tenant_id: str) -> int:
        """Slots that a tenant has."""
        return self._taken[tenant_id]

    def owners(self) -> set[Namespace]:
        """Tenants and versions (None: the base) of all that is here."""
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

    def size(self, key: BlockKey) -> int:
        """The slots that it takes."""
        return self.state_slots if prefix_keys.is_of_state(key) else 1

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _sum_weights(self) -> None:
        self._total_weight = sum(map(self._weight, self._of_tenant))

    def _make_room(self, tenant: str, count: int) -> bool:
        """Evict until `count` slots are free for a tenant; False where it may not have them."""
        if count > self._most:
            return False
        while self._taken[tenant] + count > self._most:
            self._evict(next(iter(self._of_tenant[tenant])))
        while len(self._empty) < count:
            victim = self._victim(tenant, count)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, writing: str, count: int) -> BlockKey | None:
        """The key that makes room for `count` slots of the tenant `writing`: for one slot there is always a key. Those
        before it are within their tenants' shares; they come behind the others, so that they are not looked at again
        soon."""
        total = self._total_weight + (0 if writing in self._of_tenant else self._weight(writing))
        unit = self.num_slots / total

        def has_more(tenant: str) -> bool:
            return self._taken[tenant] + (count if tenant == writing else 0) > unit * self._weight(tenant)

        if count > 1 and not any(map(has_more, self._of_tenant)):
            return None
        while True:  # the shares sum up to the memory: with one slot more some tenant has more than its own
            key = self.order.oldest()
            if has_more(key[0][0]):
                return next(iter(self._of_tenant[key[0][0]]))
            self.order.use(key)

    def _evict(self, key: BlockKey) -> None:
        self._remove(key)
        if prefix_keys.is_of_state(key):
            self.counts.states_evicted += 1
        else:
            self.counts.evicted += 1

    def _remove(self, key: BlockKey) -> None:
        slots, tenant = self._slots.pop(key), key[0][0]
        self.order.remove(key)
        self._empty += reversed(slots)
        self._taken[tenant] -= len(slots)
        own = self._of_tenant[tenant]
        del own[key]
        if not own:
            del self._of_tenant[tenant], self._taken[tenant]
            self._sum_weights()
        self.on_removed(key)
