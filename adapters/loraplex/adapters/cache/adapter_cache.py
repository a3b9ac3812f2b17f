"""The state machine of adapters between disk, host memory and device, and their leases.

    cold ──load──▶ LOADING ──▶ HOST ──copy──▶ COPYING ──▶ DEVICE
                      │          ▲                          │
                      ▼          └───────── evicted ────────┘
                   (failed)      while its image is kept, else back to cold

One thread, the step thread, calls everything here. Nothing blocks: the transport begins work elsewhere and hands
back tickets that `poll` looks at. There is no torch and no clock but the injected one, so that the same code runs
under the simulator. Adapters are known by digest alone: two tenants with the same upload share one residency.

Loads and copies are decided here, evictions in `eviction`. The stages are kept in `entries`; `pins` and `failures`
hold pins and back-offs, `background_loads` loads what no request waits for. `cache_report` lists and counts what the
cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView
from typing import Generic

from loraplex.adapters.cache.background_loads import BackgroundLoads
from loraplex.adapters.cache.cache_report import count_usage, list_entries
from loraplex.adapters.cache.entries import CachedAdapter, CachedAdapters, Stage
from loraplex.adapters.cache.eviction import DeviceEviction, HostEviction, Pass
from loraplex.adapters.cache.failures import MAX_FAILURES, Failures
from loraplex.adapters.cache.load_times import LoadTimes
from loraplex.adapters.cache.pins import Pins
from loraplex.adapters.cache.residency import (
    AdapterState,
    AdapterTransport,
    CacheEntry,
    CacheUsage,
    ImageT,
    Lease,
    LeaseError,
    PinRefused,
    Residency,
)
from loraplex.adapters.cache.tenant_memory import TenantMemory
from loraplex.adapters.ref import AdapterRef

__all__ = ["AdapterCache", "Lease", "LeaseError", "PinRefused", "Residency"]


class AdapterCache(Generic[ImageT]):
    """The state machine over device pages, device slots and host memory.

    `num_pages` and `num_slots` are the arena's; `host_bytes` bounds the images in host memory, except those that
    are on their way to the device; `load_timeout_s` is what a load or a copy may take; at most `max_loads` loads
    are under way at a time, which should be what the transport can really do at a time. Device room is made by
    evicting the adapter with the lowest score (see `CachedAdapters`) that is not leased, not pinned, not asked for in
    the current pass and not only just arrived; nothing is evicted unless that makes enough room.
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
        self._timeout_s = load_timeout_s
        self._clock = clock
        self._max_loads = max_loads
        self._entries = CachedAdapters(transport, num_pages, num_slots)
        self._pins = Pins(num_pages, num_slots)
        self._pass = Pass()
        self.tenants = TenantMemory(self._entries, self._pins)
        self._device = DeviceEviction(self._entries, self._pins, self.tenants, self._pass)
        self._host = HostEviction(self._entries, self.tenants, self._pass, host_bytes)
        self._failures = Failures()
        self._background = BackgroundLoads(
            self._entries, self._failures, self._device, self._host, self.tenants
        )
        self._load_times = LoadTimes()
        self._damaged: dict[str, None] = {}
        self._lost: dict[str, str] = {}

    # The course of a step.

    def poll(self) -> None:
        """Collect finished loads and copies, fail those that take too long, and advance pinned and prefetched adapters.
        At the start of each step; also worth calling when there is nothing to compute."""
        now = self._clock()
        for entry in list(self._entries.loading.values()):
            self._poll_load(entry, now)
        for entry in [*self._entries.copying.values(), *self._entries.arriving.values()]:
            self._poll_copy(entry, now)
        self._entries.clear_stuck()
        if self._entries.host_shortage():
            self._background.give_up()
        self._host.trim()
        for ref in self._pins.refs.values():
            if self._failures.retry_at(ref.digest) <= now:
                self._bring_pinned(ref, now)
        self._background.start(now)

    def begin_pass(self) -> None:
        """A new scheduling pass: nothing is wanted yet."""
        self._pass.start()

    def next_timeout_s(self) -> float | None:
        """Seconds until time alone makes `poll` do something (a load to give up, a pinned adapter to try again);
        None if only a finished ticket can."""
        now = self._clock()
        entries = self._entries
        moving = (*entries.loading.values(), *entries.copying.values(), *entries.arriving.values())
        times = [entry.since + self._timeout_s for entry in moving]
        # A time that has passed waits for something else by now, for example memory.
        times += [at for digest in self._pins.refs if (at := self._failures.retry_at(digest)) > now]
        return max(0.0, min(times) - now) if times else None

    # Requests and leases.

    def request(
        self,
        ref: AdapterRef,
        may_evict: Callable[[str], bool] = lambda digest: True,
        lead_s: Callable[[], float] = lambda: 0.0,
    ) -> Residency:
        """Advance an adapter towards the device, and return its progress. No later request of the same pass evicts it.
        Only adapters that `may_evict` allows are evicted for it. `lead_s` is asked when its copy begins: the seconds of
        the first step that will read it, which may begin before the copy is done; 0: it may not."""
        now = self._clock()
        digest = ref.digest
        self._pass.digests[digest] = None
        if self._failures.retry_at(digest) > now and digest not in self._entries.by_digest:
            return Residency.FAILED
        residency = self._advance(ref, now, may_evict, lead_s)
        entry = self._entries.get(digest)
        if entry is not None:
            entry.ref = ref
            entry.doomed = False
            entry.wanted_in = self._pass.number
            self._entries.touch(entry, now)
        return residency

    def failure(self, digest: str) -> str:
        """Why `request` returned FAILED, in one line; empty where it did not."""
        return self._failures.message(digest)

    def take_damaged(self) -> tuple[str, ...]:
        """The digests whose stored bytes loads have found damaged or lost since this was last called."""
        damaged, self._damaged = self._damaged, {}
        return tuple(damaged)

    def take_lost(self) -> dict[str, str]:
        """Adapters on the device whose copy has failed since this was last called, by digest, and why. What was
        computed with them is worth nothing."""
        lost, self._lost = self._lost, {}
        return lost

    def is_arriving(self, digest: str) -> bool:
        """Whether it is on the device and its copy goes on: steps wait for each of its layers."""
        return digest in self._entries.arriving

    def acquire(self, digest: str, *, counts: bool = True) -> Lease:
        """Take a lease on an adapter that is on the device. `counts`: this is a use, for which it is kept longer.
        Raises LeaseError if it is not there."""
        entry = self._entries.get(digest)
        if entry is None or entry.stage is not Stage.DEVICE:
            raise LeaseError(f"adapter {digest[:12]} is not on the device: nothing to lease")
        if counts:
            entry.last_used = self._clock()
        return self._entries.lease(entry, counts=counts)

    def release(self, lease: Lease) -> None:
        """Give a lease back. Raises LeaseError on a lease that is not (or no longer) one of this cache."""
        entry = self._entries.end_lease(lease)
        if lease.counts:
            self._entries.touch(entry, self._clock())
        if not entry.leases:
            self._on_idle(entry)

    # What an operator may ask.

    def pin(self, ref: AdapterRef) -> None:
        """Keep an adapter on the device from now on; bring it there if it is not. Raises PinRefused where it could
        never be copied, or pins hold as much as they may (see `pins`; its size is known once it has been loaded)."""
        digest = ref.digest
        if digest in self._pins.refs:
            return
        now = self._clock()
        entry = self._entries.get(digest)
        failure = self._failures.get(digest)
        num_pages = entry.num_pages if entry is not None else 0 if failure is None else failure.num_pages
        unfit = self._device.why_never(digest, num_pages) if entry else self._known_unfit(digest, now)
        unfit = unfit or self.tenants.refusal(ref) or self._pins.refusal(ref, num_pages)
        if unfit:
            raise PinRefused(f"{unfit}; unpin another version first")
        self._pins.register(ref)
        self._background.forget(digest)
        if entry is not None:
            entry.doomed = False
            if entry.num_pages:
                self._pins.set_size(digest, entry.num_pages)
        if self._failures.retry_at(digest) <= now:
            self._bring_pinned(ref, now)

    def unpin(self, digest: str) -> None:
        """Let a version be evicted again. Does nothing for one that is not pinned."""
        held = digest in self._pins.held
        if self._pins.remove(digest) and held and digest in self._entries.by_digest:
            self._on_idle(self._entries.by_digest[digest])

    @property
    def pinned(self) -> tuple[str, ...]:
        """The versions that are pinned, on the device or not."""
        return tuple(self._pins.refs)

    def slot(self, digest: str) -> int:
        """The device slot of an adapter that is on the device. Raises KeyError if it is not."""
        return self._entries.on_device[digest].slot

    def is_held(self, digest: str) -> bool:
        """Whether a pin keeps it on the device, whatever else needs room there."""
        return digest in self._pins.held

    def set_elsewhere(self, digests: Collection[str]) -> None:
        """Evict these versions from the device first, in place of those named before: other engines serve them."""
        self._entries.elsewhere = frozenset(digests)

    def drop(self, digest: str) -> None:
        """The version was deleted: remove it, its pin and its failures, as soon as no lease and no copy needs it. A
        later request loads it again if its files are still there."""
        self._pins.remove(digest)
        self._background.forget(digest)
        self._failures.clear(digest)
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.doomed = True
        if entry.load is not None:
            entry.load.cancel()
            self._background.dropped(entry)
        if entry.copy is None and not entry.leases:
            self._entries.remove_entry(entry, "deleted")

    def prefetch(self, ref: AdapterRef) -> None:
        """Load an adapter into host memory when the disk is idle, and copy it to the device if it fits without an
        eviction. Until a request names it, it is the first to be evicted. A hint: it may be dropped, and fails
        silently."""
        if ref.digest not in self._pins.refs:
            self._background.hints.enqueue(ref)

    def warm(self, refs: Iterable[AdapterRef]) -> None:
        """Load these adapters behind all other loads, in their order: to the device as far as it has free memory, then
        to host memory. They replace those of the last call. Hints as `prefetch` takes them."""
        self._background.warm(ref for ref in refs if ref.digest not in self._pins.refs)

    # What others may know.

    def watch_residency(self, on_residency: Callable[[str, bool], None]) -> None:
        """Call `on_residency(digest, is_resident)` whenever a version comes into memory, or leaves device and host."""
        self._entries.on_residency = on_residency

    def state(self, digest: str) -> AdapterState:
        """Where an adapter is: on the device, in host memory, or on disk only (also: not known at all)."""
        return self._entries.state(digest)

    def seconds_left(self, digest: str, loads_ahead: int = 0) -> float:
        """Until an adapter is on the device, as far as earlier loads tell, if `loads_ahead` others that have not begun
        come first. Does not count a wait for memory that is in use."""
        now = self._clock()
        left = self._load_times.seconds_left(
            self._entries.get(digest), now,
            loads_ahead=loads_ahead + len(self._entries.loading), max_loads=self._max_loads,
        )  # fmt: skip
        return max(left, self._failures.retry_at(digest) - now)

    @property
    def on_device(self) -> KeysView[str]:
        """The versions that can be leased now."""
        return self._entries.on_device.keys()

    def residency(self) -> dict[str, AdapterState]:
        """Every version that is not cold."""
        return self._entries.states()

    def entries(self, digests: Iterable[str] | None = None) -> tuple[CacheEntry, ...]:
        """Every version that is in memory, loading, pinned, or whose load failed recently: those of `digests`, or all
        of them."""
        return list_entries(self._entries, self._pins, self._failures, digests, self._clock())

    def usage(self) -> CacheUsage:
        limit, now = self._host.limit, self._clock()
        return count_usage(self._entries, self._pins, self._failures, self._background, limit, now)

    @property
    def num_moves(self) -> int:
        """Loads and copies that ended so far, well or badly. It costs next to nothing."""
        return self._entries.loads + self._entries.copies + self._failures.count

    @property
    def is_warming(self) -> bool:
        """Whether adapters of `warm` are still to come."""
        return self._background.is_warming

    # The way to the device.

    def _advance(
        self,
        ref: AdapterRef,
        now: float,
        may_evict: Callable[[str], bool] = lambda digest: True,
        lead_s: Callable[[], float] = lambda: 0.0,
    ) -> Residency:
        """Begin the adapter's next stage, if possible."""
        entry = self._entries.get(ref.digest)
        if entry is None:
            return self._begin_load(ref, now) if not self._known_unfit(ref.digest, now) else Residency.FAILED
        if entry.stage is Stage.DEVICE:
            return Residency.READY
        if entry.stage is Stage.HOST:
            return self._begin_copy(entry, ref.tenant_id, now, may_evict, lead_s)
        return Residency.LOADING

    def _bring_pinned(self, ref: AdapterRef, now: float) -> None:
        """Advance a pinned adapter. Pins leave one load at a time to requests."""
        if not self._pins.may_come(ref):
            return
        entry = self._entries.get(ref.digest)
        if entry is None:
            loading = sum(digest in self._pins.refs for digest in self._entries.loading)
            if loading >= max(1, self._max_loads - 1):
                return
        elif entry.stage is Stage.DEVICE:
            if self._pins.hold(ref.digest, entry.num_pages):
                self._entries.idle.pop(ref.digest, None)
            return
        self._advance(ref, now)

    def _begin_load(self, ref: AdapterRef, now: float) -> Residency:
        if not self._may_begin_load() and not (self._background.give_way() and self._may_begin_load()):
            return Residency.NO_ROOM
        self._entries.load(ref, now)
        return Residency.LOADING

    def _may_begin_load(self) -> bool:
        return len(self._entries.loading) < self._max_loads and self._host.may_load()

    def _begin_copy(
        self,
        entry: CachedAdapter[ImageT],
        tenant_id: str,
        now: float,
        may_evict: Callable[[str], bool],
        lead_s: Callable[[], float],
    ) -> Residency:
        if unfit := self._device.why_never(entry.ref.digest, entry.num_pages):
            self._fail(entry, unfit, now)
            return Residency.FAILED
        victims = self._device.victims(entry, tenant_id, may_evict)
        if victims is None:
            return Residency.NO_ROOM
        excess = self.tenants.excess(tenant_id, entry.num_bytes)
        for victim in victims:
            self._entries.evict(victim, for_cap=excess > 0)
            excess -= victim.num_bytes
        self._entries.copy(entry, tenant_id, now, lead_s())
        self._pins.hold(entry.ref.digest, entry.num_pages)
        self._poll_copy(entry, self._clock())  # it may be done already
        return Residency.LOADING

    def _poll_load(self, entry: CachedAdapter[ImageT], now: float) -> None:
        ticket = entry.load
        assert ticket is not None
        if not ticket.done:
            if now - entry.since >= self._timeout_s:
                ticket.cancel()
                self._fail(entry, f"its load took longer than {self._timeout_s:g} s", now)
            return
        if ticket.error is not None:
            if ticket.damaged and len(self._damaged) < MAX_FAILURES:
                self._damaged[entry.ref.digest] = None
            self._fail(entry, ticket.error, now)
            return
        self._entries.loaded(entry, ticket, now)
        self._load_times.took("disk", now - entry.since)
        self._pins.set_size(entry.ref.digest, entry.num_pages)
        # The back-off continues for an adapter that again does not fit.
        if unfit := self._device.why_never(entry.ref.digest, entry.num_pages):
            self._fail(entry, unfit, now)
            return
        self._failures.clear(entry.ref.digest)
        self._background.loaded(entry, now)

    def _poll_copy(self, entry: CachedAdapter[ImageT], now: float) -> None:
        ticket = entry.copy
        assert ticket is not None
        done = ticket.done  # once: a copy that ends while it is looked at is seen by the next poll
        error = ticket.error if done else None
        arriving, late = entry.stage is Stage.DEVICE, ticket.given_up
        if not done and now - entry.since >= self._timeout_s:
            late = late or f"its copy to the device took longer than {self._timeout_s:g} s"
        if (late and not done) or (arriving and (late or error)):
            # Its pages stay its own: the copy may write to them, and a step in flight may read them.
            message = error or late
            self._entries.strand(entry)
            self._remember(entry.ref, message, now, entry.num_pages)
            if arriving:
                self._lost[entry.ref.digest] = message
        elif error is not None:
            self._fail(entry, error, now)
        elif not arriving and (done or ticket.usable):
            self._load_times.took("copy", now - entry.since)
            self._entries.copied(entry, now, is_whole=done)
            entry.safe_until = self._pass.number + 1
            self._on_idle(entry)
        elif arriving and done:
            self._entries.arrived(entry, now)
            self._on_idle(entry)

    # Bookkeeping.

    def _on_idle(self, entry: CachedAdapter[ImageT]) -> None:
        """The entry's last lease, its copy or its pin has ended."""
        if entry.stage is not Stage.DEVICE or entry.leases or entry.copy is not None:
            return
        if entry.doomed:
            self._entries.remove_entry(entry, "deleted")
        elif entry.ref.digest not in self._pins.held:
            self._entries.make_idle(entry)

    def _known_unfit(self, digest: str, now: float) -> str:
        """Why an adapter that was loaded and did not fit still does not fit. Its size is known, so it is not read
        again, and its back-off is renewed. Empty if it fits, or was never loaded."""
        failure = self._failures.get(digest)
        if failure is None or not failure.num_pages:
            return ""
        if unfit := self._device.why_never(digest, failure.num_pages):
            failure.again(unfit, now)
        return unfit

    def _fail(self, entry: CachedAdapter[ImageT], message: str, now: float) -> None:
        self._remember(entry.ref, message, now, entry.num_pages)
        self._background.failed(entry)
        self._entries.remove_entry(entry, "failed")

    def _remember(self, ref: AdapterRef, message: str, now: float, num_pages: int) -> None:
        self._failures.record(ref, message, now, num_pages)
        self._pins.release(ref.digest)
        self._background.forget(ref.digest)
