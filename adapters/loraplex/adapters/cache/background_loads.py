"""Loads that no request waits for: hints, and behind them what was in demand before a restart. No torch.

They use memory that is free and time in which nothing else is loaded, one at a time. A request's load cancels the one
that is under way rather than wait for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Generic, Literal

from loraplex.adapters.cache.entries import CachedAdapter, CachedAdapters, Stage
from loraplex.adapters.cache.eviction import DeviceEviction, HostEviction
from loraplex.adapters.cache.failures import Failures
from loraplex.adapters.cache.residency import ImageT, Ticket
from loraplex.adapters.cache.tenant_memory import TenantMemory
from loraplex.adapters.ref import AdapterRef

MAX_PREFETCHES = 4096


class PrefetchQueue:
    """Hints, in the order of their last one; one a digest, and at most `MAX_PREFETCHES`: the oldest are dropped."""

    def __init__(self) -> None:
        self._refs: OrderedDict[str, AdapterRef] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refs)

    def enqueue(self, ref: AdapterRef) -> None:
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest)
        if len(self._refs) > MAX_PREFETCHES:
            self._refs.popitem(last=False)

    def put_back(self, ref: AdapterRef) -> None:
        """Make it the first again."""
        self._refs[ref.digest] = ref
        self._refs.move_to_end(ref.digest, last=False)

    def first(self) -> AdapterRef:
        """The one that has waited longest. Raises StopIteration if there is none."""
        return next(iter(self._refs.values()))

    def clear(self) -> None:
        self._refs.clear()

    def remove(self, digest: str) -> bool:
        """Whether it was in the queue."""
        return self._refs.pop(digest, None) is not None


WarmOutcome = Literal["device", "host", "failed", "skipped"]
WARM_OUTCOMES: tuple[WarmOutcome, ...] = ("device", "host", "failed", "skipped")
"""Where a warmed adapter came to be. Skipped: there was no memory left, its tenant was at its caps, it was dropped."""


class BackgroundLoads(Generic[ImageT]):
    """`hints` are loaded before `_warming`. `outcomes` counts what became of the latter.

    An adapter that was loaded so is the first to be evicted until a request names it; of several, the one that came
    last. After a cancellation nothing begins before the cancelled load has ended, so that a disk that hangs costs one
    thread.
    """

    def __init__(
        self,
        entries: CachedAdapters[ImageT],
        failures: Failures,
        device: DeviceEviction[ImageT],
        host: HostEviction[ImageT],
        tenants: TenantMemory[ImageT],
    ) -> None:
        self._entries = entries
        self._failures = failures
        self._device = device
        self._host = host
        self._tenants = tenants
        self.hints = PrefetchQueue()
        self._warming = PrefetchQueue()
        self._current: CachedAdapter[ImageT] | None = None
        self._is_warm = False  # the current load is of `_warming`
        self._cancelled: Ticket[ImageT] | None = None
        self.outcomes: Counter[WarmOutcome] = Counter()

    @property
    def num_warming(self) -> int:
        """Adapters that are still to be warmed, or are being loaded for that."""
        return len(self._warming) + (self._current is not None and self._is_warm)

    @property
    def is_warming(self) -> bool:
        return self.num_warming > 0

    def warm(self, refs: Iterable[AdapterRef]) -> None:
        """Load these, in their order, in place of those of the last call."""
        self._warming.clear()
        for ref in refs:
            self._warming.enqueue(ref)

    def forget(self, digest: str) -> None:
        """Forget an adapter that is pinned, deleted, or failed."""
        self.hints.remove(digest)
        if self._warming.remove(digest):
            self.outcomes["skipped"] += 1

    def start(self, now: float) -> None:
        """Begin the next load, if there is one and nothing is loaded; of `_warming`, nothing copied either. So a
        request's copy waits for one of these at most."""
        if self._cancelled is not None:
            if not self._cancelled.done:
                return
            self._cancelled = None
        hosted: dict[str, int] | None = None
        while (self.hints or self._warming) and not self._entries.loading:
            queue = self.hints or self._warming
            is_warm = queue is self._warming
            if is_warm and self._entries.being_copied:
                return
            ref = queue.first()
            entry = self._entries.get(ref.digest)
            outcome: WarmOutcome = "skipped"
            if entry is not None:
                if entry.stage is Stage.HOST:
                    self.place(entry, now)
                outcome = "host" if entry.stage is Stage.HOST else "device"
            elif self._failures.retry_at(ref.digest) <= now:
                if hosted is None:
                    hosted = self._tenants.capped_host_bytes()
                if self._finds_room(ref, hosted):
                    if not self._host.may_load():
                        return
                    queue.remove(ref.digest)
                    self._current, self._is_warm = self._entries.load(ref, now), is_warm
                    self._current.prefetched = True
                    return
            queue.remove(ref.digest)
            self.outcomes[outcome] += is_warm

    def _finds_room(self, ref: AdapterRef, hosted: dict[str, int]) -> bool:
        """Whether an adapter of the usual size finds free memory, for its tenant as well."""
        num_pages, num_bytes = self._entries.mean_size
        device = self._device.has_free(ref.tenant_id, num_pages, num_bytes)
        cap = self._tenants.host_caps.get(ref.tenant_id)
        if not device and cap is not None and hosted[ref.tenant_id] + num_bytes > cap:
            return False
        while not self._host.is_free():
            # The image of an adapter that is on the device, and that no request has named, is worth less.
            if not device or not self._host.drop_spare():
                return False
        return True

    def place(self, entry: CachedAdapter[ImageT], now: float) -> None:
        """Copy an adapter in host memory to the device, if it fits there without an eviction."""
        if self._device.is_free(entry, entry.ref.tenant_id):
            self._entries.copy(entry, entry.ref.tenant_id, now)

    def loaded(self, entry: CachedAdapter[ImageT], now: float) -> None:
        """An adapter's load has succeeded."""
        if entry.prefetched:
            self.place(entry, now)
        self._ended(entry, "host" if entry.stage is Stage.HOST else "device")

    def failed(self, entry: CachedAdapter[ImageT]) -> None:
        """An adapter's load has failed."""
        self._ended(entry, "failed")

    def dropped(self, entry: CachedAdapter[ImageT]) -> None:
        """An adapter was deleted while it was loaded."""
        self._ended(entry, "skipped")

    def give_way(self) -> bool:
        """A request's load cannot begin: cancel the load that is under way. It is the next again. Whether there was
        one; not one that a request has named since it began."""
        entry = self._current
        if entry is None or not entry.unasked:
            return False
        (self._warming if self._is_warm else self.hints).put_back(entry.ref)
        self._cancel(entry)
        return True

    def give_up(self) -> None:
        """There is not as much host memory free as the load under way takes, if one is."""
        entry = self._current
        if entry is not None and entry.unasked:
            self.outcomes["skipped"] += self._is_warm
            self._cancel(entry)

    def _cancel(self, entry: CachedAdapter[ImageT]) -> None:
        assert entry.load is not None
        self._current, self._cancelled = None, entry.load
        self._host.look_again()
        entry.load.cancel()
        self._entries.remove_entry(entry)

    def _ended(self, entry: CachedAdapter[ImageT], outcome: WarmOutcome) -> None:
        if entry is self._current:
            self.outcomes[outcome] += self._is_warm
            self._current = None
