"""Label values that clients can choose, bounded: tenants, and pairs of tenant and adapter version.

A value that gets no label of its own is counted under "other". A label is taken back only where its room is needed:
from what has not been used for `idle_s` seconds, or, for pairs, from the tenant that has the most.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable

from prometheus_client import Counter

OTHER = "other"
IDLE_S = 3600.0
"""A label that was not used for this long may be taken back, in seconds."""


class LabelSets:
    """Up to `limit` tenants and up to `limit` pairs of tenant and adapter version have labels of their own.

    Where all pairs are given out, the pair that was used least recently makes room if it has been idle for `idle_s`
    seconds by `clock`. Else a tenant takes the least recently used pair of the tenant with the most pairs, as long as
    that tenant has at least two more than itself. So a tenant loses a pair in use only while no tenant has more.
    `on_drop(tenant, adapter)` is called for each pair that loses its label, `on_drop(tenant, None)` for a tenant,
    after its pairs. Each call here takes constant time, amortised."""

    def __init__(
        self,
        limit: int,
        *,
        idle_s: float,
        clock: Callable[[], float],
        on_drop: Callable[[str, str | None], None],
    ) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._clock = clock
        self._on_drop = on_drop
        # Each from the least to the most recently used. The values of the first two are times.
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._pairs: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._adapters: dict[str, OrderedDict[str, None]] = {}
        self._by_size: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """Tenants by their number of pairs, 0 left out."""
        self._most = 0

    def tenant(self, tenant: str) -> str:
        """The label for this tenant: its own, or "other"."""
        now = self._clock()
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        elif tenant == OTHER or not self._room_for_tenant(now):
            return OTHER
        self._tenants[tenant] = now
        return tenant

    def pair(self, tenant: str, adapter: str) -> tuple[str, str]:
        """The labels for this pair. Where the pair has none, a tenant that has its own label keeps it."""
        tenant = self.tenant(tenant)
        pair = (tenant, adapter)
        if tenant == OTHER:
            return OTHER, OTHER
        now = self._tenants[tenant]
        if pair in self._pairs:
            self._pairs.move_to_end(pair)
            self._adapters[tenant].move_to_end(adapter)
        elif adapter == OTHER or not self._room_for_pair(tenant, now):
            return tenant, OTHER
        else:
            adapters = self._adapters.setdefault(tenant, OrderedDict())
            adapters[adapter] = None
            self._resize(tenant, len(adapters) - 1, len(adapters))
        self._pairs[pair] = now
        return pair

    def _room_for_tenant(self, now: float) -> bool:
        if len(self._tenants) < self._limit:
            return True
        oldest, used = next(iter(self._tenants.items()))
        if now - used < self._idle_s:
            return False
        for adapter in list(self._adapters.get(oldest, ())):
            self._drop_pair(oldest, adapter)
        del self._tenants[oldest]
        self._on_drop(oldest, None)
        return True

    def _room_for_pair(self, tenant: str, now: float) -> bool:
        if len(self._pairs) < self._limit:
            return True
        pair, used = next(iter(self._pairs.items()))
        if now - used >= self._idle_s:
            self._drop_pair(*pair)
            return True
        if self._most < len(self._adapters.get(tenant, ())) + 2:
            return False
        largest = next(iter(self._by_size[self._most]))
        self._drop_pair(largest, next(iter(self._adapters[largest])))
        return True

    def _drop_pair(self, tenant: str, adapter: str) -> None:
        adapters = self._adapters[tenant]
        del self._pairs[tenant, adapter]
        del adapters[adapter]
        self._resize(tenant, len(adapters) + 1, len(adapters))
        if not adapters:
            del self._adapters[tenant]
        self._on_drop(tenant, adapter)

    def _resize(self, tenant: str, before: int, after: int) -> None:
        """Files the tenant under its new number of pairs, which differs from the one `before` by one."""
        if before:
            del self._by_size[before][tenant]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size[after][tenant] = None
        if after > self._most or (before == self._most and before not in self._by_size):
            self._most = after


class OwnedCounter:
    """A counter whose first label values name an owner, so that all series of one owner can be removed."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._series: dict[tuple[str, ...], dict[tuple[str, ...], Counter]] = {}

    def inc(self, owner: tuple[str, ...], *rest: str, amount: float = 1) -> None:
        series = self._series.setdefault(owner, {})
        child = series.get(rest)
        if child is None:
            child = series[rest] = self._counter.labels(*owner, *rest)
        child.inc(amount)

    def remove(self, owner: tuple[str, ...]) -> None:
        for rest in self._series.pop(owner, ()):
            self._counter.remove(*owner, *rest)
