"""The cache's entries: the stage of each adapter, and the owner of each page, slot and byte of host memory.

Every change of an adapter's stage is one method here, which keeps all lists and counts consistent. `adapter_cache`
decides which changes are made. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Literal

from loraplex.adapters.cache.recent_loads import RecentLoads
from loraplex.adapters.cache.residency import (
    AdapterState,
    AdapterTransport,
    CacheEntry,
    ImageT,
    Lease,
    LeaseError,
    Ticket,
)
from loraplex.adapters.ref import AdapterRef

EvictionReason = Literal["room", "cap", "deleted", "failed"]
EVICTION_REASONS: tuple[EvictionReason, ...] = ("room", "cap", "deleted", "failed")
MAX_USES = 16
"""Uses of an adapter that count. With more, one that was used much for a day would stay for another."""


class Stage(Enum):
    LOADING = "loading"  # from disk to host memory
    HOST = "host"
    COPYING = "copying"  # from host memory to the device
    DEVICE = "device"


@dataclass(slots=True, eq=False)
class CachedAdapter(Generic[ImageT]):
    """One adapter that is not cold.

    `since`: when its load or its copy began. `wanted_in`: the last pass that asked for it. `safe_until`: the last pass
    in which it may not be evicted, for it has only just arrived. `doomed`: to be removed when its last lease, or its
    copy, ends. `prefetched`: no request waited for it when its load began. `host_tenant` had it loaded, `device_tenant`
    had it copied. `uses`: leases since it is on the device, up to MAX_USES; `score`: see `CachedAdapters`.
    """

    ref: AdapterRef
    stage: Stage
    since: float
    host_tenant: str
    device_tenant: str = ""
    load: Ticket[ImageT] | None = None
    copy: Ticket[None] | None = None
    image: ImageT | None = None
    num_pages: int = 0
    num_bytes: int = 0
    slot: int = -1
    pages: tuple[int, ...] = ()
    leases: set[Lease] = field(default_factory=set)
    doomed: bool = False
    prefetched: bool = False
    wanted_in: int = -1
    safe_until: int = -1
    last_used: float | None = None
    uses: int = 0
    score: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def unasked(self) -> bool:
        """Whether it was prefetched, and no request has named it since."""
        return self.prefetched and self.last_used is None

    @property
    def state(self) -> AdapterState:
        if self.stage is Stage.LOADING:
            return "cold"
        return "hot" if self.stage is Stage.DEVICE else "warm"

    def shown(self, now: float, *, pinned: bool, error: str | None) -> CacheEntry:
        """A copy for callers, with its pin and the error of its last load."""
        return CacheEntry(
            ref=self.ref,
            state=self.state,
            loading=self.stage is Stage.LOADING or self.copy is not None,
            pinned=pinned,
            leases=len(self.leases),
            pages=len(self.pages),
            device_bytes=self.num_bytes if self.pages else 0,
            host_bytes=self.num_bytes if self.image is not None else 0,
            idle_s=None if self.last_used is None else max(0.0, now - self.last_used),
            load_seconds=dict(self.seconds),
            error=error,
        )


class CachedAdapters(Generic[ImageT]):
    """All adapters that are not cold, by digest, and each list of them that the cache looks through.

    `on_device` are those that can be leased, `idle` those on the device that are neither leased nor pinned, `hosted`
    those with an image in host memory, the last two with the oldest use first. `arriving` are those on the device whose
    copy goes on: they are not idle, and keep their images. `stuck` are copies past their time, or that failed while
    they were leased, known under no digest any more: they keep their pages, which a copy may still write to, or a step
    read.

    An adapter's score is the `age` at its last use plus its uses; the age is the highest score that was evicted so far.
    This is LFU with dynamic aging: Arlitt et al., "Evaluating content management techniques for Web proxy caches"
    (2000).

    `elsewhere` are digests that other engines of a cluster are there to serve: the device evicts them first.

    `on_residency` hears of each digest that comes into memory (True) or leaves both tiers (False).

    `loads` and `copies` count those that came to their end, `seconds` sums up what they took, by "disk" and "copy"; the
    evictions count adapters that left the device, and images dropped from host memory, for others;
    `cap_evictions` those of them that left because their tenant was at its cap. `evictions` counts what left a tier by
    tier and reason: beside these two what was deleted, and what failed or does not fit. `recent` has the last hour's
    loads and copies by digest.
    """

    def __init__(self, transport: AdapterTransport[ImageT], num_pages: int, num_slots: int) -> None:
        self._transport = transport
        self.on_residency: Callable[[str, bool], None] = _ignore
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.by_digest: dict[str, CachedAdapter[ImageT]] = {}
        self.loading: dict[str, CachedAdapter[ImageT]] = {}
        self.copying: dict[str, CachedAdapter[ImageT]] = {}
        self.arriving: dict[str, CachedAdapter[ImageT]] = {}
        self.stuck: list[CachedAdapter[ImageT]] = []
        self.idle: OrderedDict[str, CachedAdapter[ImageT]] = OrderedDict()
        self.hosted: OrderedDict[str, CachedAdapter[ImageT]] = OrderedDict()
        self.elsewhere: frozenset[str] = frozenset()
        self.on_device: dict[str, CachedAdapter[ImageT]] = {}
        self.age = 0.0
        self.page_bytes = 0  # unknown until an adapter has been loaded
        self.host_bytes = 0
        self.num_leases = 0
        self.loads = self.copies = 0
        self.recent = RecentLoads()
        self.device_evictions = self.host_evictions = 0
        self.cap_evictions = {"device": 0, "host": 0}
        self.evictions: dict[str, dict[str, int]] = {
            tier: dict.fromkeys(EVICTION_REASONS, 0) for tier in ("device", "host")
        }
        self.seconds = {"disk": 0.0, "copy": 0.0, "overlapped": 0.0}

    def get(self, digest: str) -> CachedAdapter[ImageT] | None:
        return self.by_digest.get(digest)

    def state(self, digest: str) -> AdapterState:
        entry = self.by_digest.get(digest)
        return "cold" if entry is None else entry.state

    def states(self) -> dict[str, AdapterState]:
        """The states of all adapters that are not cold."""
        return {
            digest: entry.state
            for digest, entry in self.by_digest.items()
            if entry.stage is not Stage.LOADING
        }

    def load(self, ref: AdapterRef, now: float) -> CachedAdapter[ImageT]:
        """Cold → LOADING."""
        entry: CachedAdapter[ImageT] = CachedAdapter(
            ref, Stage.LOADING, now, ref.tenant_id, load=self._transport.load(ref)
        )
        self.by_digest[ref.digest] = self.loading[ref.digest] = entry
        return entry

    def loaded(self, entry: CachedAdapter[ImageT], ticket: Ticket[ImageT], now: float) -> None:
        """LOADING → HOST, with what the ticket of its load brought."""
        image = ticket.value
        del self.loading[entry.ref.digest]
        entry.seconds |= ticket.seconds
        entry.load, entry.image, entry.stage = None, image, Stage.HOST
        entry.num_pages, entry.num_bytes = image.num_pages, image.num_bytes
        self.page_bytes = entry.num_bytes // entry.num_pages
        self.hosted[entry.ref.digest] = entry
        self.hosted.move_to_end(entry.ref.digest, last=not entry.unasked)
        self.host_bytes += entry.num_bytes
        self.loads += 1
        self.recent.note("disk", entry.ref.digest, now)
        self._took(entry, "disk", now)
        self.on_residency(entry.ref.digest, True)

    def copy(self, entry: CachedAdapter[ImageT], tenant_id: str, now: float, lead_s: float = 0.0) -> None:
        """HOST → COPYING for this tenant, into pages and a slot that must be free. `lead_s` as of the transport's."""
        assert entry.image is not None
        entry.device_tenant = tenant_id
        entry.slot = self.free_slots.pop()
        # Adjacent pages are copied in one go.
        entry.pages = tuple(sorted(self.free_pages.pop() for _ in range(entry.num_pages)))
        entry.stage, entry.since = Stage.COPYING, now
        self.copying[entry.ref.digest] = entry
        entry.copy = self._transport.copy(entry.image, entry.slot, entry.pages, lead_s)

    def copied(self, entry: CachedAdapter[ImageT], now: float, *, is_whole: bool) -> None:
        """COPYING → DEVICE, where its copy goes on unless it `is_whole`."""
        del self.copying[entry.ref.digest]
        entry.stage = Stage.DEVICE
        if is_whole:
            entry.copy = None
        else:
            self.arriving[entry.ref.digest] = entry
        entry.seconds.pop("overlapped", None)
        self.on_device[entry.ref.digest] = entry
        self._rate(entry)
        self.copies += 1
        self.recent.note("copy", entry.ref.digest, now)
        self._took(entry, "copy", now)
        entry.since = now

    def arrived(self, entry: CachedAdapter[ImageT], now: float) -> None:
        """The copy of an arriving adapter is done."""
        del self.arriving[entry.ref.digest]
        entry.copy = None
        self._took(entry, "overlapped", now)

    def strand(self, entry: CachedAdapter[ImageT]) -> None:
        """COPYING or arriving → stuck; its digest is cold. It keeps what it holds until `clear_stuck` finds its copy
        done, and no lease on it."""
        for index in (self.copying, self.arriving, self.on_device, self.by_digest, self.hosted):
            index.pop(entry.ref.digest, None)
        entry.stage = Stage.COPYING
        self.stuck.append(entry)
        self.on_residency(entry.ref.digest, False)

    def clear_stuck(self) -> None:
        for entry in [each for each in self.stuck if each.copy is not None and each.copy.done]:
            if entry.leases:
                continue
            self.stuck.remove(entry)
            self._free_device(entry)
            self._release_image(entry)

    def evict(self, entry: CachedAdapter[ImageT], *, for_cap: bool) -> None:
        """DEVICE → HOST if it still has its image, else cold."""
        self.device_evictions += 1
        self.cap_evictions["device"] += for_cap
        self.evictions["device"]["cap" if for_cap else "room"] += 1
        self.age = max(self.age, entry.score)
        entry.uses = 0
        if entry.image is None:
            self.remove_entry(entry)
        else:
            self._free_device(entry)
            entry.stage = Stage.HOST

    def drop_image(self, entry: CachedAdapter[ImageT], *, for_cap: bool = False) -> None:
        """HOST → cold; on the device it stays there without its image."""
        self.host_evictions += 1
        self.cap_evictions["host"] += for_cap
        self.evictions["host"]["cap" if for_cap else "room"] += 1
        if entry.stage is Stage.HOST:
            self.remove_entry(entry)
        elif entry.image is not None:
            self._release_image(entry)
            del self.hosted[entry.ref.digest]

    def remove_entry(self, entry: CachedAdapter[ImageT], reason: EvictionReason | None = None) -> None:
        """Any stage → cold; no copy may be under way. With a reason it is counted for each tier that had it."""
        digest = entry.ref.digest
        if reason is not None:
            self.evictions["device"][reason] += entry.slot >= 0
            self.evictions["host"][reason] += entry.image is not None
        if entry.slot >= 0:
            self._free_device(entry)
        if entry.image is not None:
            self._release_image(entry)
        for index in (self.by_digest, self.loading, self.copying, self.hosted):
            index.pop(digest, None)
        self.on_residency(digest, False)

    def lease(self, entry: CachedAdapter[ImageT], *, counts: bool = True) -> Lease:
        lease = Lease(entry.ref.digest, entry.slot, counts)
        entry.leases.add(lease)
        if counts:
            entry.uses = min(entry.uses + 1, MAX_USES)
            self._rate(entry)
        self.num_leases += 1
        self.idle.pop(entry.ref.digest, None)
        return lease

    def end_lease(self, lease: Lease) -> CachedAdapter[ImageT]:
        known = (self.by_digest.get(lease.digest), *self.stuck)
        entry = next((each for each in known if each is not None and lease in each.leases), None)
        if entry is None:
            raise LeaseError(f"the lease on adapter {lease.digest[:12]} was given back already")
        entry.leases.remove(lease)
        self.num_leases -= 1
        return entry

    def make_idle(self, entry: CachedAdapter[ImageT]) -> None:
        """Allow its eviction from now on: as the last of all, or as the first if no request ever named it."""
        self.idle[entry.ref.digest] = entry
        self.idle.move_to_end(entry.ref.digest, last=not entry.unasked)

    def touch(self, entry: CachedAdapter[ImageT], now: float) -> None:
        """Make it the one used last."""
        entry.last_used = now
        self._rate(entry)
        for order in (self.idle, self.hosted):
            if entry.ref.digest in order:
                order.move_to_end(entry.ref.digest)

    def _rate(self, entry: CachedAdapter[ImageT]) -> None:
        entry.score = self.age + max(1, entry.uses)

    def _took(self, entry: CachedAdapter[ImageT], stage: str, now: float) -> None:
        entry.seconds[stage] = now - entry.since
        self.seconds[stage] += now - entry.since

    def _release_image(self, entry: CachedAdapter[ImageT]) -> None:
        assert entry.image is not None
        entry.image.release()
        entry.image = None
        self.host_bytes -= entry.num_bytes

    @property
    def mean_size(self) -> tuple[int, int]:
        """Pages and bytes of an image in host memory; 0 and 0 where there is none."""
        mean = self.host_bytes // len(self.hosted) if self.hosted else 0
        return (-(-mean // self.page_bytes), mean) if mean else (0, 0)

    @property
    def being_copied(self) -> tuple[CachedAdapter[ImageT], ...]:
        """Adapters whose images a copy reads."""
        return *self.copying.values(), *self.arriving.values()

    def host_shortage(self) -> int:
        """Bytes of host memory that loads wait for."""
        return self._transport.host_shortage() if self.loading else 0

    def _free_device(self, entry: CachedAdapter[ImageT]) -> None:
        assert not entry.leases, "pages with a lease on them may not be given away"
        if entry.stage is Stage.DEVICE:
            del self.on_device[entry.ref.digest]
            self.idle.pop(entry.ref.digest, None)
        self._transport.clear(entry.slot)
        self.free_pages.extend(reversed(entry.pages))
        self.free_slots.append(entry.slot)
        entry.slot, entry.pages = -1, ()


def _ignore(digest: str, is_resident: bool) -> None:
    pass
