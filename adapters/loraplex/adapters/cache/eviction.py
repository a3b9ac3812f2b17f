"""Eviction: which adapters leave the device and host memory so that another fits.

The device evicts the adapters with the lowest scores (see `CachedAdapters`), host memory the least recently used ones,
and both none that the current scheduling pass has requested. `adapter_cache` begins loads and copies. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from loraplex.adapters.cache.entries import CachedAdapter, CachedAdapters, Stage
from loraplex.adapters.cache.pins import Pins
from loraplex.adapters.cache.residency import ImageT
from loraplex.adapters.cache.tenant_memory import TenantMemory


class Pass:
    """The current scheduling pass: its `number`, and the `digests` that it has requested."""

    def __init__(self) -> None:
        self.number = 0
        self.digests: dict[str, None] = {}

    def start(self) -> None:
        self.number += 1
        self.digests.clear()

    def wants(self, entry: CachedAdapter[ImageT]) -> bool:
        return entry.wanted_in == self.number


class DeviceEviction(Generic[ImageT]):
    """Evicts for pages and slots. Those of pins and of hung copies are never freed."""

    def __init__(
        self, entries: CachedAdapters[ImageT], pins: Pins, tenants: TenantMemory[ImageT], current: Pass
    ) -> None:
        self._entries = entries
        self._pins = pins
        self._tenants = tenants
        self._pass = current

    def is_free(self, entry: CachedAdapter[ImageT], tenant_id: str) -> bool:
        """Whether an adapter fits for this tenant without an eviction."""
        return self.has_free(tenant_id, entry.num_pages, entry.num_bytes)

    def has_free(self, tenant_id: str, num_pages: int, num_bytes: int) -> bool:
        """Whether so much fits for this tenant without an eviction."""
        fits = bool(self._entries.free_slots) and num_pages <= len(self._entries.free_pages)
        return fits and self._tenants.excess(tenant_id, num_bytes) <= 0

    def victims(
        self, entry: CachedAdapter[ImageT], tenant_id: str, may_evict: Callable[[str], bool]
    ) -> list[CachedAdapter[ImageT]] | None:
        """The adapters to evict so that `entry` fits for this tenant: first those that no request has named or that
        live elsewhere, then the lowest scores, and of equal ones the least recently used; None if that is not enough. A
        tenant at its cap evicts its own first, and what another has reserved is not evicted."""
        pages = len(self._entries.free_pages)
        slots = len(self._entries.free_slots)
        excess = self._tenants.excess(tenant_id, entry.num_bytes)
        if pages >= entry.num_pages and slots and excess <= 0:
            return []
        reserved = self._tenants.reserved_from(tenant_id, entry.num_pages)
        candidates = []
        elsewhere = self._entries.elsewhere

        def rank(entry: CachedAdapter[ImageT]) -> tuple[bool, float]:
            return not entry.unasked and entry.ref.digest not in elsewhere, entry.score

        for victim in sorted(self._entries.idle.values(), key=rank):
            spared = self._pass.wants(victim) or victim.safe_until >= self._pass.number
            if not spared and victim.ref.digest not in reserved:
                candidates.append(victim)
        victims: list[CachedAdapter[ImageT]] = []
        own = (victim for victim in candidates if victim.device_tenant == tenant_id)
        for victim in own:
            if excess <= 0:
                break
            if may_evict(victim.ref.digest):
                victims.append(victim)
                excess -= victim.num_bytes
        pages += sum(victim.num_pages for victim in victims)
        slots += len(victims)
        others = (victim for victim in candidates if victim not in victims)
        while excess <= 0 and (pages < entry.num_pages or slots < 1):
            found = next(others, None)
            if found is None:
                return None
            if may_evict(found.ref.digest):
                victims.append(found)
                pages += found.num_pages
                slots += 1
        return victims if excess <= 0 else None

    def why_never(self, digest: str, num_pages: int) -> str:
        """Why an adapter of `num_pages` pages could not be copied even if no adapter were in use: pins or hung copies
        hold too much. Empty if it could."""
        kept = list(self._entries.stuck)
        kept += [self._entries.by_digest[other] for other in self._pins.held.keys() - {digest}]
        total = self._entries.num_pages
        room = total - sum(other.num_pages for other in kept)
        if num_pages > room:
            has = f"the device memory for adapters has {total}"
            if kept:
                has += f", and {total - room} of them are pinned"
            return f"it does not fit: it needs {num_pages} pages of device memory; {has}"
        if len(kept) >= self._entries.num_slots:
            return f"it does not fit: all {len(kept)} slots on the device are pinned"
        return ""


class HostEviction(Generic[ImageT]):
    """Host memory: `limit` bytes for images, except those that are on their way to the device. Loads that wait for some
    of it are given it at once, as far as there are images to drop."""

    def __init__(
        self, entries: CachedAdapters[ImageT], tenants: TenantMemory[ImageT], current: Pass, limit: int
    ) -> None:
        self._entries = entries
        self._tenants = tenants
        self._pass = current
        self.limit = limit
        self._full_in = -1  # the last pass that found it full

    def may_load(self) -> bool:
        """Whether another load may begin: not while images that can't be dropped now, or that are about to come,
        fill the host's share. Else adapters that wait for room on the device would push each other out of host
        memory and be read from disk over and over."""
        if self._full_in == self._pass.number:
            return False
        if (
            not self._entries.loading
            and not self._entries.being_copied
            and not any(map(self._waits, self._pass.digests))
        ):
            return True  # one that only passes through may be larger than the limit
        mean = self._entries.host_bytes // len(self._entries.hosted) if self._entries.hosted else 0
        used = mean * (len(self._entries.loading) + 1)
        used += sum(entry.num_bytes for entry in self._entries.being_copied)
        used += sum(
            self._entries.by_digest[digest].num_bytes for digest in self._pass.digests if self._waits(digest)
        )
        if used <= self.limit:
            return True
        self._full_in = self._pass.number
        return False

    def look_again(self) -> None:
        """A load was cancelled: another one may begin in the same pass."""
        self._full_in = -1

    def is_free(self) -> bool:
        """Whether one more image, of the usual size, would push none out."""
        hosted = len(self._entries.hosted)
        return not hosted or self._entries.host_bytes * (hosted + 1) <= self.limit * hosted

    def drop_spare(self) -> bool:
        """Drop one image of an adapter that is on the device and that no request has named; False if there is none."""
        for entry in self._entries.hosted.values():
            if not entry.unasked:
                return False  # those that no request has named are the first
            if entry.stage is Stage.DEVICE and entry.copy is None:
                self._entries.drop_image(entry)
                return True
        return False

    def trim(self) -> None:
        """Drop images until the rest is within the limit and no load waits for memory: the least recently used first,
        those with waiting requests last. One of the latter stays, or an image larger than the limit could never be
        copied. Before that, each tenant's own down to its cap, except those with waiting requests."""
        for entry in self._tenants.over_host_cap() if self._tenants.host_caps else ():
            if entry.copy is None and not self._pass.wants(entry):
                self._entries.drop_image(entry, for_cap=True)
        if self._is_enough():
            return
        waiting = []
        for entry in list(self._entries.hosted.values()):
            if entry.stage is Stage.HOST and self._pass.wants(entry):
                waiting.append(entry)
            elif entry.copy is None:
                self._entries.drop_image(entry)
                if self._is_enough():
                    return
        for entry in waiting[:-1]:
            self._entries.drop_image(entry)
            if self._is_enough():
                return

    def _is_enough(self) -> bool:
        return self._entries.host_bytes <= self.limit and not self._entries.host_shortage()

    def _waits(self, digest: str) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and entry.stage is Stage.HOST
