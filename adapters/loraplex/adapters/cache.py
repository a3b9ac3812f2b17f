"""Which adapters are where: disk, host memory or device, who holds a lease, and who has to go.

    cold ──load──▶ LOADING ──▶ HOST ──copy──▶ COPYING ──▶ DEVICE
                      │          ▲                          │
                      ▼          └───────── evicted ────────┘
                   (failed)      while its image is kept, else back to cold

One thread, the step thread, calls everything here. Nothing blocks: the transport begins work elsewhere and hands
back tickets that `poll` looks at. There is no torch and no clock but the injected one, so that the same code runs
under the simulator. Adapters are known by digest alone: two tenants with the same upload share one residency.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.residency import (
    AdapterState,
    AdapterTransport,
    CacheEntry,
    CacheUsage,
    ImageT,
    Lease,
    LeaseError,
    PinRefused,
    Residency,
    Ticket,
)

__all__ = ["AdapterCache", "CacheEntry", "CacheUsage", "Lease", "LeaseError", "PinRefused", "Residency"]

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
"""A failed load is answered from memory for so long before it is tried again: the first time, and at most."""
MAX_FAILURES = 4096
MAX_WISHES = 1024
"""Bounds on what is remembered of failed loads, and of prefetches not begun yet."""


class _Stage(Enum):
    LOADING = "loading"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"


@dataclass(slots=True, eq=False)
class _Entry(Generic[ImageT]):
    """One adapter that is not cold. `wanted_in` is the last pass that asked for it; `safe_until` the last pass
    in which it may not be evicted because it has only just arrived; `doomed`: to be forgotten when its last
    lease, or its copy, ends; `prefetched`: nobody waits for it, it goes on to the device only if there is room."""

    ref: AdapterRef
    stage: _Stage
    since: float
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
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Failure:
    ref: AdapterRef
    message: str
    retry_at: float
    backoff_s: float


class AdapterCache(Generic[ImageT]):
    """The state machine over device pages, device slots and host memory.

    `num_pages` and `num_slots` are the arena's; `host_bytes` bounds the images in host memory but for those that
    are on their way to the device; `load_timeout_s` is what a load or a copy may take; at most `max_loads` loads
    are under way at a time, which should be what the transport can really do at a time. Device room is made by
    evicting the least recently used adapter that is not leased, not pinned, not asked for in the current pass and
    not only just arrived; nothing is evicted unless that makes enough room.
    """

    def __init__(
        self,
        *,
        transport: AdapterTransport[ImageT],
        num_pages: int,
        num_slots: int,
        host_bytes: int,
        load_timeout_s: float,
        clock: Callable[[], float],
        max_loads: int = 2,
    ) -> None:
        if num_pages < 1 or num_slots < 1 or max_loads < 1:
            raise ValueError("an adapter cache needs at least one page, one slot and one load at a time")
        self._transport = transport
        self._num_pages = num_pages
        self._num_slots = num_slots
        self._host_limit = host_bytes
        self._timeout_s = load_timeout_s
        self._clock = clock
        self._max_loads = max_loads

        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._entries: dict[str, _Entry[ImageT]] = {}
        self._loading: dict[str, _Entry[ImageT]] = {}
        self._copying: dict[str, _Entry[ImageT]] = {}
        self._stuck: list[_Entry[ImageT]] = []  # copies past their time, which may still write to their pages
        # Both with the oldest use first: on the device and neither leased nor pinned; with an image in host memory.
        self._idle: OrderedDict[str, _Entry[ImageT]] = OrderedDict()
        self._hosted: OrderedDict[str, _Entry[ImageT]] = OrderedDict()
        self._pinned: dict[str, AdapterRef] = {}
        self._wishes: OrderedDict[str, AdapterRef] = OrderedDict()
        self._failures: OrderedDict[str, _Failure] = OrderedDict()

        self._pass = 0
        self._wanted: dict[str, None] = {}
        self._host_full = False  # found in this pass
        self._host_used = 0
        self._num_leases = 0
        self._loads = self._load_failures = self._copies = 0
        self._device_evictions = self._host_evictions = 0
        self._seconds = {"disk": 0.0, "copy": 0.0}

    # The course of a step.

    def poll(self) -> None:
        """Take in what the transport has finished, give up on what takes too long, and move pinned and prefetched
        adapters on. At the start of each step; also worth calling when there is nothing to compute."""
        now = self._clock()
        for entry in list(self._loading.values()):
            self._poll_load(entry, now)
        for entry in list(self._copying.values()):
            self._poll_copy(entry, now)
        for entry in [entry for entry in self._stuck if entry.copy is not None and entry.copy.done]:
            self._stuck.remove(entry)
            self._free_device(entry)
            self._drop_image(entry)
        self._trim_host()
        for ref in self._pinned.values():
            if self._retry_at(ref.digest) <= now:
                self._ensure(ref, now)
        self._grant_wish(now)

    def begin_pass(self) -> None:
        """A new scheduling pass: nothing is wanted yet."""
        self._pass += 1
        self._wanted.clear()
        self._host_full = False

    def next_timeout_s(self) -> float | None:
        """Seconds until time alone makes `poll` do something (a load to give up, a pinned adapter to try again);
        None if only a finished ticket can."""
        times = [
            entry.since + self._timeout_s for entry in (*self._loading.values(), *self._copying.values())
        ]
        times += [self._failures[d].retry_at for d in self._pinned if d in self._failures]
        return max(0.0, min(times) - self._clock()) if times else None

    # Requests and leases.

    def request(self, ref: AdapterRef) -> Residency:
        """See to it that an adapter gets to the device, and say how far it is. No later request of the same pass
        evicts it."""
        now = self._clock()
        digest = ref.digest
        self._wanted[digest] = None
        if self._retry_at(digest) > now and digest not in self._entries:
            return Residency.FAILED
        residency = self._ensure(ref, now)
        entry = self._entries.get(digest)
        if entry is not None:
            entry.ref = ref
            entry.doomed = False
            entry.wanted_in = self._pass
            self._touch(entry, now)
        return residency

    def failure(self, digest: str) -> str:
        """Why `request` answered FAILED, in one line; empty where it did not."""
        failure = self._failures.get(digest)
        return "" if failure is None else failure.message

    def acquire(self, digest: str) -> Lease:
        """Lend an adapter that is on the device. Raises LeaseError where it is not."""
        entry = self._entries.get(digest)
        if entry is None or entry.stage is not _Stage.DEVICE:
            raise LeaseError(f"adapter {digest[:12]} is not on the device: nothing to lease")
        lease = Lease(digest, entry.slot)
        entry.leases.add(lease)
        self._num_leases += 1
        self._idle.pop(digest, None)
        entry.last_used = self._clock()
        return lease

    def release(self, lease: Lease) -> None:
        """Give a lease back. Raises LeaseError on a lease that is not (or no longer) lent by this cache."""
        entry = self._entries.get(lease.digest)
        if entry is None or lease not in entry.leases:
            raise LeaseError(f"the lease on adapter {lease.digest[:12]} was given back already")
        entry.leases.remove(lease)
        self._num_leases -= 1
        self._touch(entry, self._clock())
        if not entry.leases:
            self._on_idle(entry)

    # What an operator may ask.

    def pin(self, ref: AdapterRef) -> None:
        """Keep an adapter on the device from now on; bring it there if it is not. Raises PinRefused where the
        pinned ones would not all fit (its size is known once it has been loaded)."""
        if ref.digest in self._pinned:
            return
        if len(self._pinned) >= self._num_slots:
            raise PinRefused(
                f"all {self._num_slots} places on the device are pinned; unpin another version first"
            )
        entry = self._entries.get(ref.digest)
        if entry is not None and entry.num_pages > self._pages_not_spoken_for(ref.digest):
            raise PinRefused(self._too_large(entry))
        self._pinned[ref.digest] = ref
        self._wishes.pop(ref.digest, None)
        self._idle.pop(ref.digest, None)
        if entry is not None:
            entry.doomed = False
        if self._retry_at(ref.digest) <= self._clock():
            self._ensure(ref, self._clock())

    def unpin(self, digest: str) -> None:
        """Let a version be evicted again. Does nothing for one that is not pinned."""
        if self._pinned.pop(digest, None) is not None and digest in self._entries:
            self._on_idle(self._entries[digest])

    def drop(self, digest: str) -> None:
        """The version was deleted: forget it, its pin and its failures, as soon as no lease and no copy needs it.
        A later request brings it back if its files are still there."""
        self._pinned.pop(digest, None)
        self._wishes.pop(digest, None)
        self._failures.pop(digest, None)
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.doomed = True
        if entry.load is not None:
            entry.load.cancel()
        if entry.copy is None and not entry.leases:
            self._forget(entry)

    def prefetch(self, ref: AdapterRef) -> None:
        """Bring an adapter into host memory when the disk is free, and on to the device if there is room without
        evicting any. A hint: it promises nothing and fails silently."""
        if ref.digest not in self._pinned:
            self._wishes[ref.digest] = ref
            self._wishes.move_to_end(ref.digest)
            if len(self._wishes) > MAX_WISHES:
                self._wishes.popitem(last=False)

    # What others may know.

    def state(self, digest: str) -> AdapterState:
        """Where an adapter is: on the device, in host memory, or on disk only (also: not known at all)."""
        entry = self._entries.get(digest)
        if entry is None or entry.stage is _Stage.LOADING:
            return "cold"
        return "hot" if entry.stage is _Stage.DEVICE else "warm"

    def residency(self) -> dict[str, AdapterState]:
        """Every version that is not cold."""
        return {d: self.state(d) for d, entry in self._entries.items() if entry.stage is not _Stage.LOADING}

    def entries(self) -> tuple[CacheEntry, ...]:
        """Every version that is somewhere, on its way, pinned, or whose load failed of late."""
        listed = [self._entry_of(entry) for entry in self._entries.values()]
        for digest in (self._pinned | self._failures).keys() - self._entries.keys():
            failure = self._failures.get(digest)
            ref = failure.ref if failure is not None else self._pinned[digest]
            error = failure.message if failure is not None else None
            listed.append(CacheEntry(ref, "cold", pinned=digest in self._pinned, error=error))
        return tuple(listed)

    def usage(self) -> CacheUsage:
        return CacheUsage(
            num_pages=self._num_pages,
            num_pages_used=self._num_pages - len(self._free_pages),
            num_slots=self._num_slots,
            num_slots_used=self._num_slots - len(self._free_slots),
            host_bytes=self._host_limit,
            host_bytes_used=self._host_used,
            num_leases=self._num_leases,
            num_pinned=len(self._pinned),
            num_device=sum(entry.stage is _Stage.DEVICE for entry in self._entries.values()),
            num_host=len(self._hosted),
            num_loading=len(self._loading),
            loads=self._loads,
            load_failures=self._load_failures,
            copies=self._copies,
            device_evictions=self._device_evictions,
            host_evictions=self._host_evictions,
            load_seconds=dict(self._seconds),
        )

    # The way to the device.

    def _ensure(self, ref: AdapterRef, now: float) -> Residency:
        """Begin the next stage of its way, if one can begin."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            return self._begin_load(ref, now)
        if entry.stage is _Stage.DEVICE:
            return Residency.READY
        if entry.stage is _Stage.HOST:
            return self._begin_copy(entry, now)
        return Residency.LOADING

    def _begin_load(self, ref: AdapterRef, now: float) -> Residency:
        if len(self._loading) >= self._max_loads or not self._host_has_room():
            return Residency.NO_ROOM
        entry: _Entry[ImageT] = _Entry(ref, _Stage.LOADING, now, load=self._transport.load(ref))
        self._entries[ref.digest] = self._loading[ref.digest] = entry
        return Residency.LOADING

    def _begin_copy(self, entry: _Entry[ImageT], now: float) -> Residency:
        if entry.num_pages > self._pages_not_spoken_for(entry.ref.digest) or self._slots_not_spoken_for() < 1:
            self._fail(entry, self._too_large(entry), now)
            return Residency.FAILED
        victims = self._victims(entry)
        if victims is None:
            return Residency.NO_ROOM
        for victim in victims:
            self._evict(victim)
        self._place(entry, now)
        return Residency.LOADING

    def _place(self, entry: _Entry[ImageT], now: float) -> None:
        assert entry.image is not None
        entry.slot = self._free_slots.pop()
        taken = [self._free_pages.pop() for _ in range(entry.num_pages)]
        entry.pages = tuple(sorted(taken))  # adjacent pages are copied in one go
        entry.stage, entry.since = _Stage.COPYING, now
        self._copying[entry.ref.digest] = entry
        entry.copy = self._transport.copy(entry.image, entry.slot, entry.pages)

    def _poll_load(self, entry: _Entry[ImageT], now: float) -> None:
        ticket = entry.load
        assert ticket is not None
        if not ticket.done:
            if now - entry.since >= self._timeout_s:
                ticket.cancel()
                self._fail(entry, f"its load took longer than {self._timeout_s:g} s", now)
            return
        if ticket.error is not None:
            self._fail(entry, ticket.error, now)
            return
        image = ticket.value
        del self._loading[entry.ref.digest]
        entry.load, entry.image, entry.stage = None, image, _Stage.HOST
        entry.num_pages, entry.num_bytes = image.num_pages, image.num_bytes
        self._hosted[entry.ref.digest] = entry
        self._host_used += entry.num_bytes
        self._took(entry, "disk", now)
        self._loads += 1
        # The back-off goes on where the same happens again: an adapter too large for the device.
        if entry.num_pages > self._num_pages:
            self._fail(entry, self._too_large(entry), now)
            return
        self._failures.pop(entry.ref.digest, None)
        if entry.prefetched:
            self._place_if_free(entry, now)

    def _poll_copy(self, entry: _Entry[ImageT], now: float) -> None:
        ticket = entry.copy
        assert ticket is not None
        if not ticket.done:
            if now - entry.since >= self._timeout_s:
                # Its pages and its image stay as they are until the copy ends, if ever.
                del self._copying[entry.ref.digest]
                del self._entries[entry.ref.digest]
                self._hosted.pop(entry.ref.digest, None)
                self._stuck.append(entry)
                self._remember(
                    entry.ref, f"its copy to the device took longer than {self._timeout_s:g} s", now
                )
            return
        del self._copying[entry.ref.digest]
        entry.copy = None
        if ticket.error is not None:
            self._fail(entry, ticket.error, now)
            return
        entry.stage = _Stage.DEVICE
        entry.safe_until = self._pass + 1
        self._took(entry, "copy", now)
        self._copies += 1
        self._on_idle(entry)

    def _grant_wish(self, now: float) -> None:
        """Begin the next prefetch, if the disk has nothing else to do."""
        while self._wishes and not self._loading:
            digest, ref = next(iter(self._wishes.items()))
            entry = self._entries.get(digest)
            if entry is None and self._retry_at(digest) <= now:
                if self._begin_load(ref, now) is Residency.NO_ROOM:
                    return
                self._entries[digest].prefetched = True
            elif entry is not None and entry.stage is _Stage.HOST:
                self._place_if_free(entry, now)
            self._wishes.pop(digest, None)

    def _place_if_free(self, entry: _Entry[ImageT], now: float) -> None:
        if self._free_slots and entry.num_pages <= len(self._free_pages):
            self._place(entry, now)

    def _took(self, entry: _Entry[ImageT], stage: str, now: float) -> None:
        entry.seconds[stage] = now - entry.since
        self._seconds[stage] += now - entry.since

    # Room on the device.

    def _victims(self, entry: _Entry[ImageT]) -> list[_Entry[ImageT]] | None:
        """Whom to evict so that `entry` fits, the least recently used first; None if that is not enough."""
        pages = len(self._free_pages)
        slots = len(self._free_slots)
        victims: list[_Entry[ImageT]] = []
        idle = iter(self._idle.values())
        while pages < entry.num_pages or slots < 1:
            victim = next(idle, None)
            if victim is None:
                return None
            if not self._is_wanted(victim) and victim.safe_until < self._pass:
                victims.append(victim)
                pages += victim.num_pages
                slots += 1
        return victims

    def _evict(self, entry: _Entry[ImageT]) -> None:
        self._device_evictions += 1
        if entry.image is None:
            self._forget(entry)
        else:
            self._free_device(entry)
            entry.stage = _Stage.HOST

    def _free_device(self, entry: _Entry[ImageT]) -> None:
        assert not entry.leases, "pages with a lease on them may not be given away"
        if entry.stage is _Stage.DEVICE:
            self._idle.pop(entry.ref.digest, None)
        self._transport.clear(entry.slot)
        self._free_pages.extend(reversed(entry.pages))
        self._free_slots.append(entry.slot)
        entry.slot, entry.pages = -1, ()

    def _on_idle(self, entry: _Entry[ImageT]) -> None:
        """Its last lease, its copy or its pin has ended."""
        if entry.stage is not _Stage.DEVICE or entry.leases:
            return
        if entry.doomed:
            self._forget(entry)
        elif entry.ref.digest not in self._pinned:
            self._idle[entry.ref.digest] = entry
            self._idle.move_to_end(entry.ref.digest)

    def _pages_not_spoken_for(self, digest: str) -> int:
        """Pages that an adapter could get some day: not those of pinned others, nor those of stuck copies."""
        return self._num_pages - sum(entry.num_pages for entry in self._immovable(digest))

    def _slots_not_spoken_for(self) -> int:
        return self._num_slots - sum(1 for _ in self._immovable(""))

    def _immovable(self, digest: str) -> Iterable[_Entry[ImageT]]:
        yield from self._stuck
        for other in self._pinned:
            entry = self._entries.get(other)
            if other != digest and entry is not None and entry.slot >= 0:
                yield entry

    def _too_large(self, entry: _Entry[ImageT]) -> str:
        room = self._pages_not_spoken_for(entry.ref.digest)
        if room == self._num_pages:
            beside = f"the device memory for adapters has {room}"
        else:
            beside = f"{room} of the {self._num_pages} for adapters are not pinned"
        return f"it does not fit: it needs {entry.num_pages} pages of device memory, {beside}"

    # Room in host memory.

    def _host_has_room(self) -> bool:
        """Whether another load may begin: not while images that can't be dropped now, or that are about to come,
        fill the host's share. Else adapters that wait for room on the device would push each other out of host
        memory and be read from disk over and over."""
        if self._host_full:
            return False
        if not self._loading and not self._copying and not any(map(self._waits, self._wanted)):
            return True  # what only passes through may be larger than the share
        mean = self._host_used // len(self._hosted) if self._hosted else 0
        used = mean * (len(self._loading) + 1)
        used += sum(entry.num_bytes for entry in self._copying.values())
        used += sum(self._entries[digest].num_bytes for digest in self._wanted if self._waits(digest))
        self._host_full = used > self._host_limit
        return not self._host_full

    def _waits(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.stage is _Stage.HOST

    def _trim_host(self) -> None:
        """Drop images until the rest is within bounds: the least recently used first, and those that somebody
        waits for after all others. One of those stays, or an image larger than the bound could never pass."""
        if self._host_used <= self._host_limit:
            return
        waiting = []
        for entry in list(self._hosted.values()):
            if entry.stage is _Stage.HOST and self._is_wanted(entry):
                waiting.append(entry)
            elif entry.stage is not _Stage.COPYING:
                self._drop_from_host(entry)
                if self._host_used <= self._host_limit:
                    return
        for entry in waiting[:-1]:
            self._drop_from_host(entry)
            if self._host_used <= self._host_limit:
                return

    def _drop_from_host(self, entry: _Entry[ImageT]) -> None:
        self._host_evictions += 1
        if entry.stage is _Stage.HOST:
            self._forget(entry)
        else:
            self._drop_image(entry)

    def _drop_image(self, entry: _Entry[ImageT]) -> None:
        if entry.image is not None:
            entry.image = None
            self._host_used -= entry.num_bytes
            if (
                self._hosted.get(entry.ref.digest) is entry
            ):  # a stuck copy is not listed, its successor may be
                del self._hosted[entry.ref.digest]

    # Bookkeeping.

    def _is_wanted(self, entry: _Entry[ImageT]) -> bool:
        return entry.wanted_in == self._pass

    def _touch(self, entry: _Entry[ImageT], now: float) -> None:
        entry.last_used = now
        for order in (self._idle, self._hosted):
            if entry.ref.digest in order:
                order.move_to_end(entry.ref.digest)

    def _retry_at(self, digest: str) -> float:
        failure = self._failures.get(digest)
        return float("-inf") if failure is None else failure.retry_at

    def _fail(self, entry: _Entry[ImageT], message: str, now: float) -> None:
        self._remember(entry.ref, message, now)
        self._forget(entry)

    def _remember(self, ref: AdapterRef, message: str, now: float) -> None:
        self._load_failures += 1
        last = self._failures.pop(ref.digest, None)
        backoff_s = FIRST_BACKOFF_S if last is None else min(2 * last.backoff_s, LAST_BACKOFF_S)
        self._failures[ref.digest] = _Failure(ref, message, now + backoff_s, backoff_s)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)
        self._wishes.pop(ref.digest, None)

    def _forget(self, entry: _Entry[ImageT]) -> None:
        """It is cold from now on."""
        if entry.slot >= 0:
            self._free_device(entry)
        self._drop_image(entry)
        self._loading.pop(entry.ref.digest, None)
        del self._entries[entry.ref.digest]

    def _entry_of(self, entry: _Entry[ImageT]) -> CacheEntry:
        digest = entry.ref.digest
        return CacheEntry(
            ref=entry.ref,
            state=self.state(digest),
            loading=entry.stage in (_Stage.LOADING, _Stage.COPYING),
            pinned=digest in self._pinned,
            leases=len(entry.leases),
            pages=len(entry.pages),
            device_bytes=entry.num_bytes if entry.pages else 0,
            host_bytes=entry.num_bytes if entry.image is not None else 0,
            last_used=entry.last_used,
            load_seconds=dict(entry.seconds),
            error=self.failure(digest) or None,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page and slot has exactly one owner, the counts are what they count,
        and each adapter is in the lists of its stage and in no other. For tests; costs O(pages + adapters)."""
        holders = [*self._entries.values(), *self._stuck]
        pages = [*self._free_pages, *(page for entry in holders for page in entry.pages)]
        assert sorted(pages) == list(range(self._num_pages)), "a page is lost or owned twice"
        slots = [*self._free_slots, *(entry.slot for entry in holders if entry.slot >= 0)]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or owned twice"
        assert self._num_leases == sum(len(entry.leases) for entry in holders), "leases are miscounted"
        held = sum(entry.num_bytes for entry in holders if entry.image is not None)
        assert self._host_used == held, "host memory is miscounted"
        for digest, entry in self._entries.items():
            stage, where = entry.stage, f"adapter {digest[:12]}, {entry.stage.value}"
            on_device = stage in (_Stage.COPYING, _Stage.DEVICE)
            assert entry.ref.digest == digest, where
            assert len(entry.pages) == (entry.num_pages if on_device else 0), (
                f"{where}: wrong number of pages"
            )
            assert (entry.slot >= 0) == on_device, f"{where}: slot {entry.slot}"
            assert all(lease.slot == entry.slot for lease in entry.leases), (
                f"{where}: a lease names another slot"
            )
            assert stage is _Stage.DEVICE or not entry.leases, f"{where}: leased"
            assert (digest in self._loading) == (stage is _Stage.LOADING) == (entry.load is not None), where
            assert (digest in self._copying) == (stage is _Stage.COPYING) == (entry.copy is not None), where
            assert (digest in self._hosted) == (entry.image is not None), where
            assert entry.image is not None or stage in (_Stage.LOADING, _Stage.DEVICE), f"{where}: no image"
            idle = stage is _Stage.DEVICE and not entry.leases and digest not in self._pinned
            assert (digest in self._idle) == idle, f"{where}: wrongly (not) in the line for eviction"
            assert not (entry.doomed and idle), f"{where}: deleted, unused and still there"
        for index in (self._loading, self._copying, self._idle, self._hosted):
            assert index.keys() <= self._entries.keys(), "a list names an adapter that is forgotten"
        assert len(self._loading) <= self._max_loads, "too many loads at a time"
